"""The pages for people with a task: each program is saved under its name, run, and prints what its page shows. And the
recipe for FastAPI, to which one of them leads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "who").glob("*.md") if path.stem != "README"}
PACKAGES = {"frame": ("pandas",), "model": ("fastapi", "httpx")}
"""Packages that programs need, by the names of their pages."""
ASKING = """
import asyncio
import httpx

async def ask() -> None:
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        print((await client.post("http://app/predict", content=np.ones(5).tobytes())).json())
        print((await client.get("http://app/sum/7")).json())

asyncio.run(ask())
"""
"""A client of the recipe's application: it calls each handler once."""
LINES = 40
"""The most lines of a program, where blank ones do not count."""


def run(path: Path, program: str, packages: Sequence[str]) -> str:
    """The output of a program that is saved at `path`, and complains of nothing. Without its packages it is skipped."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    path.write_text(program)
    done = subprocess.run(
        [sys.executable, path.name], cwd=path.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_a_page(name: str, tmp_path: Path) -> None:
    text = PAGES[name]
    (program,) = BLOCK.findall(text)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert f"Save this as `{name}.py`" in text
    assert len(re.findall(r"^.*\S", program, re.MULTILINE)) <= LINES
    printed = run(tmp_path / f"{name}.py", program, PACKAGES.get(name, ()))
    # Seconds are those of the machine, and pickles of other versions of a library are a little longer or shorter.
    seconds = re.sub(r"\d+\\\.\d+\\ s\b", r"\\d+\\.\\d+ s", re.escape(shown))
    assert re.fullmatch(re.sub(r"[\d,]{5,}\\ bytes\\ pickled", r"[\\d,]{5,} bytes pickled", seconds), printed)


def test_the_recipe_for_fastapi(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "asyncio.md").read_text()
    (recipe,) = [block for block in BLOCK.findall(page) if "lifespan" in block]
    assert run(tmp_path / "program.py", f"{recipe}{ASKING}", ("fastapi", "httpx")) == "5.0\n7.0\n"
