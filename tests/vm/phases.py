"""Runs pytest in a guest, in phases of several runs side by side.

    python phases.py '[[["a.py"], ["b.py", "-k", "c"]], [["d.py"]]]'

Runs are forked from this process, which has imported the modules of all of them, pytest's plugins and the tests among
them: imports take a guest ten seconds, and what pytest imports takes each run as long again. The processes that the
tests start are forked, too, by a nursery of each run, and so are node agents. After each phase, when no run writes, a
line that begins with `RAN` has the outcomes of each run's tests, and a line that begins with `TOLD` the device's
counters. The exit status is that of the first run that failed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np  # noqa: F401
import pytest

import zcactor.api.inspection
import zcactor.driver.driver
import zcactor.transport.verbs.driver.bindings
import zcactor.transport.verbs.peer.connect
from tests.forked_agents import start_forker
from tests.forker import fork, serve
from tests.vm.nursery import start_nursery

__all__ = ["COUNTERS", "RAN", "TELL", "TOLD", "counters", "main"]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
TOLD = "counters of rxe0:"
"""The beginning of the line with the device's counters."""
RAN = "tests of a run:"
"""The beginning of a line with the numbers of a run's passed and skipped tests."""
TELL = f'cd {COUNTERS}; echo "{TOLD}" $(for one in *; do echo $one=$(cat $one); done)'
"""A shell command that prints the counters."""


def counters() -> dict[str, int]:
    """The device's counts since the guest's start."""
    return {file.name: int(file.read_text()) for file in COUNTERS.iterdir()}


def main(phases: Sequence[Sequence[Sequence[str]]]) -> int:
    """Run all phases; return the first status that is not 0."""
    failed = 0
    zcactor.transport.verbs.driver.bindings.bindings()  # this imports the bindings
    _collect(phases)
    gc.freeze()  # collections in a run then do not write to the memory that the runs share
    for runs in phases:
        children = [_start(arguments) for arguments in runs]
        outcomes = []
        for child, told in children:
            with open(told) as pipe:
                outcomes.append(pipe.readline())  # one line: the run's nursery may keep the pipe open
            failed = failed or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for outcome in outcomes:
            print(RAN, outcome.strip(), flush=True)
        print(TOLD, *(f"{name}={value}" for name, value in counters().items()), flush=True)
    return failed


def _collect(phases: Sequence[Sequence[Sequence[str]]]) -> None:
    """Collect the tests of all runs once, which imports what pytest needs to run them."""
    runs = [arguments for runs in phases for arguments in runs]
    files = {argument.partition("::")[0]: None for arguments in runs for argument in arguments if ".py" in argument}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--collect-only", *files])
    if status:
        print(said.getvalue())


class _Outcomes:
    """A plugin of pytest that counts outcomes of tests."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count an outcome; pytest calls this for each part of each test."""
        if report.when == "call" or report.skipped:
            self.counted[report.outcome] += 1


def _start(arguments: Sequence[str]) -> tuple[int, int]:
    """Fork a run; return its process id, and the descriptor from which its outcomes can be read."""
    told, tell = os.pipe()
    child = fork(partial(_run, arguments, tell))
    os.close(tell)
    return child, told


def _run(arguments: Sequence[str], tell: int) -> int:
    """Run pytest once; return its exit status."""
    start_nursery()
    start_forker(lambda requests, ours: fork(partial(_fork_agents, requests, ours)))
    outcomes = _Outcomes()
    status = int(pytest.main(list(arguments), plugins=[outcomes]))
    os.write(tell, f"passed={outcomes.counted['passed']} skipped={outcomes.counted['skipped']}\n".encode())
    return status


def _fork_agents(requests: socket.socket, ours: socket.socket) -> int:
    ours.close()  # otherwise no end of file would come
    return serve(requests)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
