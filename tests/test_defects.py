"""Each test that the table of mended defects names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = (ROOT / "docs" / "explanation" / "defects.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in LINES
    if re.match(r"\| ([CHMRS][0-9]+|-) \|", line)
]
SEEN = [found.groups() for line in LINES if (found := re.match(r"- \*\*([CHMRS][0-9]+)\*\*(?: N)?: (.*)", line))]
"""Observations of the defects before they were mended: the id, and the text."""


def test_each_defect_has_one_row() -> None:
    names = [row[0] for row in ROWS if row[0] != "-"]
    expected = [f"{kind}{number}" for kind, last in zip("CHMRS", (7, 13, 18, 14, 20), strict=True)
                for number in range(1, last + 1)]  # fmt: skip
    assert sorted(names) == sorted(expected)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_its_tests_are_there(row: list[str]) -> None:
    tests = row[-2].split("<br>")
    assert tests
    for test in tests:
        path, *names = re.sub(r"\[.*\]", "", test.strip()).split("::")
        suites = [
            ROOT / path,
            *sorted((ROOT / "zcactor" / "testing" / "conformance").glob("*.py")),
        ]  # test classes inherit from them
        text = "\n".join(suite.read_text() for suite in suites)
        for name in names:
            assert re.search(rf"^ *(?:async )?(?:def|class) {re.escape(name)}\b", text, re.MULTILINE), test


@pytest.mark.parametrize(("name", "text"), SEEN, ids=[name for name, _ in SEEN])
def test_what_was_seen_is_of_its_tests(name: str, text: str) -> None:
    """The text of a row mentions each test of the row once, and no other test."""
    (row,) = (row for row in ROWS if row[0] == name)
    named = [test.split("::")[-1] for test in row[-2].split("<br>")]
    assert sorted(re.findall(r"`(test_\w+)`", text)) == sorted(named)


def test_what_was_seen_has_one_line_for_each() -> None:
    names = [name for name, _ in SEEN]
    assert names == sorted(set(names), key=lambda name: (name[0], int(name[1:])))
    assert sum(line.startswith("- ") for line in LINES) == len(names) == 20
