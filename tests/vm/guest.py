"""The parts that tests in a guest share, and the way in which the host runs pytest there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from tests.forker import NOBODY
from tests.vm.phases import RAN, TOLD
from tests.vm.test_harness import ROOT
from tools import vm
from zcactor.workers.orphans import MARK

ERRORS = ("send_rnr_err", "rcvd_rnr_err", "retry_exceeded_err", "retry_rnr_exceeded_err", "out_of_seq_request")
"""Counters of `COUNTERS` that stay 0 where no message met an empty receive queue and no message was lost."""

guest_only = [
    pytest.mark.skipif("VM_HOST" not in os.environ, reason="runs in a guest, started by tests/vm/test_rdma.py"),
    pytest.mark.timeout(300),  # a watchdog: a guest is 10 to 20 times slower than the machine, which others use too
]


def resources(pid: int) -> dict[str, int]:
    """The number of objects of each kind that a process has on the device."""
    found = {}
    for kind in ("qp", "mr", "cq"):
        command = ["rdma", "-j", "resource", "show", kind]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        found[kind] = sum(one.get("pid") == pid for one in listed)
    return found


def run_pytest(
    *phases: Sequence[Sequence[str]], expected: int, timeout: float, memory_mib: int = 2048
) -> list[Counter[str]]:
    """Have pytest run tests in a guest, and fail unless all of them pass.

    Args:
        phases: phases in order; each is a list of runs side by side, because tests wait for the device's timers now
            and then, and each run is a list of arguments of pytest.
        expected: the least number of tests in all; not one may be skipped.
        timeout: seconds until the guest is given up, a watchdog.
        memory_mib: the guest's memory.

    Returns:
        The counts of the device in each phase.
    """
    always = ["-q", "-p", "no:cacheprovider", "--loops", "uvloop", "--durations=8"]
    always += ["-p", "no:hypothesispytest"]  # the plugin takes seconds to import in a guest
    # faulthandler's timeout inspects running threads, which now and then ends badly, and every test takes a minute in a
    # guest.
    always += ["-o", "faulthandler_timeout=0"]
    runs = [[[*always, *arguments] for arguments in phase] for phase in phases]
    result = vm.run(
        [sys.executable, str(Path(__file__).with_name("phases.py")), json.dumps(runs)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), MARK: NOBODY}, timeout=timeout, memory_mib=memory_mib,
        on_line=lambda host, line: print(line),
    )  # fmt: skip
    assert result.status == 0, result.output
    runs_of_all = [_numbers(line) for line in _lines(result.output, RAN)]
    assert len(runs_of_all) == sum(map(len, phases)), result.output
    assert not any(outcomes["skipped"] for outcomes in runs_of_all), result.output
    assert sum(outcomes["passed"] for outcomes in runs_of_all) >= expected, result.output
    told = told_counters(result.output)
    assert len(told) == len(phases), result.output
    return [after - before for before, after in pairwise([Counter(), *told])]


def told_counters(output: str) -> list[Counter[str]]:
    """The counts in the lines of `output` that begin with `TOLD`, since the guest's start."""
    return [_numbers(line) for line in _lines(output, TOLD)]


def _lines(output: str, begin: str) -> list[str]:
    """The rests of the lines that begin with `begin`."""
    return [line.removeprefix(begin) for line in output.splitlines() if line.startswith(begin)]


def _numbers(line: str) -> Counter[str]:
    """The numbers of a line like ``name=1 other=2``."""
    return Counter({name: int(value) for name, _, value in (word.partition("=") for word in line.split())})


def assert_no_retries(counted: Mapping[str, int]) -> None:
    """Check that no message met an empty receive queue, none was lost, and only messages that had arrived were sent
    twice.

    In an emulated guest whose processors are busy, the sender's timer sometimes runs out before soft-RoCE's worker has
    sent or taken up an acknowledgement. The sender then repeats a message that the receiver has, and the receiver
    counts a duplicate: perftest's ``ib_send_bw`` between two busy loops has one such repetition in about 15,000
    messages.
    """
    assert counted["rdma_sends"] > 0
    assert {name: counted[name] for name in ERRORS} == dict.fromkeys(ERRORS, 0)
    assert counted["completer_retry_err"] <= counted["duplicate_request"], dict(counted)
