"""Refused phrases in docstrings and comments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.trees import Change
from tools import language
from tools.language import Text, findings, main


def phrases(text: str, *, docstring: bool = True) -> list[str]:
    """The refused phrases of a text."""
    return [phrase for _, phrase, _ in findings(Text(1, text, docstring))]


def test_the_small_tree_has_none(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    assert capsys.readouterr().out == "5 files: no refused phrase\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "line", "phrase"),
    [
        ("small/work.py", "Return the next number.", "Whoever calls this gets more.", 13, "Whoever"),
        ("small/work.py", "The sum is checked", "Told to whoever asks", 14, "whoever"),
        ("small/work.py", "# by one", "# by one. What it gives is new", 15, "What"),
        ("small/work.py", "The most, `whatever` it is.", "The most. Who asks gets less.", 9, "Who"),
        ("small/work.c", "It never fails.", "A part that is none fails.", 2, "is none"),
        ("small/work.c", "// by one", "// by one; whatever that is", 3, "whatever"),
        ("docs/conf.py", "extensions", "# TODO: more\nextensions", 1, "TODO"),
    ],
)
def test_a_phrase_is_found_with_its_line(
    tree: Path,
    change: Change,
    capsys: pytest.CaptureFixture[str],
    name: str,
    old: str,
    new: str,
    line: int,
    phrase: str,
) -> None:
    path = change(name, old, new)
    assert main([str(tree)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith(f"{path}:{line}: {phrase!r}: ")


@pytest.mark.parametrize("pattern", [*language.REFUSED, *language.FIRST_LINE])
def test_each_pattern_has_a_remedy(pattern: str) -> None:
    remedy = (language.REFUSED | language.FIRST_LINE)[pattern]
    assert len(remedy.split()) >= 3


@pytest.mark.parametrize(
    "text",
    [
        "Whoever holds it.",
        "The peer, whatever it is.",
        "Who connects proves the token.",
        "It is sent. Whom it reaches is open.",
        "What nobody holds.",
        "The rest: what nobody holds.",
        "Parts that are none are refused.",
        "The node is told of the end.",
        "The end of what was sent.",
        "Why it failed.",
        "It returns a number.",
        "Keeps one connection.",
        "By number.",
        "This function returns a number.",
        "See issue #12.",
    ],
)
def test_refused(text: str) -> None:
    assert phrases(text)


@pytest.mark.parametrize(
    "text",
    [
        "The process that holds it, and people who read.",
        "A caller whose call failed.",
        "Return the key; it is None where there is none.",
        "Say what holds.",
        "The text `whoever`, and ``what is none``.",
        "A table::\n\n    whoever | whatever\n\nbehind it.",
        "Whether it works.",
        "The limit is whatever_limit.",
    ],
)
def test_allowed(text: str) -> None:
    assert phrases(text) == []


def test_comments_have_no_first_line() -> None:
    assert phrases("Why: it is faster.", docstring=False) == []
    assert phrases("Why: it is faster.") == ["Why"]


def test_a_path_without_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "there is no Python or C file" in capsys.readouterr().err


def test_a_file_that_cannot_be_read(tree: Path, change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    path = change("small/work.py", "return x + 1", "return x +")
    assert main([str(tree)]) == 1
    assert capsys.readouterr().out.startswith(f"{path}:15: it is not valid Python: ")


def test_generated_code_is_left_out(tree: Path) -> None:
    (tree / "small" / "_fbs").mkdir()
    (tree / "small" / "_fbs" / "x.py").write_text('"""Whoever."""\n')
    assert main([str(tree)]) == 0
