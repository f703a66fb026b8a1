"""`tools/layout.py`: the package has the structure that it checks, and it reports violations."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.layout import cycles, imports, main

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_no_file_imports_itself_through_others() -> None:
    assert main([str(ROOT / "zcactor")]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "from zcactor.rpc.session import Session",
        "import zcactor.rpc.session",
        "from zcactor.rpc import session",
        "def late() -> None:\n    from zcactor.rpc.session import Session",
        "if TYPE_CHECKING:\n    from zcactor.rpc.session import Session",
    ],
)
def test_an_import_of_any_kind_that_closes_a_cycle_is_found(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "zcactor"
    shutil.copytree(ROOT / "zcactor", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (copy / "rpc" / "incoming.py").open("a") as file:
        file.write(f"\n{line}\n")
    assert main([str(copy)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    others = [line for line in others if line.startswith("  ")]
    assert first == f"{len(others)} files import each other:"
    assert "  zcactor.rpc.incoming imports zcactor.rpc.session" in others
    assert any(re.match("  zcactor.rpc.session imports .*zcactor.rpc.incoming", each) for each in others)


def test_groups_are_told_apart() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles(graph) == [["d", "e"], ["a", "b", "c"]]


def test_a_folder_without_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "there is no Python file" in capsys.readouterr().err


@pytest.mark.slow
def test_generated_code_is_left_out() -> None:
    assert not [name for name in imports(ROOT / "zcactor") if "_fbs" in name]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package without built files, for tests that change it."""
    folder = tmp_path / "zcactor"
    shutil.copytree(ROOT / "zcactor", folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("ids.py", "import zcactor.errors", "zcactor.ids imports zcactor.errors, which is not on a floor below"),
        (
            "rpc/call.py",
            "if TYPE_CHECKING:\n    from zcactor.peers.requests import Requests",
            "zcactor.rpc.call imports zcactor.peers.requests, which is not on a floor below",
        ),
        ("tower/__init__.py", "", "zcactor.tower is in no room of FLOORS"),
        (
            "control/head.py",
            "def late() -> None:\n    import zcactor.assembly.process",
            "zcactor.control.head imports zcactor.assembly.process, which is for assembly, driver, node, simulation, "
            "testing",
        ),
    ],
)
def test_a_room_that_looks_up_is_seen(
    copy: Path, capsys: pytest.CaptureFixture[str], file: str, line: str, said: str
) -> None:
    copy.joinpath(file).parent.mkdir(exist_ok=True)
    with copy.joinpath(file).open("a") as opened:
        opened.write(f"\n\n{line}\n")
    assert main([str(copy)]) == 1
    assert said in capsys.readouterr().out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        (
            "transport/stream/framing.py",
            "from zcactor.transport.tcp.crew import Crew",
            "zcactor.transport.stream and zcactor.transport.tcp import each other",
        ),
        (
            "transport/verbs/driver/sysfs.py",
            "if TYPE_CHECKING:\n    from zcactor.transport.verbs.device.slots import SlotArea",
            "zcactor.transport.verbs.device and zcactor.transport.verbs.driver import each other",
        ),
        (
            "transport/version.py",
            "def late() -> None:\n    import zcactor.transport.tcp.crew",
            "zcactor.transport.stream and zcactor.transport.tcp and zcactor.transport.version import each other",
        ),
    ],
)
def test_folders_of_a_room_that_know_each_other_are_seen(
    copy: Path, capsys: pytest.CaptureFixture[str], file: str, line: str, said: str
) -> None:
    with copy.joinpath(file).open("a") as opened:
        opened.write(f"\n\n{line}\n")
    assert main([str(copy)]) == 1
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.slow
def test_a_root_that_is_gone_is_seen(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy.joinpath("assembly", "process.py").unlink()
    assert main([str(copy)]) == 1
    assert capsys.readouterr().out == "the composition root zcactor.assembly.process is not there\n"
