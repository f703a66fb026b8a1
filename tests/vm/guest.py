"""What tests that run in a guest share, and how the host has pytest run them there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.vm.test_harness import ROOT
from tools import vm

COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
RETRIES = (
    "send_rnr_err",
    "rcvd_rnr_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "completer_retry_err",
)
"""Counters of `COUNTERS` that are 0 where no message met an empty receive queue and none was lost."""

TOLD = "counters of rxe0:"
"""How the line with the counters begins that a run in a guest ends with."""

guest_only = [
    pytest.mark.skipif("VM_HOST" not in os.environ, reason="runs in a guest, started by tests/vm/test_rdma.py"),
    pytest.mark.timeout(150),  # a watchdog: a guest is 10 to 20 times slower than the machine, and shares it
]


def counters() -> dict[str, int]:
    """What the device has counted since the guest's start."""
    return {file.name: int(file.read_text()) for file in COUNTERS.iterdir()}


def resources() -> dict[str, int]:
    """How many of each kind of object the device has: ``qp``, ``mr``, ``cq``, ``srq``, ``pd``, ``ctx``."""
    words = subprocess.run(["rdma", "resource", "show", "rxe0"], capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", words.partition("rxe0:")[2])}


def run_pytest(
    *arguments: str, expected: int, timeout: float, memory_mib: int = 2048, env: Mapping[str, str] | None = None
) -> dict[str, int]:
    """Have pytest run tests in a guest, and fail unless all of them pass.

    Args:
        arguments: of pytest.
        expected: how many tests there are, at least; not one may be skipped.
        timeout: seconds until the guest is given up, a watchdog.
        memory_mib: of the guest.
        env: further variables.

    Returns:
        What the device has counted.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=12", *arguments]
    told = f'"$@"; status=$?; cd {COUNTERS}; echo "{TOLD}" $(for one in *; do echo $one=$(cat $one); done); exit $status'
    result = vm.run(
        ["sh", "-c", told, "sh", *command],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), **(env or {})}, timeout=timeout, memory_mib=memory_mib,
        on_line=lambda host, line: print(line),
    )  # fmt: skip
    assert result.status == 0, result.output
    (summary,) = re.findall(r"^(.* passed.*) in [\d.]+s.*$", result.output, re.MULTILINE)
    assert "skipped" not in summary, result.output
    assert int(summary.split()[0]) >= expected, result.output
    words = result.output.rpartition(TOLD)[2].split()
    return {name: int(value) for name, _, value in (word.partition("=") for word in words)}


def assert_no_retries(counted: Mapping[str, int]) -> None:
    """No message met an empty receive queue, and nothing had to be sent twice."""
    assert counted["rdma_sends"] > 0
    assert {name: counted[name] for name in RETRIES} == dict.fromkeys(RETRIES, 0)
