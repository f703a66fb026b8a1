"""Hosts, agents, workers and drivers of a simulated cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.simulation.clusters import Keeper, bench
from zcactor.assembly.process import Process
from zcactor.buggify import decided_by
from zcactor.control.head import Head
from zcactor.control.membership import Membership
from zcactor.errors import AuthenticationError
from zcactor.ids import ActorId, ProcessId, SpawnIds, for_spawn
from zcactor.interface import Interface
from zcactor.marshal.packed import Packed
from zcactor.process.cluster import HeadService, WorkerService


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
        ask: Any = process.head.ask
        nodes = [node.node_id for node in await zc.nodes()]
        keepers: list[Any] = [await Keeper.options(node=node).spawn() for node in nodes]
        for keeper in keepers:
            worker = keeper._remote.location[0]
            asked: Any = ({"namespace": "a"}, "Keeper", b"", None, *for_spawn())
            for method, args in ((HeadService.waits, ("Keeper",)), (HeadService.reserve, asked)):
                with pytest.raises(AuthenticationError, match=f"process {worker.hex()} is no worker of the node"):
                    await ask(method, *args, worker)
        with pytest.raises(AuthenticationError):
            await process.head.ask(HeadService.waits, "Keeper", b"nobody has this ")

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


def test_a_repeated_request_gets_the_first_answer() -> None:
    """The head is asked as a spawner asks it whose answers were lost."""

    async def program(process: Process) -> None:
        ask: Any = process.head.ask
        wire = Interface.of(Keeper).wire()
        recipe = Packed(*process.marshaller.pack_call((Keeper,), {}))

        async def reserve(made: SpawnIds, **options: Any) -> tuple[Any, bool]:
            given = {"namespace": "n", "num_cpus": 1, **options}
            return await ask(HeadService.reserve, given, "Keeper", wire, None, *made, b"")  # type: ignore[no-any-return]

        async def workers() -> int:
            return sum(node.workers for node in await zc.nodes())

        made = for_spawn()
        answers = await asyncio.gather(*(reserve(made, name="one") for _ in range(3)))
        assert not any(existed for _, existed in answers)
        assert {handle._remote.actor_id for handle, _ in answers} == {made.actor}
        assert await workers() == 1
        handle = answers[0][0]
        process_id, index = handle._remote.location
        session = await process.connections.connect(process_id)
        await process.requests.ask(
            session, WorkerService.create, index, made.actor, made.object_id, 0, {"namespace": "n"}, wire, recipe, None
        )
        for _ in range(2):
            assert await ask(HeadService.constructed, made.actor, None) is None
            assert await handle.keep("abc") == 3
        again, existed = await reserve(made, name="one")
        assert not existed and await again.size() == 3 and await workers() == 1

        late = for_spawn()
        for _ in range(2):
            with pytest.raises(zc.NameTaken):
                await reserve(late, name="one")
        for _ in range(2):
            found, existed = await reserve(late._replace(request=b"another"), name="one", get_if_exists=True)
            assert existed and found._remote.actor_id == made.actor
        with pytest.raises(ValueError, match="another one has them"):
            await reserve(for_spawn()._replace(object_id=made.object_id))

        kills = [asyncio.ensure_future(ask(HeadService.kill, made.actor)) for _ in range(3)]
        for kill in asyncio.as_completed(kills):
            await kill
            assert await workers() == 0, "each answer comes when the process has ended"
        await ask(HeadService.kill, made.actor)
        await ask(HeadService.stop, made.actor)
        await ask(HeadService.constructed, made.actor, None)
        with pytest.raises(zc.ActorDied, match="killed by zc.kill"):
            await reserve(made, name="one")
        with pytest.raises(zc.NameTaken):
            await reserve(late, name="one")  # its answer from before, although the name is free
        assert await workers() == 0
        assert (await zc.available_resources())["CPU"] == 16.0

    with bench(2) as made:
        made.run(program)
        assert not made.world.problems


def test_a_report_that_is_repeated_late_changes_no_later_life() -> None:
    async def program(process: Process) -> None:
        spawned: Any = await Keeper.options(max_restarts=1).spawn()
        made = spawned._remote.actor_id
        head: Any = bench_made.cluster.hosts["h0"].node
        record = head._actors.get(made)
        record.worker.kill("the test ends it")
        await asyncio.wait([record.gone or record.worker.ended])
        assert record.state == "restarting"
        await process.head.ask(HeadService.constructed, made, None)
        assert record.state == "restarting"
        assert await spawned.keep("abc") == 3
        assert record.restarts == 1

    with bench(1) as bench_made:
        bench_made.run(program)


def test_spawns_kills_and_stops_whose_answers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request that may be repeated is made three times, by a driver and by the workers of another node."""
    asked: Counter[str] = Counter()
    kill = Head.kill

    async def counting(self: Head, actor_id: ActorId) -> None:
        asked["kill"] += 1
        await kill(self, actor_id)

    monkeypatch.setattr(Head, "kill", counting)

    async def program(_: Process) -> None:
        nodes = [node.node_id for node in await zc.nodes()]
        keepers: list[Any] = [await Keeper.options(node=nodes[n % 2], name=f"k{n}").spawn() for n in range(4)]
        assert [await keeper.spawn_another() for keeper in keepers] == [3] * 4
        await zc.kill(keepers[0])
        await asyncio.gather(*map(zc.stop, keepers))
        again: Any = await Keeper.options(name="k0").spawn()
        assert await again.keep("ab") == 2
        await zc.kill(again)
        await asyncio.sleep(3)  # the head stops the actors without holders
        assert (await zc.available_resources())["CPU"] == 16.0
        assert sum(node.workers for node in await zc.nodes()) == 0

    with decided_by(lambda place: place == "ask again"), bench(2) as made:
        made.run(program)
        assert not made.world.problems
    assert asked["kill"] == 6
