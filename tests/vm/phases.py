"""Runs pytest in a guest, one phase after the other, each of them several runs side by side.

    python phases.py '[[["a.py"], ["b.py", "-k", "c"]], [["d.py"]]]'

Runs are forked from this process, which has imported what all of them need: that takes a guest ten seconds. So are the
processes that their tests start, by a nursery of each run. After each phase, when nothing else writes, what became of
each run's tests is told by a line that begins with `RAN`, and the device's counters by one that begins with `TOLD`. The
exit status is that of the first run that failed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np  # noqa: F401
import pytest

import zcactor.runtime.driver
import zcactor.runtime.inspection
import zcactor.transport.verbs.joining
import zcactor.transport.verbs.load
from tests.vm.nursery import fork, start_nursery

__all__ = ["COUNTERS", "RAN", "TELL", "TOLD", "counters", "main"]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
TOLD = "counters of rxe0:"
"""How a line begins that tells them."""
RAN = "tests of a run:"
"""How a line begins that tells how many of them passed, and how many did not run."""
TELL = f'cd {COUNTERS}; echo "{TOLD}" $(for one in *; do echo $one=$(cat $one); done)'
"""What a shell tells the counters by."""


def counters() -> dict[str, int]:
    """What the device has counted since the guest's start."""
    return {file.name: int(file.read_text()) for file in COUNTERS.iterdir()}


def main(phases: Sequence[Sequence[Sequence[str]]]) -> int:
    """Run them; the first status that is not 0."""
    failed = 0
    zcactor.transport.verbs.load.bindings()  # which imports them
    gc.freeze()  # what runs share is not written to by their collections
    for runs in phases:
        children = [_start(arguments) for arguments in runs]
        outcomes = []
        for child, told in children:
            with open(told) as pipe:
                outcomes.append(pipe.readline())  # its nursery may have that pipe longer
            failed = failed or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for outcome in outcomes:
            print(RAN, outcome.strip(), flush=True)
        print(TOLD, *(f"{name}={value}" for name, value in counters().items()), flush=True)
    return failed


class _Outcomes:
    """A plugin of pytest that counts what became of the tests."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """pytest calls this for each part of each test."""
        if report.when == "call" or report.skipped:
            self.counted[report.outcome] += 1


def _start(arguments: Sequence[str]) -> tuple[int, int]:
    """Fork a run; its process, and what it tells at its end."""
    told, tell = os.pipe()
    child = fork(partial(_run, arguments, tell))
    os.close(tell)
    return child, told


def _run(arguments: Sequence[str], tell: int) -> int:
    """The status of one run."""
    start_nursery()
    outcomes = _Outcomes()
    status = int(pytest.main(list(arguments), plugins=[outcomes]))
    os.write(tell, f"passed={outcomes.counted['passed']} skipped={outcomes.counted['skipped']}\n".encode())
    return status


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
