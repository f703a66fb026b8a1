"""Bindings and connections over real verbs, in a guest with soft-RoCE, and the report of a machine without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.guest import assert_no_retries, run_pytest
from tests.vm.test_harness import LIMIT, ROOT
from tests.vm.test_rdma import bindings, in_guests

VERBS = ROOT / "tests" / "transport" / "verbs"


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


@pytest.mark.slow
@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_the_doctor_says_why_there_is_no_rdma_here() -> None:
    done = subprocess.run([sys.executable, "-m", "zcactor", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "RDMA binding none works no" in words
    assert "this kernel has no RDMA, or has not loaded it" in words
