"""The first ten minutes of a newcomer: the ways in which people first run the program of the README.

As a script, typed into IPython, under pytest, behind FastAPI, and the notebook of the tutorial. Each way is a folder
with a few files and a command of the interpreter; `tools/dist_check.py` runs them all from each wheel, in an empty
environment without a compiler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["PACKAGES", "PATIENCE", "Way", "block", "ways"]

PATIENCE: Final = 60.0
"""Seconds in which each way has to answer: many times what it takes, as a machine may be busy."""
PACKAGES: Final = ("fastapi", "httpx", "ipykernel", "ipython", "nbclient", "pytest", "pytest-asyncio")
"""The packages that the ways need beside zcactor and its own."""
_ANSWER: Final = "30000000.0 with 0 bytes copied"

_TYPED: Final = """\
{beginning}
node = await zc.init()
scaler = await Scaler.spawn()
result = await scaler.scale(np.ones(10_000_000), 3.0)
print(result.sum(), "with", zc.stats().bytes_copied, "bytes copied")
await zc.shutdown()
"""
_TEST: Final = """\
import numpy as np
import pytest
import pytest_asyncio
import zcactor as zc
from program import Scaler


@pytest_asyncio.fixture
async def node():
    async with zc.init() as runtime:
        yield runtime


@pytest.mark.asyncio
async def test_scale(node):
    scaler = await Scaler.spawn()
    assert (await scaler.scale(np.ones(10_000_000), 3.0)).sum() == 30_000_000
    assert zc.stats().bytes_copied == 0
"""
_CLIENT: Final = """\
import asyncio

import httpx
import numpy as np
from app import app


async def main():
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://app") as web:
        answer = await web.post("/predict", content=np.ones(10_000_000).tobytes())
        print(answer.status_code, answer.text)


asyncio.run(main())
"""
_NOTEBOOK: Final = """\
import nbclient, nbformat

notebook = nbformat.read("notebook.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=50, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(output.get("text") or output["data"]["text/plain"])
"""


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        name: for messages.
        files: the texts of files, by name.
        words: the arguments of the interpreter, in the folder with the files.
        expected: the text that the output has.
        packages: the packages that it imports, by the names of their modules.
    """

    name: str
    files: Mapping[str, str]
    words: tuple[str, ...]
    expected: str
    packages: tuple[str, ...] = ()


def block(page: str, text: str) -> str:
    """The first Python block of a page that has `text` in it.

    Raises:
        ValueError: there is none.
    """
    for found in re.findall(r"^```python[^\n]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if text in found:
            return str(found)
    raise ValueError(f"no Python block of the page has {text!r}")


def ways(root: Path) -> list[Way]:
    """All ways.

    Args:
        root: the folder with the README and the pages.

    Raises:
        ValueError: a page has no such program.
    """
    program = block((root / "README.md").read_text("utf-8"), "zc.run(")
    guarded = program.replace("zc.run(main())", 'if __name__ == "__main__":\n    zc.run(main())')
    beginning = program.partition("async def main")[0]
    app = block((root / "docs/how-to/asyncio.md").read_text("utf-8"), "FastAPI(")
    notebook = (root / "docs/tutorial/notebook.ipynb").read_text("utf-8")
    return [
        Way("as a script", {"program.py": program}, ("program.py",), _ANSWER),
        Way("as a module", {"program.py": program}, ("-m", "program"), _ANSWER),
        Way("run by IPython", {"program.py": program}, ("-m", "IPython", "program.py"), _ANSWER, ("IPython",)),
        Way(
            "typed into IPython", {"typed.ipy": _TYPED.format(beginning=beginning)}, ("-m", "IPython", "typed.ipy"),
            _ANSWER, ("IPython",),
        ),
        Way(
            "under pytest", {"program.py": guarded, "test_program.py": _TEST}, ("-m", "pytest", "-q"), "1 passed",
            ("pytest", "pytest_asyncio"),
        ),
        Way("behind FastAPI", {"app.py": app, "client.py": _CLIENT}, ("client.py",), "200 10000000.0",
            ("fastapi", "httpx")),
        Way("as a notebook", {"notebook.ipynb": notebook, "run.py": _NOTEBOOK}, ("run.py",), "'mean': 500000.0",
            ("nbclient", "ipykernel")),
    ]  # fmt: skip
