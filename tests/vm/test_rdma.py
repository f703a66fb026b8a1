"""Endpoints and programs over real verbs, in guests with soft-RoCE. Each test names the files that it runs inside."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import psutil
import pytest

from tests.vm.guest import assert_no_retries, run_pytest
from tests.vm.test_harness import LIMIT, runs_programs
from tools import vm

HERE = Path(__file__).resolve().parent
PORT = "test_a_port_that_goes_down"
"""The test that takes the device from all others."""
SPARE_MIB = 1024
"""MiB of memory that stay free on this machine beside a guest."""

pyverbs_fits = any(vm.PYVERBS.glob(f"device.{sys.implementation.cache_tag}-*.so"))
bindings = ["pyverbs"] * pyverbs_fits + ["ibverbs"] * (importlib.util.find_spec("ibverbs") is not None)
needs_binding = pytest.mark.skipif(
    not bindings,
    reason="Debian's pyverbs is for another CPython than this one, and ibverbs is not installed: "
    "pip install 'zcactor[rdma]'",
)

in_guests = [*runs_programs, needs_binding]


def memory_for(mib: int) -> int:
    """`mib`; skip the test where the machine has less memory to give."""
    available = psutil.virtual_memory().available >> 20
    if available < mib + SPARE_MIB:
        pytest.skip(f"a guest with {mib:,} MiB is needed, and {available:,} MiB are available")
    return mib


class TestOneGuest:
    pytestmark = in_guests

    @pytest.mark.timeout(2 * LIMIT + 30)
    def test_endpoints(self) -> None:
        """Run `test_guest_endpoints.py`.

        Tests that kill and break come first, then the long ones, and last the one that takes the device away.
        """
        endpoints = str(HERE / "test_guest_endpoints.py")
        small = [[endpoints, "-m", "not slow"]]
        large = [[endpoints, "-m", "slow", "-k", f"not {PORT}"]]
        alone = [[endpoints, "-k", PORT]]
        _, counted, _ = run_pytest(small, large, alone, expected=14 + 3 * len(bindings), timeout=2 * LIMIT)
        assert_no_retries(counted)

    @pytest.mark.timeout(2 * LIMIT + 30)
    def test_programs(self) -> None:
        """Run `test_guest_programs.py`: tests that kill and break come first, then the long ones."""
        programs = str(HERE / "test_guest_programs.py")
        small, large = [[programs, "-m", "not slow"]], [[programs, "-m", "slow"]]
        _, counted = run_pytest(small, large, expected=17, timeout=2 * LIMIT, memory_mib=memory_for(5120))
        assert_no_retries(counted)
