"""Hosts, agents, workers and drivers of a simulated cluster."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.simulation.clusters import Keeper, bench
from zcactor.assembly.process import Process
from zcactor.control.membership import Membership
from zcactor.errors import AuthenticationError
from zcactor.ids import ProcessId


def test_actors_on_all_nodes_are_called_with_arrays() -> None:
    async def program(process: Process) -> list[float]:
        array = zc.ones(10_000, np.float64)
        keepers: list[Any] = [await Keeper.options(node="spread").spawn() for _ in range(3)]
        assert await asyncio.gather(*(keeper.keep(array) for keeper in keepers)) == [10_000] * 3
        assert len(await zc.nodes()) == 3
        assert process.store.stats().used >= array.nbytes
        return [await keeper.total() for keeper in keepers]

    with bench(3) as made:
        assert made.run(program) == [10_000.0] * 3
        assert not made.world.problems


def test_handles_say_where_actors_are_and_the_head_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    find = Membership.find

    async def counting(self: Membership, process: bytes) -> str:
        asked.append(process)
        return await find(self, ProcessId(process))

    monkeypatch.setattr(Membership, "find", counting)

    async def program(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        keepers = [await Keeper.options(node=node).spawn() for node in nodes]
        for keeper in keepers:
            await keeper.keep(keepers)
        assert [await keeper.sizes() for keeper in keepers] == [9] * 3

    with bench(3) as made:
        before = len(asked)
        made.run(program)
        assert asked[before:] == []


@pytest.mark.slow
def test_actors_of_other_nodes_ask_the_head_through_their_nodes() -> None:
    async def program(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        keepers: list[Any] = [await Keeper.options(node=nodes[1 + n % 2], name=f"k{n}").spawn() for n in range(8)]
        for number, keeper in enumerate(keepers):
            await keeper.keep(keepers[number:] + keepers[:number])
            assert await keeper.look_up([f"k{n}" for n in range(8)]) == 8
        assert await keepers[0].spawn_another() == 3
        assert [await keeper.sizes() for keeper in keepers] == [64] * 8
        await asyncio.sleep(3)  # the head stops the actor without holders, in its process
        head = made.cluster.head_host
        assert head is not None and head.agent is not None and head.agent.process is not None
        sessions = head.agent.process.sessions
        peers = {session.peer_process for session in sessions.all()} - {sessions.process}
        assert len(peers) == 2 + 1, "its nodes and the driver"
        for keeper in keepers:
            await zc.stop(keeper)

    with bench(3) as made:
        made.run(program)
        assert not made.world.problems


def test_a_worker_of_another_node_gives_up_a_spawn_that_waits() -> None:
    async def program(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        keeper: Any = await Keeper.options(node=nodes[1], num_cpus=0).spawn()
        full: Any = await Keeper.options(node=nodes[0], num_cpus=8).spawn()
        giving_up = asyncio.ensure_future(keeper.give_up_spawning(nodes[0]))
        head: Any = made.cluster.head_host
        await asyncio.sleep(0.5)
        assert head.node._ledger.waiting == 1
        await giving_up
        await asyncio.sleep(0.5)
        assert head.node._ledger.waiting == 0
        assert await full.keep("abc") == 3

    with bench(2) as made:
        made.run(program)


def test_nobody_spawns_in_the_name_of_a_worker_but_its_nodes_agent() -> None:
    async def program(process: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        keepers: list[Any] = [await Keeper.options(node=node).spawn() for node in nodes]
        for keeper in keepers:
            worker = keeper._remote.location[0]
            for method, args in (("waits", ("Keeper",)), ("reserve", ({"namespace": "a"}, "Keeper", b"", None))):
                with pytest.raises(AuthenticationError, match=f"process {worker.hex()} is no worker of the node"):
                    await process.head.ask_agent(method, *args, worker)
        with pytest.raises(AuthenticationError):
            await process.head.ask_agent("waits", "Keeper", b"nobody has this ")

    with bench(2) as made:
        made.run(program)


def test_a_killed_agent_takes_its_workers_along_and_the_head_notices() -> None:
    handles: list[Any] = []

    async def spawn(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        handles.append(await Keeper.options(node=nodes[1]).spawn())
        assert await handles[0].keep("abc") == 3

    with bench(2) as made:
        made.run(spawn)
        host = made.cluster.hosts["h1"]
        assert host.agent is not None
        assert [loop.host for loop in made.world.loops.values() if loop.name[0] == "w"] == ["h1"]
        made.cluster.kill(host.agent, "killed")
        assert not [loop for loop in made.world.loops.values() if loop.name[0] == "w"]
        made.wait(12)
        head = made.cluster.hosts["h0"].node
        assert len(head._nodes.by_id) == 1  # type: ignore[union-attr]
        made.cluster.start_agent("h1")
        made.wait(1)
        assert len(head._nodes.by_id) == 2  # type: ignore[union-attr]
        handles.clear()


def test_a_host_that_was_off_comes_back_with_another_boot() -> None:
    with bench(2) as made:
        host = made.cluster.hosts["h1"]
        before = host.machine
        made.cluster.switch_off("h1")
        assert host.agent is None
        made.wait(15)
        head = made.cluster.hosts["h0"].node
        assert len(head._nodes.by_id) == 1  # type: ignore[union-attr]
        made.cluster.switch_on("h1")
        made.wait(1)
        assert host.machine != before
        assert made.cluster.joined == 3
        assert len(head._nodes.by_id) == 2  # type: ignore[union-attr]
