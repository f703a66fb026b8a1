"""Clusters of hosts that share nothing but a cable: network namespaces, with addresses other than loopback."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.driver.programs import ROOT, until
from tests.hosts.netns import CARD, Host, Network, Program, missing

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

TOKEN = {"ZCACTOR_TOKEN": "5a" * 32, "ZCACTOR_STORE_CAPACITY": str(1 << 28), "PYTHONPATH": str(ROOT)}
MIB = 1 << 20
BARE = {"ZCACTOR_SECURITY": "frames"}
NOTICED = 16.0
"""Seconds in which a cut cable must be noticed: the six that are promised, and time for a busy machine."""


def zcactor(host: Host, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run the `zcactor` command on a host, with further variables of its environment."""
    with host.start(
        sys.executable, "-m", "zcactor", *arguments,
        env={**TOKEN, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        output, _ = process.communicate(timeout=40)
        return subprocess.CompletedProcess(arguments, process.returncode, output)


def start_nodes(hosts: list[Host], **settings: str) -> str:
    """Start a node on each host, on the first one the head's, with further variables of their environment. Returns the
    head's address."""
    head = f"{hosts[0].address}:7433"
    for host in hosts:
        arguments = ["--head", "--host", host.address] if host is hosts[0] else ["--address", head]
        done = zcactor(host, "start", *arguments, "--num-cpus", "2", **settings)
        assert done.returncode == 0, done.stdout
        assert f"ready at {host.address}:" in done.stdout
    return head


@pytest.fixture
def cluster() -> Iterator[tuple[list[Host], str]]:
    """Two hosts with a node each, the first the head's, and the head's address."""
    with Network(2, direct=True) as hosts:
        yield hosts, start_nodes(hosts)


@pytest.fixture
def four() -> Iterator[tuple[list[Host], str]]:
    """Four hosts on a switch, likewise; the bytes of arrays have no tags, so that they are added as they arrive."""
    with Network(4) as hosts:
        yield hosts, start_nodes(hosts, **BARE)


def program(host: Host, head: str, **settings: str) -> Program:
    """Start a program on `host` that joins the cluster, with further variables of its environment."""
    return host.python(str(Path(__file__).with_name("far_driver.py")), head, env={**TOKEN, **settings})


def test_two_hosts(cluster: tuple[list[Host], str]) -> None:
    (a, b), head = cluster
    with program(a, head) as driver:
        (first, *here), (second, *there) = driver.ask("nodes")
        assert [*here, *there] == ["a", ["local", "verbs", "tcp"], "b", ["local", "verbs", "tcp"]]
        driver.ask("spawn", name="near", node=first)
        driver.ask("spawn", name="far", node=second)
        assert driver.ask("path", name="near")[0] == "local"
        transport, reason = driver.ask("path", name="far")
        assert transport == "tcp"
        assert "sealed" in reason
        assert driver.ask("total", name="far", nbytes=8 * MIB) == 2.0 * MIB
        assert driver.ask("passed", maker="near", reader="far", nbytes=8 * MIB) == MIB
        assert driver.ask("passed", maker="far", reader="near", nbytes=8 * MIB) == MIB
        assert driver.ask("stats") == {"bytes_copied": 0, "bytes_received": 0, "bytes_mapped": 0}
    with program(b, head) as other:  # the first program has gone, and detached actors stay
        other.ask("find", name="far")
        assert other.ask("path", name="far")[0] == "local"
        other.ask("find", name="near")
        assert other.ask("path", name="near")[0] == "tcp"
    assert zcactor(b, "stop").returncode == 0
    listed = zcactor(a, "status")
    assert "near" in listed.stdout and "far" not in listed.stdout, listed.stdout


def received(host: Host) -> int:
    """Bytes that have come to a host by its cable."""
    (card,) = json.loads(host.command("ip", "-stats", "-json", "link", "show", CARD))
    found: int = card["stats64"]["rx"]["bytes"]
    return found


@pytest.mark.parametrize(("reproducible", "inputs"), [("placement", 1.0), ("everywhere", 1.5)])
def test_a_group_takes_one_sum_of_the_other_host(
    cluster: tuple[list[Host], str], reproducible: str, inputs: float
) -> None:
    """Two ranks on each host: a host takes half of the other's sum, or of both inputs, and the other finished half."""
    hosts, head = cluster
    elements, times = 1 << 20, 4
    with program(hosts[0], head) as driver:
        (first, *_), (second, *_) = driver.ask("nodes")
        plan = driver.ask("group", nodes=[first, second, first, second], reproducible=reproducible)
        assert plan == ["direct"]
        assert driver.ask("sums", count=1, elements=elements, plan="auto") == [1] * 4
        for plan, wanted in (("auto", inputs), ("naive", 4.0)):
            before = [received(host) for host in hosts]
            assert driver.ask("sums", count=times, elements=elements, plan=plan) == [times] * 4
            for host, earlier in zip(hosts, before, strict=True):
                taken = (received(host) - earlier) / (times * elements * 4)
                assert wanted <= taken < 1.05 * wanted, (plan, taken)


def test_each_of_four_hosts_takes_what_its_plan_says(four: tuple[list[Host], str]) -> None:
    """One rank on each host: 2 n (p - 1) / p bytes come by each cable, or (p - 1) n for the plan that takes all."""
    hosts, head = four
    elements, times, size = 1 << 20, 4, len(four[0])
    with program(hosts[0], head, **BARE) as driver:
        nodes = {name: node for node, name, _ in driver.ask("nodes")}
        assert len(nodes) == size
        plan = driver.ask("group", nodes=[nodes[host.name] for host in hosts], reproducible="placement")
        assert plan == ["direct"]
        for plan in ("auto", "naive", "ring", "halving"):
            wanted = size - 1 if plan == "naive" else 2 * (size - 1) / size
            assert driver.ask("sums", count=1, elements=elements, plan=plan) == [1] * size
            before = [received(host) for host in hosts]
            assert driver.ask("sums", count=times, elements=elements, plan=plan) == [times] * size
            for host, earlier in zip(hosts, before, strict=True):
                taken = (received(host) - earlier) / (times * elements * 4)
                assert wanted <= taken < 1.05 * wanted, (plan, host.name, taken)


def test_a_host_that_is_cut_off(cluster: tuple[list[Host], str]) -> None:
    """Calls to the host end once and in time. Its actors start elsewhere after it has ended them, and not before."""
    (a, b), head = cluster
    with program(a, head) as driver:
        (first, *_), (second, *_) = driver.ask("nodes")
        driver.ask("spawn", name="one", node=second)
        for name in ("filler", "another"):
            driver.ask("spawn", name=name, node=first)
        moves = "two"
        driver.ask("spawn", name=moves, node="spread", restarts=-1)
        assert driver.ask("where", name=moves) == [second, 0]
        waiting = [driver.send("failure", name="one"), driver.send("failure", name=moves)]
        with b.down():
            for number in waiting:
                kind, text, seconds = driver.answer(number)
                assert kind in ("ActorUnavailable", "ActorDied", "ConnectionLost"), text
                assert "may have run" in text
                assert seconds < NOTICED + 3, text  # two of the seconds are for asking the agent about the actor's end
            assert [node for node, *_ in driver.ask("nodes")] == [first]
            until(lambda: len(b.pids()) <= 1, "the node that is cut off ends")
            ended = time.monotonic()
            driver.ask("find", name=moves)

            def has_moved() -> bool:
                """Calls fail until the head is sure that the node has ended its actors."""
                try:
                    return bool(driver.ask("where", name=moves) == [first, 1])
                except OSError as error:
                    if "ActorUnavailable" not in str(error):
                        raise
                    return False

            until(has_moved, "the actor starts elsewhere")
            assert time.monotonic() >= ended
            with pytest.raises(OSError, match="NoSuchActor"):
                driver.ask("find", name="one")
            driver.ask("spawn", name="one", node=first)  # the name is free
        done = zcactor(b, "start", "--address", head)  # the host comes back as a new node
        assert done.returncode == 0, done.stdout
        assert len(driver.ask("nodes")) == 2


def test_a_head_that_is_cut_off(cluster: tuple[list[Host], str]) -> None:
    (a, b), head = cluster
    with program(b, head) as driver:
        (first, *_), (second, *_) = driver.ask("nodes")
        driver.ask("spawn", name="here", node=second)
        driver.ask("spawn", name="there", node=first)
        waiting = driver.send("failure", name="there")
        with a.down():
            kind, text, seconds = driver.answer(waiting)
            assert kind in ("ActorUnavailable", "ActorDied", "ConnectionLost"), text
            assert seconds < NOTICED + 3, text
            until(lambda: len(b.pids()) <= 2, "the node ends, and the program stays")


def test_a_token_that_is_another(cluster: tuple[list[Host], str]) -> None:
    (_, b), head = cluster
    with b.start(
        sys.executable, "-m", "zcactor", "start", "--address", head,
        env={**TOKEN, "ZCACTOR_TOKEN": "5b" * 32}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "token" in output and head in output


CUTS: dict[str, Callable[[Host, Host], contextlib.AbstractContextManager[None]]] = {
    "both ways": lambda caller, member: caller.apart(member),
    "nothing comes to the member": lambda caller, member: member.dropping("in", other=caller),
}
"""Cuts between two hosts that both reach the head."""
REACHED = 20.0
"""Seconds: all attempts take six together, and the machine may be busy."""


@pytest.mark.parametrize("cut", list(CUTS.values()), ids=list(CUTS))
def test_a_caller_and_a_member_that_do_not_hear_each_other(
    cut: Callable[[Host, Host], contextlib.AbstractContextManager[None]],
) -> None:
    with Network(3) as (a, b, c):
        head = f"{a.address}:7433"
        for host, arguments in ((a, ["--head", "--host", a.address]), (b, ["--address", head])):
            done = zcactor(host, "start", *arguments, "--num-cpus", "2")
            assert done.returncode == 0, done.stdout
        with program(c, head) as driver:
            _, (member, *_) = driver.ask("nodes")
            driver.ask("spawn", name="far", node=member)
            assert driver.ask("where", name="far") == [member, 0]
            waiting = driver.send("failure", name="far")
            with cut(c, b):
                kind, text, seconds = driver.answer(waiting)
                assert kind == "ActorUnavailable", text
                assert "may have run" in text
                assert seconds < NOTICED + 3, text  # two of the seconds are for asking the agent about the actor's end
                for _ in range(2):
                    kind, text, seconds = driver.ask("failure", name="far")
                    assert kind == "ActorUnavailable", text
                    assert "did not run" in text
                    assert seconds < REACHED, text
                    assert "the cluster's head reaches its node" in text
                    assert f"{c.address}:" in text
                    assert f"{b.address}:" in text
                assert [node for node, *_ in driver.ask("nodes")][1] == member
            until(lambda: driver.ask("reaches", name="far"), "the address is tried again")
