"""What tests that run in a guest share, and how the host has pytest run them there."""

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

from tests.vm.phases import RAN, TOLD
from tests.vm.test_harness import ROOT
from tools import vm

ERRORS = ("send_rnr_err", "rcvd_rnr_err", "retry_exceeded_err", "retry_rnr_exceeded_err", "out_of_seq_request")
"""Counters of `COUNTERS` that are 0 where no message met an empty receive queue and none was lost."""

guest_only = [
    pytest.mark.skipif("VM_HOST" not in os.environ, reason="runs in a guest, started by tests/vm/test_rdma.py"),
    pytest.mark.timeout(300),  # a watchdog: a guest is 10 to 20 times slower than the machine, which others use too
]


def resources(pid: int) -> dict[str, int]:
    """How many of each kind of object a process has on the device."""
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
        phases: one after the other; each has arguments of pytest for each of the runs that go on side by side in it,
            as a guest has two processors.
        expected: how many tests there are in all, at least; not one may be skipped.
        timeout: seconds until the guest is given up, a watchdog.
        memory_mib: of the guest.

    Returns:
        For each phase, what the device has counted in it.
    """
    always = ["-q", "-p", "no:cacheprovider", "--loops", "uvloop", "--durations=8"]
    always += ["-p", "no:hypothesispytest"]  # takes seconds to import in a guest
    # It looks at threads that go on running, which now and then ends badly, and in a guest everything takes a minute.
    always += ["-o", "faulthandler_timeout=0"]
    runs = [[[*always, *arguments] for arguments in phase] for phase in phases]
    result = vm.run(
        [sys.executable, str(Path(__file__).with_name("phases.py")), json.dumps(runs)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=timeout, memory_mib=memory_mib,
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
    """What was told in `output` by lines that begin with `TOLD`: counts since the guest's start."""
    return [_numbers(line) for line in _lines(output, TOLD)]


def _lines(output: str, begin: str) -> list[str]:
    """The rest of the lines that begin so."""
    return [line.removeprefix(begin) for line in output.splitlines() if line.startswith(begin)]


def _numbers(line: str) -> Counter[str]:
    """Of ``name=1 other=2``."""
    return Counter({name: int(value) for name, _, value in (word.partition("=") for word in line.split())})


def assert_no_retries(counted: Mapping[str, int]) -> None:
    """No message met an empty receive queue, none was lost, and nothing was sent twice but what had arrived.

    In an emulated guest whose processors are busy, the sender's timer sometimes runs out before soft-RoCE's worker has
    sent or taken up an acknowledgement, and the sender repeats what the receiver has and counts as a duplicate:
    perftest's ``ib_send_bw`` between two busy loops has one such repetition in about 15,000 messages.
    """
    assert counted["rdma_sends"] > 0
    assert {name: counted[name] for name in ERRORS} == dict.fromkeys(ERRORS, 0)
    assert counted["completer_retry_err"] <= counted["duplicate_request"], dict(counted)
