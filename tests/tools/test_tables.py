"""Reference pages that are generated from the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import zcactor
from tools import tables
from tools.tables import PAGES, floors, main, ungrouped, with_floors
from zcactor import config, errors, options
from zcactor.cli.main import app


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages."""
    for page in tables.FOLDER.glob("*.md"):
        (tmp_path / page.name).write_bytes(page.read_bytes())
    return tmp_path


def test_the_committed_pages_are_current(copy: Path) -> None:
    assert {path.stem for path in copy.iterdir()} == set(PAGES)
    assert main(["--check", "--out", str(copy)]) == 0


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_was_changed_or_lost(copy: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    path = copy / f"{name}.md"
    text = path.read_text()
    path.write_text(text.replace("|", "| ", 1))
    assert main(["--check", "--out", str(copy)]) == 1
    assert capsys.readouterr().out == f"{path} is not what the code says; run: python tools/tables.py\n"
    path.unlink()
    assert main(["--check", "--out", str(copy)]) == 1
    assert main(["--out", str(copy)]) == 0
    assert path.read_text() == text


def test_a_page_is_stale_when_the_code_changes(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(config.MINIMUM, "recv_depth", 5)
    assert main(["--check", "--out", str(copy)]) == 1
    assert "configuration.md is not what the code says" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "told"),
    [
        ("_options", "max_restarts", "SpawnOptions.max_restarts has no docstring"),
        ("_configuration", "warn_after", "Config.warn_after is not among the attributes"),
    ],
)
def test_an_option_or_a_setting_without_a_text(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, old: str, told: str
) -> None:
    source = inspect.getsource
    text = (config.Config.__doc__ or "").replace(f"{old}: ", f"{old} - ")
    if name == "_configuration":
        monkeypatch.setattr(config.Config, "__doc__", text)
    else:
        lines = source(options.SpawnOptions).replace('"""Number of times', 'pass  # """Number of times')
        monkeypatch.setattr(inspect, "getsource", lambda cls: lines)
    assert main(["--check", "--out", str(copy)]) == 1
    assert told in capsys.readouterr().out


def test_a_public_name_without_a_docstring(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(zcactor.put, "__doc__", None)
    assert main(["--check", "--out", str(copy)]) == 1
    assert "put" in capsys.readouterr().out


def test_a_public_name_without_a_place(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ungrouped(zcactor.__all__) == []
    assert ungrouped([*zcactor.__all__, "more"]) == ["zcactor.more is in no group of tools/tables.py"]
    monkeypatch.setattr(zcactor, "__all__", [name for name in zcactor.__all__ if name != "put"])
    assert main(["--check", "--out", str(copy)]) == 1
    assert "tools/tables.py has put, which zcactor has not" in capsys.readouterr().out


def test_each_option_setting_and_command_has_a_row() -> None:
    pages = {name: (tables.FOLDER / f"{name}.md").read_text() for name in PAGES}
    for table in ("spawn", "declaration", "call", "method"):
        assert all(f"| `{name}` |" in pages["options"] for name in options.accepted(table))
    assert all(f"\n## `{name}`\n" in pages["configuration"] for name in config.Config.__dataclass_fields__)
    assert all(f"## `zcactor {name}" in pages["command-line"] for name in app.commands)
    assert all(f"zc.{name}" in pages["api"] for name in zcactor.__all__)


def test_each_public_error_has_a_section_with_causes_and_a_remedy_and_no_other_has() -> None:
    public = {value for module in (zcactor, errors) for value in (getattr(module, name) for name in module.__all__)}
    classes = {cls.__name__ for cls in public if inspect.isclass(cls) and issubclass(cls, BaseException)}
    page = (tables.FOLDER / "errors.md").read_text()
    sections = re.findall(
        r"^## (zc\.[\w.]+)\n\n\S.*\n\n- \*\*Usual causes\*\*: \S.*\n- \*\*Remedy\*\*: \S.*$", page, re.MULTILINE
    )
    assert sorted(name.rpartition(".")[2] for name in sections) == sorted(classes)
    assert re.findall(r"^## (zc.*)", page, re.MULTILINE) == sections
    anchors = re.findall(r"^\| \[`.*`\]\(#(\w+)\)", page, re.MULTILINE)
    assert anchors == [name.replace(".", "").lower() for name in sections]


@pytest.mark.parametrize("section", ["Usual causes", "Remedy"])
def test_an_error_without_causes_or_a_remedy(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    text = f"{errors.MailboxFull.__doc__}".replace(section, "Note")
    monkeypatch.setattr(errors.MailboxFull, "__doc__", text)
    assert main(["--check", "--out", str(copy)]) == 1
    assert f"the docstring of zc.MailboxFull has no section '{section}'" in capsys.readouterr().out


def test_the_page_has_the_floors_of_the_contract() -> None:
    page = tables.ARCHITECTURE.read_text()
    assert with_floors(page) == page
    rooms = [room for found, _ in floors() for room in found]
    assert sorted(rooms) == sorted(path.parent.name for path in (tables.ROOT / "zcactor").glob("*/__init__.py"))
    assert all(f"| `{room}` |" in page for room in rooms)


def test_the_page_is_stale_when_the_contract_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "architecture.md"
    text = tables.ARCHITECTURE.read_text()
    monkeypatch.setattr(tables, "ARCHITECTURE", page)
    for changed in (text.replace("| 26 |", "| 27 |", 1), text.replace("| `rpc` |", "| `calls` |", 1)):
        page.write_text(changed)
        assert main(["--check"]) == 1
        assert capsys.readouterr().out == f"{page} is not what the code says; run: python tools/tables.py\n"
    page.write_text(text.replace("<!-- Floors end -->", ""))
    assert main(["--check"]) == 1
    assert "0 tables of floors" in capsys.readouterr().out
