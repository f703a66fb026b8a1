"""Two guests as two hosts, which tests of several modules look at."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.vm.phases import TELL
from tests.vm.test_harness import LIMIT, ROOT, script_of
from tests.vm.test_rdma import bindings
from tools import vm


@pytest.fixture(scope="session")
def two_hosts() -> vm.Result:
    """What two hosts did, for `sections_of`: the first one's status is 0, the second one's 1."""

    def program(*arguments: str) -> str:
        return shlex.join([sys.executable, str(Path(__file__).with_name("two_hosts.py")), *arguments])

    sections = {
        "names": "cat /etc/machine-id /sys/class/net/eth0/address; hostname",
        "ping-pong": "if [ $VM_HOST = 1 ]; then ping_pong; else client $VM_PEER; fi",
    }
    if bindings:
        second = f"{program('c', 'tcp')} & {program('b')} && wait $!"
        sections["program"] = f"if [ $VM_HOST = 1 ]; then {program('a')}; else {second}; fi"
        sections["counters"] = TELL
    return vm.run(
        ["sh", "-c", f"{script_of(sections)}exit $((VM_HOST - 1))"],
        hosts=2, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, memory_mib=1024, timeout=LIMIT,
    )  # fmt: skip
