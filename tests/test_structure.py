"""The structure that `tools/layout.py` looks at, and that it sees what does not hold."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tools.layout import cycles, imports, main

ROOT = Path(__file__).parents[1]


def test_no_file_imports_itself_through_others() -> None:
    assert main([str(ROOT / "zcactor")]) == 0


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
    assert first == f"{len(others)} files import each other:"
    assert "  zcactor.rpc.incoming imports zcactor.rpc.session" in others
    assert any(re.match("  zcactor.rpc.session imports .*zcactor.rpc.incoming", each) for each in others)


def test_groups_are_told_apart() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}, "g": set()}
    assert cycles(graph) == [["d", "e"], ["a", "b", "c"]]


def test_a_folder_without_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "there is no Python file" in capsys.readouterr().err


def test_generated_code_is_left_out() -> None:
    assert not [name for name in imports(ROOT / "zcactor") if "_fbs" in name]
