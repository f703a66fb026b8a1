"""Runs pytest in a guest, one phase after the other, each of them several runs side by side.

    python phases.py '[[["a.py"], ["b.py", "-k", "c"]], [["d.py"]]]'

Runs are forked from this process, which has imported what all of them need: that takes a guest ten seconds. So are the
processes that their tests start, by a nursery of each run. After each phase the device's counters are told, by a line
that begins with `TOLD`. The exit status is that of the first run that failed.
"""

from __future__ import annotations

import gc
import json
import os
import sys
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

__all__ = ["COUNTERS", "TELL", "TOLD", "counters", "main"]

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
TOLD = "counters of rxe0:"
"""How a line begins that tells them."""
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
        children = [fork(partial(_run, arguments)) for arguments in runs]
        for child in children:
            failed = failed or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(TOLD, *(f"{name}={value}" for name, value in counters().items()), flush=True)
    return failed


def _run(arguments: Sequence[str]) -> int:
    """The status of one run."""
    start_nursery()
    return int(pytest.main(list(arguments)))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
