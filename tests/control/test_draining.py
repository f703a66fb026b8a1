"""Draining a node: in a simulated cluster, where time is virtual and each order of events has its seed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from tests.control.movers import Tally
from tests.simulation.clusters import Bench, bench
from zcactor.assembly.process import Process
from zcactor.cluster.drain import Drained, drain
from zcactor.control import node_table
from zcactor.control.draining import AT_A_TIME
from zcactor.errors import ConnectionLost
from zcactor.node import worker_main

PATIENCE = 60.0
"""Virtual seconds."""


@pytest.fixture(autouse=True)
def tallies() -> Iterator[None]:
    """Forget the tallies of other tests."""
    Tally.closed.clear()
    Tally.entering.clear()
    Tally.now = 0
    yield


def head_of(made: Bench) -> Any:
    assert made.cluster.head_host is not None
    return made.cluster.head_host.node


def at_rest(made: Bench) -> None:
    """Check that nothing was logged or raised, and that the head's figures add up."""
    made.wait(5.0)
    assert not made.world.problems
    head = head_of(made)
    for node in head._nodes.by_id.values():
        assert head._ledger.is_open(node.id)
        there = [each for each in head._actors.all() if each.node is node]
        assert head._ledger._nodes[node.id].actors == len(there)
    assert all(each.destination is None and each.moving is None for each in head._actors.all())


async def spawned(count: int, **options: Any) -> list[Any]:
    """Actors that may move, on all nodes in turn."""
    options = {"node": "spread", "max_restarts": -1, **options}
    return [await Tally.options(name=f"t{n}", **options).spawn(f"t{n}") for n in range(count)]


async def node_named(host: str) -> str:
    return next(node.node_id for node in await zc.nodes() if node.host == host)


async def places(actors: list[Any]) -> list[str]:
    return list(await asyncio.gather(*(actor.node() for actor in actors)))


def actor_name(actor: Any) -> str:
    return str(actor._remote.name)


async def by_place(actors: list[Any], node: str) -> tuple[Any, Any]:
    """The actor of two that is at `node`, and the other one."""
    here = await places(actors)
    assert here.count(node) == 1
    return actors[here.index(node)], actors[1 - here.index(node)]


def test_actors_move_while_they_are_called_without_pause() -> None:
    async def program(_: Process) -> tuple[Drained, int, list[list[Any]]]:
        actors = await spawned(9)
        node = await node_named("h1")
        there = [n for n, place in enumerate(await places(actors)) if place == node]
        assert len(there) == 3
        over = asyncio.Event()

        async def call(actor: Any) -> list[int]:
            refs: list[Any] = []
            while not over.is_set():
                for method in (actor.add, actor.aadd, actor.iadd):
                    refs.append(method(len(refs)))
                await asyncio.sleep(0.0005)
            assert await asyncio.gather(*refs) == list(range(len(refs)))
            return list(range(len(refs)))

        calls = [asyncio.create_task(call(actor)) for actor in actors]
        done = await drain("h1", 30.0)
        await asyncio.sleep(0.01)
        over.set()
        await asyncio.gather(*calls)
        assert node not in await places(actors)
        assert await asyncio.gather(*(actor.restarts() for actor in actors)) == [0] * 9
        assert [await zc.get_actor(f"t{n}") for n in range(9)] == actors
        assert [info.restarts for info in await zc.actors()] == [0] * 9
        assert sorted(Tally.closed) == sorted(f"t{n}" for n in there)
        assert len(await zc.nodes()) == 2
        return done, len(there), [await actor.all() for actor in actors]

    with bench(3) as made:
        done, moved, entries = made.run(program, host="h2")
        assert (done.moved, done.left, done.joined) == (moved, [], "")
        for each in entries:  # calls of one caller began in order in the last life
            sync = [entry for entry in each if entry % 3 == 0]
            rest = [entry for entry in each if entry % 3]
            assert sync == sorted(sync)
            assert rest == sorted(rest)
        made.wait(10.0)
        assert made.cluster.hosts["h1"].agent is None
        at_rest(made)


def test_at_most_four_move_at_a_time() -> None:
    async def program(_: Process) -> None:
        await spawned(24)
        Tally.entering.clear()
        assert (await drain("h1")).moved == 12

    with bench(2) as made:
        made.run(program)
        assert max(Tally.entering) == AT_A_TIME
        at_rest(made)


def test_a_node_is_named_by_its_id_its_host_or_its_address() -> None:
    async def program(_: Process) -> None:
        node = next(each for each in await zc.nodes() if each.host == "h1")
        assert (await drain(node.node_id[:4].upper())).node == node.node_id
        node = next(each for each in await zc.nodes() if each.host == "h2")
        assert (await drain(node.address.rpartition("@")[2])).node == node.node_id

    with bench(3) as made:
        made.run(program)
        at_rest(made)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", r"there is no node 'nowhere'; nodes: [0-9a-f]{8} \(h0, .*; [0-9a-f]{8} \(h1, "),
        ("ffffffff", "there is no node 'ffffffff'"),
        ("abc", "'abc' is too short for a node's id: give at least 4 digits"),
        ("", "node must be a str of 1 to 1,000 characters, got ''"),
        ("h0", r"node [0-9a-f]{8} \(h0\) is the cluster's head, without which the cluster ends"),
    ],
)
def test_nodes_that_cannot_be_drained(name: str, told: str) -> None:
    async def program(_: Process) -> None:
        with pytest.raises(ValueError if name else TypeError, match=told):
            await drain(name)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_name_of_two_nodes() -> None:
    async def program(_: Process) -> None:
        with pytest.raises(ValueError, match="'same' fits 2 nodes, so give more digits of an id; nodes: "):
            await drain("same")

    with bench(3) as made:
        for host in ("h1", "h2"):
            node = next(each for each in head_of(made)._nodes.by_id.values() if each.facts["host"] == host)
            node.facts["host"] = "same"
        made.run(program)


def test_the_last_node() -> None:
    async def program(_: Process) -> None:
        with pytest.raises(ValueError, match=r"\(h0\) is the last node: its actors have nowhere to go"):
            await drain("h0")

    with bench(1) as made:
        made.run(program)
        at_rest(made)


def test_no_node_is_left_when_the_others_are_drained() -> None:
    async def program(_: Process) -> None:
        actor = await Tally.options(node=await node_named("h1")).spawn()
        first = asyncio.create_task(drain("h1"))
        await asyncio.sleep(0.1)
        with pytest.raises(ValueError, match=r"\(h1\) is being drained already"):
            await drain("h1", 5.0)
        await zc.stop(actor)
        assert (await first).left == []

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_nothing_moves_where_the_others_have_no_room() -> None:
    async def program(_: Process) -> None:
        actors = await spawned(4, num_cpus=4)
        before = await places(actors)
        with pytest.raises(zc.InsufficientResources, match="no room for the 2 actors of .* CPU: 4 is not free; noth"):
            await drain("h1")
        assert await places(actors) == before
        assert Tally.closed == []

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_actors_that_cannot_move_are_listed_and_the_node_is_open_again() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        fixed = await Tally.options(name="fixed", node=node, max_restarts=-1).spawn()
        once = [await Tally.options(name=f"once{n}", node="spread").spawn() for n in range(3)]
        stays = (await places(once)).count(node)
        moving = await spawned(4)
        done = await drain("h1", 2.0)
        assert done.moved == 2
        assert len(done.left) == 1 + stays
        assert "Tally(fixed): it was spawned for this node" in done.left
        assert any(line.endswith("it has max_restarts=0, so only its end frees the node") for line in done.left)
        assert await fixed.node() == node
        assert node not in await places(moving)
        assert await (await Tally.options(node=node).spawn()).node() == node

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_call_that_runs_too_long_keeps_its_actor_which_takes_calls_again() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2), node)
        held = actor.hold("long")
        await actor.began("long")
        done = await drain("h1", 5.0)
        assert done.left == [f"Tally({actor_name(actor)}): it is alive, and has running calls or waits for room"]
        assert await actor.aadd("again") == "again"
        await actor.open()
        assert await held == "long"
        assert await actor.node() == node
        assert Tally.closed == []
        assert (await drain("h1", 5.0)).left == []
        assert await actor.node() != node

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_running_call_that_waits_for_a_later_one_ends() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        actors = await spawned(2)
        actor, other = await by_place(actors, node)
        held = other.hold("gate")
        await other.began("gate")

        async def later() -> Any:
            return await actor.ask_back(other, actor, "later")

        asks = [asyncio.create_task(later()) for _ in range(3)]
        done = asyncio.create_task(drain("h1", 50.0))
        assert await asyncio.gather(*asks) == ["later"] * 3
        await other.open()
        assert await held == "gate"
        assert (await done).moved == 1

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_calls_keep_their_order_where_the_actor_stays_and_its_word_is_late() -> None:
    """A call that is on its way while others go back is no earlier one, also where the actor takes calls again."""

    async def program(_: Process) -> list[Any]:
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2), node)
        record = next(each for each in head_of(made)._actors.all() if each.name == actor_name(actor))
        held = actor.hold("long")
        await actor.began("long")
        draining = asyncio.create_task(drain("h1", 0.5))
        while record.state != "restarting":  # the head has no event for tests
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        made.cluster.network.cut("h1", "h2")
        refs = [actor.add(1), actor.add(2)]
        done = await draining
        assert (done.moved, len(done.left)) == (0, 1)
        refs.append(actor.add(3))
        await asyncio.sleep(0.5)
        made.cluster.network.heal("h1", "h2")
        refs.append(actor.add(4))
        assert await asyncio.gather(*refs) == [1, 2, 3, 4]
        await actor.open()
        assert await held == "long"
        entries: list[Any] = await actor.all()
        return entries

    with bench(3) as made:
        assert made.run(program, host="h2") == ["long began", 1, 2, 3, 4]
        at_rest(made)


def test_arguments_come_back_as_they_were_sent() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        actors = await spawned(2)
        actor, other = await by_place(actors, node)
        held = actor.hold("busy")
        await actor.began("busy")
        done = asyncio.create_task(drain("h1", 50.0))
        await asyncio.sleep(0.2)  # its mailbox is closed now
        moved = zc.ones(5_000)
        refs = [
            actor.aadd(1, more="named"),
            actor.total(zc.ones(5_000)),
            actor.writes(zc.move(moved)),
            actor.total(other.make(3_000)),
            actor.total(zc.put(zc.ones(7))),
            actor.aadd("x" * 100_000),
            actor.aadd([1, {"a": 2.5}, None, b"bytes"]),
            actor.add.options(timeout=40.0)("in time"),
            actor.total(actor.make(11)),
        ]
        cancelled = actor.aadd("cancelled")
        await asyncio.sleep(0)
        cancelled.cancel()
        late = actor.aadd.options(timeout=0.1)("too late")
        stream = actor.items(20)
        with pytest.raises(zc.DeadlineExceeded):
            await late
        head = asyncio.create_task(_collect(stream))
        await asyncio.sleep(0.5)
        opened = asyncio.create_task(_open(actor))
        assert await asyncio.gather(*refs) == [
            [1, "named"], 5_000.0, 10_000.0, 3_000.0, 7.0, "x" * 100_000, [1, {"a": 2.5}, None, b"bytes"], "in time",
            11.0,
        ]  # fmt: skip
        assert await head == list(range(20))
        assert await held == "busy"
        await opened
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert (await done).moved == 1
        assert "cancelled" not in await actor.all()
        assert "too late" not in await actor.all()

    each: tuple[dict[str, Any], ...] = ({}, {"eager_limit": 64})
    for settings in each:
        with bench(2, **settings) as made:
            made.run(program, host="h1")
            at_rest(made)


async def _open(actor: Any) -> None:
    await actor.open()


async def _collect(stream: Any) -> list[Any]:
    return [item async for item in stream]


def test_a_cancelled_drain_opens_the_node_again() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        fixed = await Tally.options(node=node).spawn()
        draining = asyncio.create_task(drain("h1"))
        await asyncio.sleep(1.0)
        assert not draining.done()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert await fixed.node() == node
        assert await (await Tally.options(node=node).spawn()).node() == node

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_nothing_is_placed_on_a_node_that_is_drained() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        fixed = await Tally.options(node=node).spawn()
        draining = asyncio.create_task(drain("h1"))
        await asyncio.sleep(0.1)
        assert node not in await places(await spawned(6))
        waiting = asyncio.create_task(_spawned_there(node))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await zc.stop(fixed)
        await draining
        with pytest.raises(zc.InsufficientResources):
            await waiting

    with bench(2) as made:
        made.run(program)
        at_rest(made)


async def _spawned_there(node: str) -> Any:
    return await Tally.options(node=node).spawn()


def test_a_drained_node_that_dies() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        await Tally.options(node=node).spawn()
        actors = await spawned(3)
        held = [actor.hold("long") for actor in actors]
        for actor in actors:
            await actor.began("long")
        draining = asyncio.create_task(drain("h1"))
        await asyncio.sleep(0.5)
        agent = made.cluster.hosts["h1"].agent
        assert agent is not None
        made.cluster.kill(agent, "its process was killed by signal 9 (SIGKILL)")
        with pytest.raises(ConnectionLost, match=r"\(h1\) was lost while it was drained, after 0 of "):
            await draining
        for actor in actors:
            await actor.open()
        await asyncio.gather(*held, return_exceptions=True)
        assert node not in await places(actors)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_node_that_is_lost_while_a_stopped_process_closes_an_actor() -> None:
    async def program(_: Process) -> None:
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2), node)
        record = next(each for each in head_of(made)._actors.all() if each.name == actor_name(actor))
        worker = next(
            loop for loop in made.world.loops.values() if loop.process and loop.process.process == record.location[0]
        )
        held = actor.hold("long")
        await actor.began("long")
        draining = asyncio.create_task(drain("h1"))
        while record.state != "restarting":  # the head has no event for tests
            await asyncio.sleep(0.01)
        made.world.stop(worker)
        agent = made.cluster.hosts["h1"].agent
        assert agent is not None
        made.cluster.kill(agent, "its process was killed by signal 9 (SIGKILL)")
        with pytest.raises(ConnectionLost, match="was lost while it was drained"):
            await draining
        with pytest.raises(zc.ActorUnavailable):
            await held
        assert await actor.node() != node
        assert await actor.restarts() == 1
        assert record.moving is None
        made.world.resume(worker)
        await zc.stop(actor)

    with bench(3) as made:
        made.run(program, host="h2")
        at_rest(made)


def test_resources_come_back_of_an_actor_that_dies_while_it_moves() -> None:
    async def program(_: Process) -> None:
        actors = await spawned(2, num_cpus=2)
        node = await node_named("h1")
        actor, _other = await by_place(actors, node)
        held = actor.hold("long")
        await actor.began("long")
        draining = asyncio.create_task(drain("h1"))
        record = next(each for each in head_of(made)._actors.all() if each.name == actor_name(actor))
        while record.destination is None:  # the head has no event for tests
            await asyncio.sleep(0.01)
        await zc.kill(actor)
        assert record.destination is None
        with pytest.raises(zc.ActorDied):
            await held
        assert (await draining).left == []
        assert (await zc.available_resources())["CPU"] == 6.0

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_no_actor_goes_to_a_shared_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last actor has moved, and callers still read results there. The node is open again, as it has another
    actor."""
    reading = True
    monkeypatch.setattr(node_table, "SHARED_WORKERS", 1)
    monkeypatch.setattr(worker_main, "_is_needed", lambda _: reading)

    async def program(_: Process) -> None:
        nonlocal reading
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2, process="shared"), node)
        stays = await Tally.options(node=node).spawn("stays")
        former = next(each.worker for each in head_of(made)._actors.all() if each.name == actor_name(actor))
        assert (await drain("h1", 0.5)).moved == 1
        late = await Tally.options(node=node, process="shared").spawn("late")
        assert not former.actors
        assert not former.ended.done()
        reading = False
        await asyncio.sleep(5.0)
        assert former.ended.done()
        assert (await late.aadd(1), await stays.aadd(2)) == (1, 2)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_an_actor_that_is_on_its_way_to_a_process_which_another_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_table, "SHARED_WORKERS", 1)

    async def first(_: Process) -> Any:
        actor, _other = await by_place(await spawned(2, process="shared"), await node_named("h1"))
        return next(each.worker for each in head_of(made)._actors.all() if each.name == actor_name(actor))

    async def second(_: Process) -> None:
        node = await node_named("h1")
        made.cluster.network.cut("h1", "h2")  # so that the constructor's arguments come late
        spawning = asyncio.create_task(Tally.options(node=node, process="shared").spawn("late"))
        await asyncio.sleep(0.1)
        done = await drain("h1", 1.0)
        assert (done.moved, len(done.left)) == (1, 1)
        assert len(worker.actors) == 1
        made.cluster.network.heal("h1", "h2")
        actor = await spawning
        await asyncio.sleep(5.0)
        assert await actor.aadd(1) == 1
        assert not worker.ended.done()

    with bench(3) as made:
        worker = made.run(first)
        made.run(second, host="h2")
        at_rest(made)


def test_a_process_that_cannot_be_told_that_it_may_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process would stay, as callers still read results there."""
    monkeypatch.setattr(worker_main, "_is_needed", lambda _: True)

    async def program(_: Process) -> None:
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2, process="shared"), node)
        stays = await Tally.options(node=node).spawn("stays")
        head = head_of(made)
        former = next(each.worker for each in head._actors.all() if each.name == actor_name(actor))
        connections = head.draining._process.connections
        connect = connections.connect

        async def cut_off(process: Any, *args: Any) -> Any:
            if process == former.process and not former.actors:
                raise ConnectionLost("it is cut off")
            return await connect(process, *args)

        monkeypatch.setattr(connections, "connect", cut_off)
        assert (await drain("h1", 0.5)).moved == 1
        await asyncio.sleep(5.0)
        assert former.ended.done()
        assert (await actor.aadd(1), await stays.aadd(2)) == (1, 2)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_call_is_made_again_whose_connection_breaks_while_its_actor_is_followed() -> None:
    """The call is open at the former place, which has no answer to wait for."""

    async def program(_: Process) -> None:
        node = await node_named("h1")
        actor, _other = await by_place(await spawned(2), node)
        stays = await Tally.options(node=node).spawn("stays")
        await actor.aadd(0)
        made.cluster.network.cut("h1", "h2")
        again = actor.aadd.options(retries=2, idempotent=True)(1)
        assert (await drain("h1", 1.0)).moved == 1
        await asyncio.sleep(10.0)  # the connection is given up
        made.cluster.network.heal("h1", "h2")
        assert await stays.aadd(3) == 3
        async with asyncio.timeout(20.0):
            assert (await again, await actor.aadd(2)) == (1, 2)

    with bench(3) as made:
        made.run(program, host="h2")
        at_rest(made)


@pytest.mark.parametrize("end", [zc.stop, zc.kill])
def test_actors_are_ended_while_they_move(end: Any) -> None:
    async def program(_: Process) -> None:
        actors = await spawned(16)
        draining = asyncio.create_task(drain("h1"))
        for actor in actors:
            await asyncio.sleep(0.002)
            await end(actor)
        assert (await draining).left == []
        for actor in actors:
            with pytest.raises(zc.ActorDied):
                await actor.aadd(1)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_constructor_that_raises_elsewhere(tmp_path: Path) -> None:
    async def program(_: Process) -> None:
        failing = tmp_path / "failing"
        actors = [
            await Tally.options(node="spread", max_restarts=-1).spawn(f"t{n}", "", str(failing)) for n in range(2)
        ]
        node = await node_named("h1")
        actor, _other = await by_place(actors, node)
        failing.touch()
        assert (await drain("h1")).moved == 0
        with pytest.raises(zc.ActorDied, match="its constructor raised ValueError when it was restarted: not here"):
            await actor.aadd(1)

    with bench(2) as made:
        made.run(program)
        at_rest(made)


def test_a_node_that_does_not_start_again() -> None:
    async def program(_: Process) -> None:
        with pytest.raises(ConnectionLost, match=r"\(h1\) has left and did not start again in 3 s; see the newest log"):
            await drain("h1", restart=True)

    with bench(2, spawn_timeout=3.0) as made:
        made.run(program)
        at_rest(made)


def test_a_rank_of_a_run_does_not_start_again() -> None:
    async def program(_: Process) -> None:
        with pytest.raises(ValueError, match="is a rank of a run: it does not start again, as its launcher starts it"):
            await drain("h1", restart=True)

    with bench(2) as made:
        node = next(each for each in head_of(made)._nodes.by_id.values() if each.facts["host"] == "h1")
        node.facts["rank"] = 1
        made.run(program)
