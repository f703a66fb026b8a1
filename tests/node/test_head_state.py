"""Heads with a log: one that was killed and is started again goes on with its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.hosts import KEEPER, Hosts
from tests.driver.programs import Program, alive
from zcactor.cluster.daemon import KeptState, StartedNode, cluster_in, stop_nodes
from zcactor.control.file_log import FileLog
from zcactor.errors import ConnectionLost
from zcactor.token import read_token_file

PATIENCE = 40.0
"""Seconds that nodes wait for their head: they have to outlast its start on a machine that is busy."""

USING = (
    KEEPER
    + """
async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=40.0)):
        here, member = [node.node_id for node in await zc.nodes()]
        mine = await Keeper.options(name="mine", node=member, num_cpus=1, max_restarts=2).spawn()
        kept = await Keeper.options(name="kept", node=member, lifetime="detached").spawn()
        near = await Keeper.options(name="near", resources={"tape": 1}, max_restarts=2).spawn()
        mortal = await Keeper.options(name="mortal", node=here).spawn()
        nameless = await Keeper.options(node=member).spawn()
        pids = [await actor.pid() for actor in (mine, kept, nameless)]
        await asyncio.gather(*(actor.add() for actor in (mine, kept, near, mortal, nameless)))
        tell(ready=[await near.pid(), await mortal.pid()])
        while not os.path.exists(GATE):  # until the head is killed
            await asyncio.sleep(0.01)
        tell(calls=[await actor.add() for actor in (mine, kept, nameless)])
        if not WITH_ITS_NODE:
            tell(near_calls=[await actor.add() for actor in (near, mortal)])
        asked = [asyncio.create_task(zc.get_actor("mine")), asyncio.create_task(Keeper.options(node=member).spawn())]
        await asyncio.sleep(0)
        tell(waiting=[task.done() for task in asked])
        found, spawned = await asyncio.gather(*asked)
        tell(found=[await found.pid() == pids[0], await found.add(), await spawned.add()])
        again = await zc.get_actor("near")
        added = await again.add()
        restarts = {each.name: each.restarts for each in await zc.actors() if each.name}["near"]
        tell(near=[added, restarts, await again.pid()])
        try:
            tell(mortal=await (await zc.get_actor("mortal")).pid())
        except zc.NoSuchActor:
            tell(mortal=None)
        tell(same=[await actor.pid() for actor in (mine, kept, nameless)] == pids)
        tell(free=(await zc.available_resources())["CPU"])
        del nameless, spawned, asked
        while any(each.state != "dead" and not each.name for each in await zc.actors()):  # without a collection
            await asyncio.sleep(0.01)
        tell(left=sorted(each.name for each in await zc.actors() if each.state != "dead"))
    tell(done=True)
zc.run(main())
"""
)

LOOKING = """
async def main():
    async with zc.init(ADDRESS):
        kept = await zc.get_actor("kept")
        tell(kept=[type(kept).__name__, [each.name for each in await zc.actors() if each.state != "dead"]])
zc.run(main())
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as found:
        yield found


def begin(hosts: Hosts, *, fresh: bool = False, port: int = 0, **settings: Any) -> StartedNode:
    """Start a head whose log is in the folder ``state/log``."""
    state = KeptState(hosts.directory / "log", fresh)
    settings = {"head_patience": PATIENCE, "head_timeout": PATIENCE, "resources": {"tape": 1.0}, **settings}
    return hosts.start(state=state, port=port, **settings)


def kill(node: StartedNode) -> None:
    node.process.kill()
    node.process.wait()


def end(hosts: Hosts, *nodes: StartedNode) -> None:
    """End all nodes in order, and check that nothing is left."""
    for host in "ab":
        with hosts.on(host):
            stop_nodes(5.0)
    for node in nodes:
        node.process.wait(20)
    hosts.assert_clean("a", "b")


def answers(program: Program, *names: str) -> dict[str, Any]:
    return {name: program.told(name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("with_its_node", [False, True])
def test_a_killed_head_goes_on_where_it_was(hosts: Hosts, with_its_node: bool) -> None:
    head = begin(hosts)
    assert head.member is not None
    member = hosts.start("b", head, head_timeout=PATIENCE)
    gate = hosts.directory / "gate"
    source = f"GATE, WITH_ITS_NODE = {str(gate)!r}, {with_its_node}\n{USING}"
    with hosts.program(source, head.record.address, host="b") as program:
        near, mortal = program.told("ready")
        kill(head)
        if with_its_node:
            kill(head.member)
        gate.touch()
        assert program.told("calls") == [2, 2, 2], "calls do not need the head"
        if not with_its_node:
            assert program.told("near_calls") == [2, 2], "nor do those to actors on its host"
        assert program.told("waiting") == [False, False]
        again = begin(hosts)
        assert again.record.address == head.record.address
        assert again.record.node == head.record.node
        assert (again.member is not None) == with_its_node, "a node that is left is not started twice"
        told = answers(program, "found", "near", "mortal", "same", "free", "left", "done")
        left = ["kept", "mine", "near"] if with_its_node else ["kept", "mine", "mortal", "near"]
        assert {name: told[name] for name in ("found", "same", "free", "left", "done")} == {
            "found": [True, 3, 1], "same": True, "free": 3.0, "left": left, "done": True,
        }  # fmt: skip
        if with_its_node:
            assert told["near"][:2] == [1, 1], "it was started again"
            assert told["mortal"] is None
            assert not alive(near)
        else:
            assert (told["near"], told["mortal"]) == ([3, 0, near], mortal), "the same processes"
        assert program.status() == 0
    assert "is back" in Path(member.record.log).read_text()
    log = Path(again.record.log).read_text()
    nodes = 1 if with_its_node else 2
    assert f"took over cluster {head.record.node[:8]}, epoch 2: {nodes} nodes, " in log
    with hosts.program(LOOKING, again.record.address) as program:
        assert program.told("kept") == ["ActorHandle", ["kept"]]
        assert program.status() == 0
    end(hosts, again, member)


@pytest.mark.slow
def test_the_node_beside_a_killed_head_ends_where_none_comes_back(hosts: Hosts) -> None:
    head = begin(hosts, head_patience=0.2)
    assert head.member is not None
    kill(head)
    assert head.member.process.wait(PATIENCE) == 0
    assert "has not come back in 0.2 s" in Path(head.member.record.log).read_text()
    hosts.assert_clean("a")


@pytest.mark.slow
def test_the_node_beside_a_head_is_killed(hosts: Hosts) -> None:
    head = begin(hosts)
    assert head.member is not None
    source = """
async def main():
    async with zc.init(ADDRESS):
        tell(ready=True)
        while await zc.nodes():
            await asyncio.sleep(0.01)
        tell(left=True)
zc.run(main())
"""
    with hosts.program(source, head.record.address) as program:
        assert program.told("ready")
        kill(head.member)
        assert program.told("left"), "the head goes on"
        assert program.status() == 0
    end(hosts, head)


LEFT_ALONE = """
async def main():
    async with zc.init(config=zc.Config(address=ADDRESS, head_timeout=40.0)):
        tell(ready=True)
        try:
            while True:
                await zc.nodes()
        except zc.ConnectionLost:
            tell(lost=True)
zc.run(main())
"""


@pytest.mark.slow
def test_nobody_waits_for_a_head_that_has_ended_in_order(hosts: Hosts) -> None:
    head = begin(hosts)
    member = hosts.start("b", head)
    with hosts.program(LEFT_ALONE, head.record.address, host="b") as program:
        assert program.told("ready")
        head.process.terminate()
        assert program.told("lost"), "and not after head_timeout"
        assert program.status() == 0
    assert "looking for it" not in Path(member.record.log).read_text()
    end(hosts, head, member)


@pytest.mark.slow
def test_after_an_end_in_order_or_a_fresh_start_the_cluster_is_another(hosts: Hosts) -> None:
    head = begin(hosts)
    state = KeptState(hosts.directory / "log")
    assert cluster_in(state, read_token_file(hosts.token_file)) is not None
    head.process.terminate()
    assert head.process.wait(20) == 0
    assert cluster_in(state, read_token_file(hosts.token_file)) is None
    second = begin(hosts)
    assert second.record.node != head.record.node
    kill(second)
    third = begin(hosts, fresh=True)
    assert third.record.node not in (head.record.node, second.record.node)
    end(hosts, third)


@pytest.mark.slow
def test_a_log_that_another_head_uses_or_that_cannot_be_read(hosts: Hosts) -> None:
    head = begin(hosts)
    with pytest.raises(ConnectionLost, match=rf"is in use by the head at .* \(pid {head.record.pid}\)"):
        begin(hosts, port=int(head.record.address.rpartition(":")[2]))
    kill(head)
    log = FileLog(hosts.directory / "log", bytes(32)).path
    log.write_bytes(b"nonsense" * 1000)
    with pytest.raises(ConnectionLost, match="is damaged.*--fresh"):
        begin(hosts)
    end(hosts, begin(hosts, fresh=True))
