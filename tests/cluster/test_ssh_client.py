"""Nodes by ssh, with an ssh that runs its commands on made-up hosts of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.fake_ssh import VERSIONS, FakeSsh
from tests.cluster.hosts import Hosts
from tests.driver.programs import ROOT, take_signals, until
from zcactor.cluster.records import NodeFile, list_nodes
from zcactor.cluster.ssh_client import HostsFailed, Ways, bring_up, take_down
from zcactor.cluster.ssh_remote import MARK, FarOrder

PATIENCE = 120.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
TOKEN = "5a" * 32
PYTHON = f'exec {sys.executable} "$@"'
GREETS = f"printf '%s\\n' {shlex.quote(MARK + json.dumps({'versions': VERSIONS}))}"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as made:
        yield made


@pytest.fixture
def ssh(hosts: Hosts) -> FakeSsh:
    return FakeSsh(hosts)


def up(ways: Ways, names: Sequence[str], said: list[str] | None = None, head: str = "a", **order: object) -> str:
    """Bring hosts up, with the head at any port."""
    asked = FarOrder("start", TOKEN, port=0, num_cpus=2, **order)  # type: ignore[arg-type]
    lines: list[str] = [] if said is None else said
    return asyncio.run(bring_up(names, head, ways, asked, lines.append))


def down(ways: Ways, names: Sequence[str]) -> list[str]:
    """Take hosts down. Returns the lines about it."""
    said: list[str] = []
    asyncio.run(take_down(names, ways, said.append))
    return said


def nodes(hosts: Hosts, *names: str) -> list[NodeFile]:
    """The nodes that run on hosts."""
    return [node for name in names for node in list_nodes(hosts.run_directories(name))]


def why(ways: Ways, *names: str) -> list[str]:
    """Bring hosts up in vain. Returns the message for each that failed."""
    with pytest.raises(HostsFailed) as failed:
        up(ways, names)
    assert str(failed.value) == "\n".join(map(str, failed.value.failures))
    return [str(failure) for failure in failed.value.failures]


@pytest.mark.slow
def test_up_and_down(hosts: Hosts, ssh: FakeSsh) -> None:
    said: list[str] = []
    head = up(ssh.ways(), ["a", "b"], said, resources={"tape": 2.0})
    first, beside, second = nodes(hosts, "a", "b")
    assert (first.role, first.address) == ("head", head)
    assert [(node.role, node.head) for node in (beside, second)] == [("member", head)] * 2
    assert said[0] == "connecting to a, b"
    assert said[1].startswith(f"a: head ready at {head} (cluster {first.node[:8]}, pid {first.pid}, log ")
    assert said[2].startswith(f"b: member ready at {second.address} (node ")
    told = json.loads(hosts.zcactor("status", "--json", environ={"ZCACTOR_TOKEN": TOKEN}).stdout)
    assert [node["resources"] for node in told["nodes"]] == [{"CPU": 2.0, "tape": 2.0}] * 2
    secret = TOKEN.encode()
    seen = 0
    for pid, command in hosts.processes().items():
        assert TOKEN not in command
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            assert secret not in Path(f"/proc/{pid}/environ").read_bytes()
            seen += 1
    assert seen >= 2
    assert sorted(down(ssh.ways(), ["a", "b"])) == [
        f"a: the head at {head} has ended", f"a: the member at {beside.address} has ended",
        f"b: the member at {second.address} has ended",
    ]  # fmt: skip
    hosts.assert_clean("a", "b")
    assert down(ssh.ways(), ["b"]) == ["b: no node of yours runs there"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "words"),
    [
        ("echo 'kex_exchange: Connection closed' >&2; exit 255", "b: {ssh} failed\n  kex_exchange: Connection closed"),
        ("echo Welcome; exit 3", "b: {ssh} ended with status 3 before it was done"),
        ("PATH=/nowhere", "b: {ssh} ended with status 127 before it was done"),
        (f"echo Welcome; echo '{MARK}7'; exit 0", "b: its output is not that of zcactor: "),
    ],
)
def test_a_host_that_fails(hosts: Hosts, ssh: FakeSsh, commands: str, words: str) -> None:
    ssh.host("b", commands)
    (message,) = why(ssh.ways(), "a", "b")
    assert message.startswith(words.replace("{ssh}", str(ssh.command)))
    hosts.assert_clean("a", "b")


def test_hosts_that_nobody_knows(hosts: Hosts, ssh: FakeSsh) -> None:
    unknown = "c: {}\n  ssh: Could not resolve hostname c: Name or service not known".format(f"{ssh.command} failed")
    assert why(ssh.ways(), "c", "d") == [unknown, unknown.replace("c:", "d:").replace("hostname c", "hostname d")]


def test_no_ssh(ssh: FakeSsh) -> None:
    (message,) = why(Ways(("/no/such/ssh",), sys.executable, VERSIONS), "a")
    assert message == (
        "a: /no/such/ssh cannot be started (No such file or directory): install openssh-client, or name a command by "
        "--ssh or ZCACTOR_SSH"
    )


@pytest.mark.parametrize(
    ("commands", "words"),
    [
        (
            f'printf \'%s\\n\' \'{MARK}{{"versions": ["9.9", "3.99"]}}\'; cat >/dev/null',
            f"zcactor 9.9 on Python 3.99 is there, and zcactor {VERSIONS[0]} on Python {VERSIONS[1]} is here: all "
            "hosts need the same",
        ),
        (f'exec {sys.executable} -IS "$@"', "has no zcactor (No module named 'zcactor'): install it there"),
    ],
)
def test_another_version_or_none(hosts: Hosts, ssh: FakeSsh, commands: str, words: str) -> None:
    ssh.interpreter("a", commands)
    (message,) = why(ssh.ways("fake-python"), "a")
    assert message.startswith("a: ")
    assert words in message


def test_no_python(ssh: FakeSsh) -> None:
    (message,) = why(ssh.ways("/no/such 'python'"), "a")
    assert message == "a: there is no /no/such 'python': name the interpreter of that host by --python"


def test_a_host_that_hangs(hosts: Hosts, ssh: FakeSsh) -> None:
    ssh.host("b", "echo 'Debian is thinking' >&2; cat >/dev/null")
    (message,) = why(ssh.ways(patience=0.5), "b")
    assert message.startswith("b: no answer in 0.5 s")
    hosts.assert_clean("a", "b")


@pytest.mark.slow
def test_a_member_that_fails_takes_the_head_down(hosts: Hosts, ssh: FakeSsh) -> None:
    ssh.host("b", environ={"ZCACTOR_TRANSPORTS": "pigeons"})
    said: list[str] = []
    with pytest.raises(HostsFailed) as failed:
        up(ssh.ways(), ["a", "b"], said)
    (failure,) = failed.value.failures
    assert failure.host == "b" and "transports must be some of local, verbs, tcp" in failure.reason
    assert any(line.startswith("a: head ready at") for line in said)
    assert said[-1] == "a: its node was ended again"
    hosts.assert_clean("a", "b")


@pytest.mark.slow
def test_a_head_that_fails(hosts: Hosts, ssh: FakeSsh) -> None:
    ssh.host("a", environ={"ZCACTOR_HOST": "192.0.2.7"})  # no host's (RFC 5737)
    (message,) = why(ssh.ways(), "a", "b")
    assert message.startswith("a: the node could not start")
    hosts.assert_clean("a", "b")


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_leaves_nothing(hosts: Hosts, ssh: FakeSsh, end: signal.Signals) -> None:
    """Its second host has greeted, and answers no more when the head is ready."""
    ssh.interpreter("a", PYTHON)
    ssh.interpreter("b", f"{GREETS}; cat >/dev/null")
    source = (
        "import asyncio, sys\n"
        "from zcactor.cluster.ssh_remote import FarOrder\n"
        "from zcactor.cluster.ssh_client import Ways, bring_up\n"
        f"ways = Ways((sys.argv[1],), 'fake-python', {VERSIONS})\n"
        "order = FarOrder('start', sys.argv[2], port=0)\n"
        "say = lambda line: print(line, flush=True)\n"
        "asyncio.run(bring_up(['a', 'b'], 'a', ways, order, say))\n"
    )
    with hosts.on("a"):
        process = subprocess.Popen(
            [sys.executable, "-c", source, str(ssh.command), TOKEN],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=take_signals,
        )  # fmt: skip
    with process:
        assert process.stdout is not None
        said = ""
        while "head ready" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert nodes(hosts, "a")
        process.send_signal(end)
        assert process.wait(PATIENCE) != 0
    until(lambda: not hosts.processes(), "the head to end", PATIENCE)
    hosts.assert_clean("a", "b")
