"""Programs with the mistakes of newcomers, run from the outside: each ends with a line that says what to write."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.driver.programs import ROOT
from tests.mistakes.table import HEAD, MISTAKES, Mistake

PATIENCE = 120.0
_MARKS = re.compile(r" *[~^]+[~^ ]*")
"""The line under a line of code that marks the failed part: Python 3.13 has more of them than 3.11."""


def written(folder: Path) -> Path:
    """The folder with all programs in it."""
    for mistake in MISTAKES:
        (folder / f"{mistake.name}.py").write_text(HEAD + mistake.program)
    return folder


def _fits(pattern: str, line: str) -> bool:
    return fnmatch.fnmatchcase(line, re.sub(r"([\[?])", r"[\1]", pattern))


def problem(mistake: Mistake, output: str) -> str:
    """The way in which the output of a program differs from what it must be; empty where it does not."""
    lines = output.rstrip("\n").split("\n")
    for place, expected in ((0, mistake.first), (-1, mistake.last)):
        if not _fits(expected, lines[place]):
            return f"{mistake.name}: {lines[place]!r}, not {expected!r}, in\n{output}"
    if not any(_fits(mistake.says, line) for line in lines):
        return f"{mistake.name}: no line {mistake.says!r} in\n{output}"
    count = sum(_MARKS.fullmatch(line) is None for line in lines)
    if count > mistake.lines:
        return f"{mistake.name}: {count} lines, not at most {mistake.lines}, in\n{output}"
    return ""


def _newcomer(home: Path) -> dict[str, str]:
    """The environment of somebody who has no cluster's token yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ZCACTOR_TOKEN", "XDG_"))}
    return {**kept, "HOME": str(home)}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of each program, all run by one process."""
    folder = written(tmp_path_factory.mktemp("mistakes"))
    command = [sys.executable, "-m", "tests.mistakes.running", str(folder)]
    subprocess.run(command, cwd=ROOT, timeout=PATIENCE, check=True, env=_newcomer(folder))
    return dict(json.loads((folder / "told.json").read_text()))


def test_the_table_has_each_mistake_once() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 51


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_told(told: dict[str, str], mistake: Mistake) -> None:
    assert not problem(mistake, told[mistake.name])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_of_a_script_is_told(tmp_path: Path, mistake: Mistake) -> None:
    program = written(tmp_path) / f"{mistake.name}.py"
    done = subprocess.run(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE,
        check=False, env={**_newcomer(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert not problem(mistake, done.stdout)
