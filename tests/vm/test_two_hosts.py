"""Two guests as two hosts: their differences, and a program whose processes are on both."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.vm.guest import assert_no_retries, told_counters
from tests.vm.phases import TELL
from tests.vm.test_harness import LIMIT, ROOT, runs_programs, script_of, sections_of
from tests.vm.test_rdma import bindings, needs_binding
from tools import vm

pytestmark = runs_programs


@pytest.fixture(scope="module")
def two_hosts() -> vm.Result:
    """The result of two hosts, for `sections_of`: the first one's status is 0, the second one's 1."""

    def program(*arguments: str) -> str:
        return shlex.join([sys.executable, str(Path(__file__).with_name("two_hosts.py")), *arguments])

    sections = {
        "names": "cat /etc/machine-id /sys/class/net/eth0/address; hostname",
        "ping-pong": "if [ $VM_HOST = 1 ]; then ping_pong; else client $VM_PEER; fi",
    }
    if bindings:
        # Output is not buffered in a guest: a line and its end are two writes, so lines of two programs would mix.
        second = f"{program('c', 'tcp')} >/tmp/c & {program('b')} && wait $! && cat /tmp/c"
        sections["program"] = f"if [ $VM_HOST = 1 ]; then {program('a')}; else {second}; fi"
        sections["counters"] = TELL
    return vm.run(
        ["sh", "-c", f"{script_of(sections)}exit $((VM_HOST - 1))"],
        hosts=2, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, memory_mib=1024, timeout=LIMIT,
    )  # fmt: skip


def test_each_has_a_status_of_its_own(two_hosts: vm.Result) -> None:
    assert two_hosts.statuses == (0, 1), two_hosts.output
    assert two_hosts.status == 1


def test_they_have_different_names_and_addresses(two_hosts: vm.Result) -> None:
    facts = [sections_of(output)["names"][1].splitlines() for output in two_hosts.outputs]
    assert len(facts[0]) == 3
    for first, second in zip(*facts, strict=True):
        assert first != second


def test_they_play_ping_pong(two_hosts: vm.Result) -> None:
    for output, peer in zip(two_hosts.outputs, ("10.77.0.2", "10.77.0.1"), strict=True):
        status, text = sections_of(output)["ping-pong"]
        assert status == 0, text
        assert "50 iters in" in text
        assert f"GID ::ffff:{peer}" in text


@needs_binding
def test_two_processes_with_rdma_and_one_without(two_hosts: vm.Result) -> None:
    """`two_hosts.py` has a process on the first host, and two on the second, one of them with RDMA switched off."""
    programs = [sections_of(output)["program"] for output in two_hosts.outputs]
    assert [status for status, _ in programs] == [0, 0], two_hosts.output
    told = [json.loads(line) for _, text in programs for line in text.splitlines() if line.startswith("{")]
    peers = {facts["name"]: facts["peers"] for facts in told}
    assert {name: {other: one["kind"] for other, one in of.items()} for name, of in peers.items()} == {
        "a": {"b": "verbs", "c": "tcp"},
        "b": {"a": "verbs", "c": "tcp"},
        "c": {"a": "tcp", "b": "tcp"},
    }
    assert all(one["whole"] for of in peers.values() for one in of.values()), peers
    off = "the setting verbs is off"
    for name, of in peers.items():
        for other, one in of.items():
            reason = one["rejected"].get("verbs", "")
            assert (off in reason) == ("c" in (name, other)), (name, other, reason)
            assert ("the peer cannot use RDMA" in reason) == (other == "c"), (name, other, reason)
    # A message that one host repeats is a duplicate on the other.
    assert_no_retries(sum((told_counters(output)[-1] for output in two_hosts.outputs), Counter()))
