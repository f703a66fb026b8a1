"""The subjects of commits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.commits import LONGEST, main, problems

Commit = Callable[[str], str]


@pytest.mark.parametrize(
    "subject",
    [
        "Add a table of leases",
        "Bring arrays by the socket where their owner cannot register them",
        "Feed the watchdog",
        "Pass the lease on",
        "Focus on one noun",
        "Let `zc.move` refuse views",
        "A" + "dd" * 35 + " ",
        "Merge main",
    ],
)
def test_a_subject_that_follows_the_rule(subject: str) -> None:
    assert problems(subject) == []


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("Add " + "x" * 76, f"it has 80 characters, {LONGEST} are the most"),
        ("Add a table; remove a list", "a semicolon"),
        ("Add a table.", "the full stop"),
        ("add a table", "with a capital first"),
        ("0.2", "with a capital first"),
        ("", "with a capital first"),
        ("Added a table", "not with 'Added'"),
        ("Adding a table", "not with 'Adding'"),
        ("Adds a table", "not with 'Adds'"),
        ("The table of leases", "not with 'The'"),
        ("Tests: one noun per file", "not with 'Tests'"),
    ],
)
def test_a_subject_that_breaks_it(subject: str, problem: str) -> None:
    assert [problem in each for each in problems(subject)] == [True]


def test_only_commits_after_the_base_are_checked(
    tree: Path, commit: Commit, capsys: pytest.CaptureFixture[str]
) -> None:
    base = commit("wip; before the rule.")
    commit("Add a table")
    assert main(["--since", base, str(tree)]) == 0
    assert "1 commits" in capsys.readouterr().out
    wrong = commit("Add " + "x" * 76)
    commit("Remove a list")
    assert main(["--since", base, str(tree)]) == 1
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith(wrong) and "80 characters" in told


def test_a_tree_without_history_says_so(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--since", "bdd9f9c", str(tree)]) == 0
    assert "no commit was checked" in capsys.readouterr().out
