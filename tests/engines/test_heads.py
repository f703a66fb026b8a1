"""Heads whose log is in a real etcd: they are killed, and others lead. `make test-engines` installs etcd."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.hosts import KEEPER, Hosts
from tests.driver.programs import Program, until
from tests.engines.etcds import Etcd
from tests.engines.launching import User
from zcactor.cluster import daemon
from zcactor.cluster.daemon import EtcdState, StartedNode, stop_nodes
from zcactor.driver.finding import find_head

pytestmark = pytest.mark.slow

PATIENCE = 60.0
"""Seconds that nodes wait for their head: they have to outlast its start on a machine that is busy."""
_names = (f"h{number}" for number in itertools.count())

USING = (
    KEEPER
    + """
async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=60.0)):
        nodes = [node.node_id for node in await zc.nodes()]
        kept = [
            await Keeper.options(name=f"kept-{n}", node=node, lifetime="detached", max_restarts=1).spawn()
            for n, node in enumerate(nodes)
        ]
        pids = [await actor.pid() for actor in kept]
        await asyncio.gather(*(actor.add() for actor in kept))
        tell(ready=pids)
        while not os.path.exists(GATE):  # until the head is killed
            await asyncio.sleep(0.01)
        tell(calls=[await actor.add() for actor in kept])
        found = [await zc.get_actor(f"kept-{n}") for n in range(len(kept))]
        tell(found=[await actor.add() for actor in found])
        tell(same=[await actor.pid() for actor in found] == pids)
        made = await Keeper.options(node=nodes[-1]).spawn()
        tell(made=await made.add())
    tell(done=True)
zc.run(main())
"""
)
LOOKING = """
async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=60.0)):
        tell(names=sorted(each.name for each in await zc.actors() if each.name))
        tell(nodes=len(await zc.nodes()))
zc.run(main())
"""


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with User() as user:
        yield Etcd(user)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


@pytest.fixture
def url(etcd: Etcd) -> str:
    """A cluster of its own."""
    return etcd.url(next(_names))


def begin(
    hosts: Hosts, url: str, where: str = "a", *, standby: bool = False, fresh: bool = False, **more: Any
) -> StartedNode:
    """Start a head, or a standby."""
    settings = {"head_patience": PATIENCE, "head_timeout": PATIENCE, **more}
    return hosts.start(where, state=EtcdState(url, fresh, standby), **settings)


def kill(node: StartedNode) -> None:
    node.process.kill()
    node.process.wait()


def said(node: StartedNode, words: str) -> None:
    """Wait until the log of a head has these words."""
    until(lambda: words in Path(node.record.log).read_text(), f"the words {words!r}", PATIENCE)


def goes_on(program: Program, nodes: int) -> None:
    """Check that a program whose head was killed finds the same actors, on so many nodes, at the next one."""
    assert program.told("calls") == [2] * nodes
    assert (program.told("found"), program.told("same"), program.told("made")) == ([3] * nodes, True, 1)
    assert program.status() == 0


def is_whole(hosts: Hosts, address: str, nodes: int, host: str = "a") -> None:
    """Check that another program finds the detached actors and all nodes."""
    with hosts.program(LOOKING, address, host=host) as program:
        assert (program.told("names"), program.told("nodes")) == ([f"kept-{n}" for n in range(nodes)], nodes)
        assert program.status() == 0


def is_with(hosts: Hosts, address: str, nodes: int) -> None:
    """Check that a program finds so many nodes at the head to which that address leads."""
    with hosts.program(LOOKING, address) as program:
        assert (program.told("names"), program.told("nodes")) == ([], nodes)
        assert program.status() == 0


def end(hosts: Hosts, *nodes: StartedNode) -> None:
    """End all nodes in order, and check that nothing is left."""
    for host in "ab":
        with hosts.on(host):
            stop_nodes(5.0)
    for node in nodes:
        node.process.wait(20)
    hosts.assert_clean("a", "b")


def test_a_killed_head_goes_on_where_it_was(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    assert head.record.role == "head"
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{USING}", head.record.address) as program:
        program.told("ready")
        kill(head)
        gate.touch()
        assert program.told("calls") == [2]
        port = int(head.record.address.rpartition(":")[2])
        again = begin(hosts, url, port=port)
        assert again.record.address == head.record.address
        assert again.member is None, "a node that is left is not started twice"
        assert (program.told("found"), program.told("same"), program.told("made")) == ([3], True, 1)
        assert program.status() == 0
    said(again, "took over cluster ")
    is_whole(hosts, url, 1)
    end(hosts, again)


def test_a_standby_leads_once_the_head_is_killed(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    assert standby.record.role == "standby"
    assert standby.member is not None
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{USING}", f"{standby.record.address}") as program:
        program.told("ready")
        kill(head)
        gate.touch()
        goes_on(program, 2)
    said(standby, "took over cluster ")
    is_whole(hosts, f"{head.record.address},{standby.record.address}", 2, "b")
    end(hosts, standby)


def test_a_head_that_is_stopped_for_a_while_stands_by_again(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{USING}", url) as program:
        program.told("ready")
        head.process.send_signal(signal.SIGSTOP)
        said(standby, "took over cluster ")
        gate.touch()
        goes_on(program, 2)
    head.process.send_signal(signal.SIGCONT)
    said(head, "this head decides no more")
    is_whole(hosts, head.record.address, 2)
    kill(standby)
    said(head, "took over cluster ")
    is_whole(hosts, f"{standby.record.address},{head.record.address}", 2)
    end(hosts, head)


def has_asked(port: int) -> bool:
    """Whether a connection of this process to that port has bytes that its peer has not read."""
    own = [
        each.laddr.port for each in psutil.Process().net_connections("tcp4") if each.raddr and each.raddr.port == port
    ]
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return any(
        int(local.rpartition(":")[2], 16) == port
        and int(remote.rpartition(":")[2], 16) in own
        and int(queues.rpartition(":")[2], 16) > 0
        for _, local, remote, _, queues, *_ in rows
    )


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_node_asks_a_stopped_head_and_joins_the_one_that_leads_when_that_goes_on(
    hosts: Hosts, url: str, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    head.process.send_signal(signal.SIGSTOP)
    said(standby, "took over cluster ")
    asked: list[str] = []

    async def find_as_it_goes_on(address: str, *args: Any) -> Any:
        looking = asyncio.create_task(find_head(address, *args))
        if not asked:
            while not has_asked(int(address.rpartition(":")[2])):  # the system tells nobody
                await asyncio.sleep(0.005)
            head.process.send_signal(signal.SIGCONT)  # it finds the question before it hears that another one leads
        asked.append(address)
        return await looking

    monkeypatch.setattr(daemon, "find_head", find_as_it_goes_on)
    node = hosts.start(host, head.record.address, head_timeout=PATIENCE)
    assert set(asked) == {head.record.address}
    said(head, "this head decides no more")
    for address in (head.record.address, standby.record.address):
        is_with(hosts, address, 3)
    kill(head)
    is_with(hosts, standby.record.address, 3)  # neither it nor the other two have been with the head that is gone
    end(hosts, standby)
    assert node.process.wait(20) == 0


def test_a_head_that_nobody_was_told_of_calls_nodes_and_programs(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{USING}", head.record.address, host="b") as program:
        program.told("ready")
        head.process.send_signal(signal.SIGSTOP)  # the connections to it do not end
        standby = begin(hosts, url, "b", standby=True)
        said(standby, "took over cluster ")
        gate.touch()
        goes_on(program, 1)
    with hosts.program(LOOKING, standby.record.address, host="b") as program:
        assert (program.told("names"), program.told("nodes")) == (["kept-0"], 2)
        assert program.status() == 0
    kill(head)
    end(hosts, standby)


def test_a_head_that_is_ended_resigns_to_a_standby(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    gate = hosts.directory / "gate"
    gate.touch()
    with hosts.program(f"GATE = {str(gate)!r}\n{USING}", url, host="b") as program:
        assert program.status() == 0
    said_standbys(hosts, head, [standby.record.address])
    with hosts.on("a"):
        stop_nodes(5.0)
    assert head.process.wait(20) == 0
    said(standby, "took over cluster ")
    with hosts.program(LOOKING, url, host="b") as program:
        assert program.told("names") == ["kept-0", "kept-1"], "one of them was started again"
        assert program.status() == 0
    end(hosts, standby)


DRAINING = (
    KEEPER
    + """
async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=60.0)):
        kept = await Keeper.options(name="kept-0", lifetime="detached", max_restarts=1).spawn()  # beside this program
        await kept.add()
        tell(ready=await kept.pid())
        while not os.path.exists(GATE):  # until the node is drained
            await kept.add()
        while not (alive := [each for each in await zc.actors() if each.state == "alive"]):
            await asyncio.sleep(0.01)  # until its process has returned to the head that leads now
        (actor,) = alive
        tell(moved=[actor.restarts, actor.node_id, actor.pid == await kept.pid()])
    tell(done=True)
zc.run(main())
"""
)


def test_the_head_resigns_whose_host_is_drained(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    said_standbys(hosts, head, [standby.record.address])
    assert head.member is not None
    assert standby.member is not None
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{DRAINING}", url) as program:
        program.told("ready")
        environ = {"ZCACTOR_HEAD_TIMEOUT": "60"}
        done = hosts.zcactor("drain", head.member.record.node[:8], host="b", environ=environ)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"the head on its host has resigned, and the one at {standby.record.address} leads" in done.stdout
        gate.touch()
        assert program.told("moved") == [0, standby.member.record.node, True]
        assert program.status() == 0
    assert (head.process.wait(20), head.member.process.wait(20)) == (0, 0)
    said(standby, "took over cluster ")
    is_whole(hosts, standby.record.address, 1, "b")
    end(hosts, standby)


def said_standbys(hosts: Hosts, head: StartedNode, standbys: list[str]) -> None:
    """Wait until a head knows of these standbys, and check what it says of itself."""

    def told() -> dict[str, Any]:
        shown = hosts.zcactor("status", "--json", "--address", head.record.address)
        assert not shown.returncode, shown.stderr
        found: dict[str, Any] = json.loads(shown.stdout)["head"]
        return found

    until(lambda: told()["standbys"] == standbys, "a head that knows of its standbys", PATIENCE)
    found = told()
    assert found["address"] == head.record.address
    assert found["pid"] == head.record.pid
    assert found["epoch"] > 0
    assert found["log"].startswith("etcd://")
    assert found["state"] in ("leading", "adrift")


def test_a_cluster_that_is_ended_ends_its_standbys(hosts: Hosts, url: str) -> None:
    head = begin(hosts, url)
    standby = begin(hosts, url, "b", standby=True)
    ended = hosts.zcactor("stop", "--cluster", "--address", standby.record.address)
    assert not ended.returncode, ended.stderr
    for node in (*head.all, *standby.all):
        assert node.process.wait(PATIENCE) == 0
    hosts.assert_clean("a", "b")
    end(hosts, begin(hosts, url))


WAITING = """
@zc.actor
class Keeper:
    def add(self): return 1

async def refused():
    try:
        await Keeper.spawn()
    except zc.HeadUnavailable as error:
        return error.log
    return None

async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=60.0)):
        kept = [await Keeper.options(node=node.node_id).spawn() for node in await zc.nodes()]
        tell(ready=True)
        while not os.path.exists(GATE):  # until etcd is stopped
            await asyncio.sleep(0.01)
        logs = []
        while len(logs) < 3:  # each takes as long as the log's patience, some seconds
            log = await refused()
            logs += [log] if log else []
        tell(logs=logs)
        tell(calls=[await actor.add() for actor in kept])
        tell(again=True)
        while await refused():
            pass
        tell(nodes=len(await zc.nodes()))
    tell(done=True)
zc.run(main())
"""


def test_an_outage_of_etcd_ends_nothing(hosts: Hosts) -> None:
    with User() as user:
        etcd = Etcd(user)
        url = etcd.url("outage")
        head = begin(hosts, url, head_patience=12.0)
        standby = begin(hosts, url, "b", standby=True, head_patience=12.0)
        gate = hosts.directory / "gate"
        said_standbys(hosts, head, [standby.record.address])
        with hosts.program(f"GATE = {str(gate)!r}\n{WAITING}", head.record.address) as program:
            program.told("ready")
            etcd.kill(0)  # nothing is being recorded: decisions behind one in doubt wait until etcd is back
            gate.touch()
            assert program.told("logs", PATIENCE) == [url] * 3
            assert program.told("calls") == [1, 1]
            shown = hosts.zcactor("status", "--json", "--address", head.record.address)
            etcd.start()
            assert program.told("again")
            assert program.told("nodes") == 2
            assert program.status() == 0
        assert shown.returncode == 0, shown.stderr
        found = json.loads(shown.stdout)
        assert found["head"]["state"] in ("leading", "adrift"), "its term lasts for some seconds after the log's end"
        assert [node["address"] for node in found["nodes"]], "a program may look though it is not recorded yet"
        assert {*(node.record.pid for node in (*head.all, *standby.all))} <= {*hosts.processes()}
        end(hosts, standby, head)


LOSING = (
    KEEPER
    + """
async def added(actor):
    while True:
        try:
            return await actor.add()
        except (zc.ActorDied, zc.ActorUnavailable):  # it was on its way when the process was killed
            await asyncio.sleep(0.05)

async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=60.0)):
        kept = [
            await Keeper.options(node="spread", lifetime="detached", max_restarts=-1).spawn() for _ in await zc.nodes()
        ]
        await asyncio.gather(*(actor.add() for actor in kept))
        tell(ready=len({actor.node_id for actor in await zc.actors()}))
        while not os.path.exists(GATE):  # until more than half of the nodes are killed, with the head
            await asyncio.sleep(0.01)
        tell(calls=sorted(await asyncio.gather(*(added(actor) for actor in kept))))
        tell(nodes=len(await zc.nodes()))
    tell(done=True)
zc.run(main())
"""
)


def test_a_head_is_forced_to_give_up_more_than_half_of_the_nodes(hosts: Hosts, url: str) -> None:
    more: dict[str, Any] = {"head_patience": 12.0, "num_cpus": 4}  # the end of a term, and a busy machine; room for all
    head = begin(hosts, url, **more)
    standby = begin(hosts, url, "b", standby=True, **more)
    hosts.start("a", url, **more)
    gate = hosts.directory / "gate"
    with hosts.program(f"GATE = {str(gate)!r}\n{LOSING}", url, host="b") as program:
        assert program.told("ready") == 3
        lost = hosts.processes_of("a")
        for pid in sorted(lost, key=lambda pid: pid != head.process.pid):  # silent, as a host without power is
            os.kill(pid, signal.SIGSTOP)
        said(standby, "this head decides nothing yet: less than half of the nodes on record serve it")
        shown = hosts.zcactor("status", "--address", standby.record.address, host="b")
        assert "taking over" in shown.stdout and "waits for node " in shown.stdout, shown.stderr
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        gate.touch()
        port = standby.record.address.rpartition(":")[2]
        options = ("--directory", url, "--standby", "--force", "--port", port)
        forced = hosts.zcactor("start", "--head", *options, host="b", environ={"ZCACTOR_HEAD_TIMEOUT": "60"})
        assert (forced.returncode, forced.stdout) == (0, "")
        warning, waits, gave_up = forced.stderr.splitlines()
        assert "its actors live twice" in warning
        assert waits.count("node ") == gave_up.count("node ") == 2
        assert "has given up node " in gave_up
        assert program.told("calls") == [1, 1, 2], "two of the actors have started again"
        assert program.told("nodes") == 1
        assert program.status() == 0
    said(standby, "took over cluster ")
    again = hosts.zcactor("start", "--head", *options, host="b", environ={"ZCACTOR_HEAD_TIMEOUT": "60"})
    assert again.returncode == 1
    assert "leads and acts: start this one without --force" in again.stderr
    with hosts.on("b"):
        stop_nodes(5.0)
    standby.process.wait(20)
    hosts.assert_clean("b")
