"""Programs in each form in which people write them: notebooks, scripts, modules, and text on standard input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.driver.programs import ROOT, Program

pytestmark = pytest.mark.slow

CELLS = [
    "import zcactor as zc, asyncio, numpy as np, os, sys\nwritten, write = [], sys.stdout.write\n"
    "sys.stdout.write = lambda text: (written.append(text), write(text))[1]\n"
    "node = await zc.init()\nnode.node_id",
    "@zc.actor\nclass Shard:\n    def __init__(self, factor): self.factor = factor\n"
    "    def scaled(self, x):\n        print('scaling')\n        return x * self.factor\n"
    "    def version(self): return 1",
    "shard = await Shard.spawn(3)\n"
    "answers = float((await shard.scaled(np.ones(100_000))).sum()), await shard.version(), await shard.scaled(2)\n"
    "while 'scaling' not in ''.join(written): await asyncio.sleep(0.01)  # a line may come after its method's answer\n"
    "answers",
    "@zc.actor\nclass Shard:\n    def version(self): return HELPER()\ndef HELPER(): return 2",
    "await (await Shard.spawn()).version(), await shard.version()",
    "class Plain:\n    def shape(self, x): return x.shape\nawait (await zc.spawn(Plain)).shape(zc.zeros((2, 3)))",
    "try:\n    await zc.init()\nexcept zc.AlreadyInitialized as error:\n    print('twice:', error)",
    "import signal\nasync def late():\n    await asyncio.sleep(0)\n"
    "    os.kill(os.getpid(), signal.SIGINT)\n    await asyncio.sleep(60)\n"
    "await late()",
    "await shard.version()",
    "zc.in_store(np.ones(100_000))",
    "await zc.shutdown()",
    "zc.in_store(np.ones(100_000))",
    "async with zc.init():\n    print(await (await Shard.spawn()).version())",
]
"""A session: the result of each cell is in `RESULTS`."""

RESULTS = {2: "(300000.0, 1, 6)", 4: "(2, 1)", 5: "(2, 3)", 8: "1", 9: "True", 11: "False"}


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs the cells of a notebook in a kernel of its own."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    where = {"metadata": {"path": str(tmp_path)}}

    def run_cells(notebook: Any, *, allow_errors: bool = False) -> None:
        nbclient.NotebookClient(
            notebook, timeout=50, kernel_name="python3", allow_errors=allow_errors, resources=where
        ).execute()

    return run_cells


def test_the_tutorials_notebook_gives_what_it_shows(execute: Callable[..., None]) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "docs" / "tutorial" / "notebook.ipynb", as_version=4)
    shown = [_text(cell) for cell in notebook.cells]
    execute(notebook)
    assert [_text(cell) for cell in notebook.cells] == shown
    assert sum(map(bool, shown)) >= 4


def _text(cell: Any) -> list[str]:
    """The output of a cell: printed lines, and the value of its last one."""
    outputs = cell.get("outputs", ())
    return [output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs]


def test_a_notebook(execute: Callable[..., None]) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    execute(notebook, allow_errors=True)
    outputs = [cell.outputs for cell in notebook.cells]
    errors = {number: _error(output) for number, output in enumerate(outputs) if _error(output)}
    assert set(errors) <= {7}, errors
    assert "KeyboardInterrupt" in errors[7] or "CancelledError" in errors[7]
    assert {number: _result(outputs[number]) for number in RESULTS} == RESULTS
    text = "".join(output.text for cell in outputs for output in cell if output.output_type == "stream")
    assert "(Shard pid=" in text
    assert "scaling" in text
    assert "twice: zc.init was called before" in text
    assert text.rstrip().endswith("2")


def _error(outputs: list[Any]) -> str:
    return "".join(f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error")


def _result(outputs: list[Any]) -> str:
    return "".join(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")


MAIN = """
{imports}
class Counter:
    step = STEP = 2
    def __init__(self): self.count = 0
    def add(self): self.count += helper(self.step); return self.count
def helper(x): return x + OFFSET
OFFSET = 3
async def main():
    async with zc.init():
        assert await (await zc.spawn(Counter)).add() == 5
        actor = await {spawned}
        print("result", await actor.add())
if __name__ == "__main__":
    zc.run(main())
"""
IMPORTS = "import zcactor as zc"


def run(*argv: str, cwd: Path, text: str | None = None, **env: str) -> str:
    """Run Python and return its output; fail where it fails or writes to standard error."""
    found = subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        input=text,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **env},
        check=False,
        timeout=50,
    )
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout


def test_a_script_with_its_classes_in_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAIN.format(imports=IMPORTS, spawned="zc.spawn(Counter)"))
    assert run("script.py", cwd=tmp_path) == "result 5\n"
    assert run("script.py", cwd=tmp_path, ZCACTOR_LOOP="asyncio") == "result 5\n"
    assert run(str(tmp_path / "script.py"), cwd=Path("/")) == "result 5\n"


def test_a_script_with_a_module_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("class Beside:\n    def add(self): return __name__\n")
    (tmp_path / "script.py").write_text(
        MAIN.format(imports=f"{IMPORTS}\nfrom beside import Beside", spawned="zc.spawn(Beside)")
    )
    assert run(str(tmp_path / "script.py"), cwd=Path("/")) == "result beside\n"


def test_a_module_of_a_package(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("class Beside:\n    def add(self): return __name__\n")
    (package / "mod.py").write_text(
        MAIN.format(imports=f"{IMPORTS}\nfrom .beside import Beside", spawned="zc.spawn(Beside)")
    )
    assert run("-m", "pkg.mod", cwd=tmp_path) == "result pkg.beside\n"


def test_a_program_as_text(tmp_path: Path) -> None:
    text = MAIN.format(imports=IMPORTS, spawned="zc.spawn(Counter)")
    assert run("-c", text, cwd=tmp_path) == "result 5\n"
    assert run("-", cwd=tmp_path, text=text) == "result 5\n"
    assert run(cwd=tmp_path, text=text) == "result 5\n"


def test_unusual_import_paths(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "beside.py").write_text("class Beside:\n    def add(self): return __name__\n")
    (tmp_path / "shadow").mkdir()
    for name in ("secrets", "uvloop", "worker", "queue"):  # modules of the working directory, which is not on the path
        (tmp_path / "shadow" / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    imports = (
        f"import sys, pathlib\nsys.path[:0] = ['', '../lib', pathlib.Path('/nowhere'), None, '/no/such.zip', 7]\n"
        f"sys.path.remove('')\n{IMPORTS}\nfrom beside import Beside"
    )
    (tmp_path / "script.py").write_text(MAIN.format(imports=imports, spawned="zc.spawn(Beside)"))
    assert run("../script.py", cwd=tmp_path / "shadow") == "result beside\n"


def test_zcactor_that_is_not_on_the_path(tmp_path: Path) -> None:
    imports = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport zcactor as zc\nsys.path.pop(0)"
    (tmp_path / "script.py").write_text(MAIN.format(imports=imports, spawned="zc.spawn(Counter)"))
    assert run("script.py", cwd=tmp_path, PYTHONPATH="") == "result 5\n"


def test_output_that_is_not_unicode(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        f"{IMPORTS}\nclass Says:\n    def say(self): print('caf\\xe9 \\u20ac')\n"
        "async def main():\n    async with zc.init(): await (await zc.spawn(Says)).say()\nzc.run(main())\n"
    )
    out = run("script.py", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert out.partition(") ")[2] == "caf\\xe9 \\u20ac\n"


def test_a_program_in_a_thread() -> None:
    source = """
async def main():
    async with zc.init():
        tell(pid=await (await zc.spawn(Busy)).pid())
for _ in range(2):
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
"""
    with Program(source) as program:
        program.told("pid")
        program.told("pid")
        assert program.status() == 0
        assert program.stderr() == ""
        program.assert_clean()


def test_one_loop_after_the_other_without_a_shutdown() -> None:
    source = """
async def first():
    await zc.init()
    return await zc.spawn(Busy)
async def second(old):
    async with zc.init():
        tell(pid=await (await zc.spawn(Busy)).pid())
        try: await old.pid()
        except (zc.ZcactorError, RuntimeError) as error: tell(error=type(error).__name__)
async def third():
    await zc.init()
async def fourth():
    await zc.shutdown()
    try: await zc.shutdown()
    except zc.NotInitialized: tell(end=1)
old = zc.run(first())
zc.run(second(old))
zc.run(third())
zc.run(fourth())
"""
    with Program(source) as program:
        program.told("pid")
        program.told("error")
        program.told("end")
        assert program.status() == 0
        program.assert_clean()
