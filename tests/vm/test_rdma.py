"""Connections, programs and hosts over real verbs, in guests with soft-RoCE. What runs inside is named at each test."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.vm.guest import TELL, assert_no_retries, run_pytest, told_counters
from tests.vm.test_harness import ROOT, needs_guest, needs_time
from tools import vm

HERE = Path(__file__).resolve().parent
LIMIT = 900
"""Seconds for a guest, a watchdog: the longest takes a third of it on an idle machine, and tests run beside it."""
SPARE_MIB = 1024
"""Of memory, which stay free here beside a guest."""

pyverbs_fits = any(vm.PYVERBS.glob(f"device.{sys.implementation.cache_tag}-*.so"))
bindings = ["pyverbs"] * pyverbs_fits + ["ibverbs"] * (importlib.util.find_spec("ibverbs") is not None)
needs_binding = pytest.mark.skipif(
    not bindings,
    reason="Debian's pyverbs is for another CPython than this one, and ibverbs is not installed: "
    "pip install 'zcactor[rdma]'",
)

watchdog = pytest.mark.timeout(LIMIT + 30)
in_guests = [*(mark for mark in needs_guest if mark.name != "timeout"), needs_binding, watchdog]


def memory_for(mib: int) -> int:
    """`mib`, where the machine has that much to give."""
    available = psutil.virtual_memory().available >> 20
    if available < mib + SPARE_MIB:
        pytest.skip(f"a guest with {mib:,} MiB is needed, and {available:,} MiB are available")
    return mib


def last_json(output: str) -> list[dict[str, Any]]:
    """What programs have told, each by a line of JSON."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def python(*arguments: str | Path) -> str:
    """A shell's words for this interpreter and its arguments."""
    return shlex.join([sys.executable, *map(str, arguments)])


class TestOneGuest:
    pytestmark = in_guests

    def test_the_bindings_keep_their_contract(self) -> None:
        """`tests/transport/verbs/test_pyverbs_adapter.py` and its like: what the fake device passes, too."""
        tests = ROOT / "tests" / "transport" / "verbs"
        runs = [["--timeout", "120", str(tests / f"test_{name}_adapter.py")] for name in bindings]
        run_pytest(*runs, expected=50 * len(bindings), timeout=LIMIT)

    @pytest.mark.parametrize("name", [*bindings[:1], *(pytest.param(name, marks=needs_time) for name in bindings[1:])])
    def test_the_conformance_suite(self, name: str) -> None:
        """`tests/transport/verbs/test_connection.py`, half of it on either processor."""
        suite = str(ROOT / "tests" / "transport" / "verbs" / "test_connection.py")
        runs = [["--timeout", "120", suite, "-k", name, "--part", part] for part in ("1/2", "2/2")]
        assert_no_retries(run_pytest(*runs, expected=60, timeout=LIMIT))

    @needs_time
    def test_endpoints_and_programs(self) -> None:
        """`test_guest_endpoints.py` and `test_guest_programs.py`."""
        runs = [[str(HERE / f"test_guest_{name}.py"), "-m", "not slow"] for name in ("endpoints", "programs")]
        run_pytest(*runs, expected=20, timeout=LIMIT, memory_mib=memory_for(3072))

    @needs_time
    @pytest.mark.timeout(3 * LIMIT)
    def test_a_gigabyte_and_a_thousand_connections(self) -> None:
        """The slow parts of `test_guest_endpoints.py` and `test_guest_programs.py`."""
        runs = [[str(HERE / f"test_guest_{name}.py"), "-m", "slow"] for name in ("endpoints", "programs")]
        assert_no_retries(run_pytest(*runs, expected=5, timeout=3 * LIMIT - 30, memory_mib=memory_for(5120)))

    def test_too_little_memory_may_be_locked(self) -> None:
        """`little_memory.py`."""
        result = vm.run(
            ["sh", "-c", python(HERE / "little_memory.py")],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, memlock_kib=64, timeout=LIMIT,
        )  # fmt: skip
        assert result.status == 0, result.output
        (facts,) = last_json(result.output)
        reason, fix = "RLIMIT_MEMLOCK is 65,536 bytes and the arena needs", "ulimit -l unlimited"
        assert reason in facts["viability"] and fix in facts["viability"]
        assert (facts["value"], facts["transport"]) == (2.0, "tcp")
        assert (facts["received"], facts["read"]) == (1 << 20, 0)
        assert "RLIMIT_MEMLOCK" in facts["alone"]
        assert reason in facts["rejected"]["verbs"] and fix in facts["rejected"]["verbs"]


class TestTwoGuests:
    pytestmark = in_guests

    def test_two_processes_with_rdma_and_one_without(self) -> None:
        """`two_hosts.py`: a process on the first host, and two on the second, of which one has RDMA switched off."""
        program = HERE / "two_hosts.py"
        script = f"""
        if [ $VM_HOST = 1 ]; then
            {python(program, "a")} || exit 1
        else
            {python(program, "c", "tcp")} & {python(program, "b")} || exit 1
            wait $! || exit 1
        fi
        {TELL}
        """
        result = vm.run(
            ["sh", "-c", script], hosts=2, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, memory_mib=1024, timeout=LIMIT
        )
        assert result.status == 0, result.output
        peers = {facts["name"]: facts["peers"] for facts in last_json(result.output)}
        assert {name: {other: one["kind"] for other, one in of.items()} for name, of in peers.items()} == {
            "a": {"b": "verbs", "c": "tcp"},
            "b": {"a": "verbs", "c": "tcp"},
            "c": {"a": "tcp", "b": "tcp"},
        }
        assert all(one["whole"] for of in peers.values() for one in of.values()), result.output
        off = "ZCACTOR_VERBS_BINDING=none asks for no RDMA"
        for name, of in peers.items():
            for other, one in of.items():
                reason = one["rejected"].get("verbs", "")
                assert (off in reason) == ("c" in (name, other)), (name, other, reason)
                assert ("the peer cannot use RDMA" in reason) == (other == "c"), (name, other, reason)
        # A message that one host repeats is a duplicate on the other.
        assert_no_retries(sum((Counter(told_counters(output)) for output in result.outputs), Counter()))


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_the_doctor_says_why_there_is_no_rdma_here() -> None:
    done = subprocess.run([sys.executable, "-m", "zcactor", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "RDMA binding none works no" in words
    assert "this kernel has no RDMA, or has not loaded it" in words
