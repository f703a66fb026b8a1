"""The glossary against the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.trees import Change
from tools.glossary import entries, main

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    *("agent", "arena", "attachment", "block", "credit", "driver", "fence", "head", "host", "lane", "lease", "machine"),
    *("node", "pin", "process id", "promise", "region", "resolver", "runner", "runtime", "seal", "session", "slot"),
    *("stand-in", "window", "worker", "zygote"),
}
"""The words that have one meaning in this project."""


def test_the_small_tree_agrees(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree)]) == 0
    assert capsys.readouterr().out == "2 words: each is used, and means one thing\n"


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("docs/index.md", "about leases", "about rights", "'lease' is on no page"),
        (
            "docs/index.md",
            "the head.",
            "the head and its masters.",
            "index.md:3: 'master': the glossary calls it 'head'",
        ),
        ("CONTRIBUTING.md", "| lease |", "| fence |", "'fence' stands behind 'head'"),
        ("CONTRIBUTING.md", "| lease |", "| head |", "'head' stands behind 'head'"),
        ("CONTRIBUTING.md", "the right to read bytes", "", "'lease' has no meaning"),
        ("CONTRIBUTING.md", "## Glossary", "## Words", "there is no table"),
    ],
)
def test_a_difference(
    tree: Path, change: Change, capsys: pytest.CaptureFixture[str], name: str, old: str, new: str, told: str
) -> None:
    change(name, old, new)
    assert main([str(tree)]) == 1
    assert told in capsys.readouterr().out


def test_code_is_not_looked_at(tree: Path, change: Change) -> None:
    change("docs/page.md", "number = 1", "number = 1  # master")
    change("docs/page.md", "The blocks", "The `master` and its blocks")
    assert main([str(tree)]) == 0


def test_the_projects_words_are_there() -> None:
    named = {entry.word for entry in entries(ROOT / "CONTRIBUTING.md")}
    assert named >= WORDS
