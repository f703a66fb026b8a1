"""Classes and functions of programs in actors: of a module that workers cannot import, of a script, of a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.marshal.modules import load

MODULE = """
import dataclasses, enum
import numpy as np
import zcactor as zc

CALLS = []

class Mine(Exception):
    pass

class Colour(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Box:
    array: object
    colour: Colour = Colour.RED

def twice(x):
    return 2 * x

@zc.actor
class Worker:
    def __init__(self):
        self.calls = 0
    @zc.method
    def open(self, box):
        CALLS.append(box)
        return Box(twice(box.array), box.colour), len(CALLS)
    def fail(self):
        raise Mine("x")
"""

BODY = """
    async with zc.init():
        worker = await zc.spawn(Worker)
        box, calls = await worker.open(Box(np.arange(50_000)))
        assert type(box) is Box and box.colour is Colour.RED and box.array[-1] == 99_998
        assert CALLS == [] and calls == 1
        assert (await worker.open(box))[1] == 2
        try:
            await worker.fail()
        except Mine as error:
            assert isinstance(error, zc.RemoteError)
        else:
            raise AssertionError("nothing was raised")
        other = await zc.spawn(Worker)
        assert (await other.open(box))[1] == 1
"""


@pytest.mark.slow
@pytest.mark.usefixtures("restored_imports")
async def test_module_that_workers_cannot_import(tmp_path: Path) -> None:
    module: Any = load("only_the_driver_has_it", tmp_path / "only_the_driver_has_it.py", MODULE)
    async with zc.init():
        worker = await zc.spawn(module.Worker)
        box, calls = await worker.open(module.Box(np.arange(50_000)))
        assert type(box) is module.Box
        assert box.colour is module.Colour.RED
        assert box.array[-1] == 99_998
        assert (calls, module.CALLS) == (1, [])
        assert (await worker.open(box))[1] == 2
        with pytest.raises(module.Mine) as caught:
            await worker.fail()
        assert isinstance(caught.value, zc.RemoteError)


def run(*command: str, cwd: Path) -> None:
    """Run a program that starts a node of its own."""
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"{MODULE}\nasync def main():\n{BODY}\nzc.run(main())\n")
    run("script.py", cwd=tmp_path)


@pytest.mark.slow
def test_module_beside_a_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(MODULE)
    (tmp_path / "script.py").write_text(f"from beside import *\n\nasync def main():\n{BODY}\nzc.run(main())\n")
    run("script.py", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_pytest_module(tmp_path: Path, mode: str) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    file = tmp_path / "deep" / "er" / "test_it.py"
    file.write_text(f"{MODULE}\nimport asyncio\nasync def main():\n{BODY}\ndef test_it():\n    asyncio.run(main())\n")
    run("-m", "pytest", f"--import-mode={mode}", "-q", "-p", "no:cacheprovider", str(file), cwd=tmp_path)
