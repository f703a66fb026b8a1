"""Connections and programs over real verbs, in guests with soft-RoCE. Each test names the files that it runs inside."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.vm.guest import assert_no_retries, run_pytest
from tests.vm.test_harness import LIMIT, ROOT, runs_programs
from tools import vm

HERE = Path(__file__).resolve().parent
VERBS = ROOT / "tests" / "transport" / "verbs"
MANY = "test_many_connections_leave_nothing"
"""The test that takes as long as all other slow ones together."""
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

    def test_bindings_and_connections(self) -> None:
        """Run the tests of `tests/transport/verbs/driver/test_pyverbs_adapter.py` and its like that the fake device
        passes, too.

        Then run `tests/transport/verbs/peer/test_connection.py` with each binding.
        """
        contract = [
            ["--timeout", "120", str(VERBS / "driver" / f"test_{name}_adapter.py::TestOnADevice")] for name in bindings
        ]
        suites = [["--timeout", "120", str(VERBS / "peer" / "test_connection.py"), "-k", name] for name in bindings]
        _, counted = run_pytest(contract, suites, expected=110 * len(bindings), timeout=LIMIT)
        assert_no_retries(counted)

    @pytest.mark.timeout(2 * LIMIT + 30)
    def test_endpoints_and_programs(self) -> None:
        """Run `test_guest_endpoints.py` and `test_guest_programs.py`.

        Tests that kill and break come first, then the long ones, and last the one that takes the device away.
        """
        endpoints, programs = (str(HERE / f"test_guest_{name}.py") for name in ("endpoints", "programs"))
        small = [[endpoints, "-m", "not slow"], [programs, "-m", "not slow"]]
        rest = f"not {MANY} and not {PORT}"
        large = [[endpoints, "-m", "slow", "-k", MANY], [endpoints, programs, "-m", "slow", "-k", rest]]
        alone = [[endpoints, "-k", PORT]]
        _, counted, _ = run_pytest(small, large, alone, expected=30, timeout=2 * LIMIT, memory_mib=memory_for(5120))
        assert_no_retries(counted)


@pytest.mark.slow
@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_the_doctor_says_why_there_is_no_rdma_here() -> None:
    done = subprocess.run([sys.executable, "-m", "zcactor", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "RDMA binding none works no" in words
    assert "this kernel has no RDMA, or has not loaded it" in words
