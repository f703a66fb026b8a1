"""Places of new actors: processes that start while the log takes the actor, and nodes that are lost before that."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

import zcactor as zc
from tests.control.gated_log import GatedLog, has
from tests.simulation.clusters import Bench, Keeper, bench
from zcactor.assembly.process import Process
from zcactor.control.head import Head


def cut_off(made: Bench, host: str) -> None:
    """Cut a host off from all others, both ways. Nobody has noticed it yet."""
    for other in made.cluster.hosts:
        if other != host:
            made.cluster.network.cut(host, other)
            made.cluster.network.cut(other, host)


def test_a_spawn_across_a_cut_that_nobody_has_noticed_is_placed_elsewhere() -> None:
    async def program(_: Process) -> None:
        one, two = [node.node_id for node in await zc.nodes()][1:]
        cut_off(made, "h1")
        kinds: list[Literal["own", "shared"]] = ["own", "own", "own", "shared", "shared", "shared"]
        spawning = [Keeper.options(node="spread", name=f"k{n}", process=process).spawn()
                    for n, process in enumerate(kinds)]  # fmt: skip
        keepers: list[Any] = await asyncio.gather(*spawning)
        assert [await keeper.keep("abc") for keeper in keepers] == [3] * 6
        places = {each.name: each.node_id for each in await zc.actors()}
        assert one not in places.values()
        assert two in places.values()
        assert [(await zc.get_actor(f"k{n}"))._remote.actor_id for n in range(6)] == [
            keeper._remote.actor_id for keeper in keepers
        ]
        await asyncio.gather(*map(zc.kill, keepers))
        await asyncio.sleep(30)  # until the node is given up
        assert (await zc.available_resources())["CPU"] == 16.0

    with bench(3) as made:
        made.run(program, patience=200.0)
        head = made.cluster.hosts["h0"].node
        assert isinstance(head, Head)
        assert len(head._nodes.by_id) == 2


def test_a_spawn_for_a_node_that_is_lost_says_so() -> None:
    async def program(_: Process) -> None:
        one = (await zc.nodes())[1].node_id
        cut_off(made, "h1")
        with pytest.raises(zc.InsufficientResources, match=f"node {one[:8]} .* cannot be reached"):
            await Keeper.options(node=one, name="k").spawn()
        again: Any = await Keeper.options(name="k").spawn()
        assert await again.keep("abc") == 3

    with bench(2) as made:
        made.run(program, patience=200.0)


def test_a_spawn_that_fits_only_into_a_node_that_is_lost() -> None:
    async def program(_: Process) -> None:
        cut_off(made, "h1")
        blocking: Any = await Keeper.options(num_cpus=5).spawn()
        spawning = asyncio.ensure_future(Keeper.options(num_cpus=5).spawn())
        await asyncio.sleep(30)
        assert not spawning.done(), "it waits for room at the other node"
        await zc.kill(blocking)
        found: Any = await spawning
        assert await found.keep("abc") == 3

    with bench(2) as made:
        made.run(program, patience=200.0)


def test_a_spawn_on_a_node_that_is_killed_is_placed_elsewhere() -> None:
    async def program(_: Process) -> None:
        spawning = asyncio.gather(*(Keeper.options(node="spread").spawn() for _ in range(6)))
        head = made.cluster.hosts["h0"].node
        assert isinstance(head, Head)
        while not any(node.workers.by_process for node in head._nodes.by_id.values() if node is not head._nodes.own):
            await asyncio.sleep(0.00001)
        agent = made.cluster.hosts["h1"].agent
        assert agent is not None
        made.cluster.kill(agent, "the test kills it")
        keepers: list[Any] = await spawning
        assert [await keeper.keep("abc") for keeper in keepers] == [3] * 6

    with bench(2) as made:
        made.run(program, patience=200.0)


def test_a_spawn_is_cancelled_while_it_is_placed_anew() -> None:
    async def program(_: Process) -> None:
        cut_off(made, "h1")
        blocking: Any = await Keeper.options(num_cpus=5).spawn()
        spawning = asyncio.ensure_future(Keeper.options(num_cpus=5, name="k").spawn())
        await asyncio.sleep(30)
        spawning.cancel()
        await asyncio.wait([spawning])
        await asyncio.sleep(1)
        again: Any = await Keeper.options(name="k").spawn()
        assert await again.keep("abc") == 3
        await asyncio.gather(zc.kill(again), zc.kill(blocking))
        assert (await zc.available_resources())["CPU"] == 8.0

    with bench(2) as made:
        made.run(program, patience=200.0)


# ---------------------------------------------------------------- while the log takes the actor


async def held(log: GatedLog) -> None:
    """Wait until the log holds a batch."""
    while not log.held():
        await asyncio.sleep(0.001)


def test_a_spawn_whose_node_is_lost_while_the_log_takes_it_is_placed_elsewhere() -> None:
    log = GatedLog()

    async def program(_: Process) -> None:
        one = (await zc.nodes())[1].node_id
        await Keeper.spawn()  # so that another node has fewer actors
        log.holds = has("actor", b"pending")
        spawning = asyncio.ensure_future(Keeper.options(node="spread", name="k", max_restarts=1).spawn())
        await held(log)
        assert [each.node_id for each in await zc.actors() if each.name == "k"] == [one]
        agent = made.cluster.hosts["h1"].agent
        assert agent is not None
        made.cluster.kill(agent, "the test kills it")
        while one in [node.node_id for node in await zc.nodes()]:
            await asyncio.sleep(0.1)
        assert not spawning.done()
        log.gate.set()
        keeper: Any = await spawning
        assert await keeper.keep("abc") == 3
        (entry,) = [entry for entry in log.entries.actors.values() if entry.options.name == "k"]
        assert (entry.state, entry.worker) == ("alive", keeper._remote.location[0])
        assert [each.node_id for each in await zc.actors() if each.name == "k"] != [one]

    with bench(2, log) as made:
        made.run(program, patience=200.0)


def test_a_process_that_ends_before_it_has_started_fails_the_spawn_once_the_log_has_taken_it() -> None:
    log = GatedLog()

    async def program(_: Process) -> None:
        log.holds = has("actor", b"pending")
        spawning = asyncio.ensure_future(Keeper.options(name="k").spawn())
        await held(log)
        pool: Any = made.cluster.hosts["h0"].workers
        (worker,) = pool.by_process.values()
        worker.kill("the test ends it")
        while pool.by_process:
            await asyncio.sleep(0.001)
        assert not spawning.done()
        log.gate.set()
        with pytest.raises(zc.InsufficientResources, match="no process could be started for .*: the test ends it"):
            await spawning
        while log.entries.actors or log.entries.names:
            await asyncio.sleep(0.001)
        assert (await zc.available_resources())["CPU"] == 8.0

    with bench(1, log) as made:
        made.run(program)


def test_no_process_starts_in_vain_as_long_as_the_log_is_silent() -> None:
    log = GatedLog()

    async def program(_: Process) -> None:
        pool: Any = made.cluster.hosts["h0"].workers
        started: list[int] = []
        start = pool.start

        def counted(*args: Any, **options: Any) -> Any:
            started.append(1)
            return start(*args, **options)

        pool.start = counted
        log.refuses = has("actor", b"pending")
        for _attempt in range(5):
            with pytest.raises(zc.HeadUnavailable):
                await Keeper.spawn()
        assert len(started) == 1, "the first one: the head did not know"
        log.refuses = lambda _: False
        for count in (2, 3):
            keeper: Any = await Keeper.spawn()
            assert await keeper.keep("abc") == 3
            assert len(started) == count

    with bench(1, log) as made:
        made.run(program)


def test_a_restart_waits_until_nothing_lives_that_the_actor_may_be() -> None:
    async def program(_: Process) -> None:
        keeper: Any = await Keeper.options(max_restarts=1).spawn()
        head: Any = made.cluster.hosts["h0"].node
        actor = head._actors.get(keeper._remote.actor_id)
        actor.restarts = 1
        actor.set_state("restarting", "its head was lost")
        ends = [asyncio.get_running_loop().create_future() for _ in range(2)]
        restarting = asyncio.ensure_future(head._restart_after(actor, ends))
        for end in ends:
            await asyncio.sleep(1)
            assert actor.state == "restarting"
            assert not restarting.done()
            end.set_result(None)
        await restarting
        assert await keeper.keep("abc") == 3

    with bench(1) as made:
        made.run(program)


@pytest.mark.parametrize("process", ["own", "shared"])
def test_an_actor_that_is_ended_while_its_next_process_starts_is_not_constructed(
    process: Literal["own", "shared"],
) -> None:  # fmt: skip
    async def program(_: Process) -> None:
        keeper: Any = await Keeper.options(max_restarts=1, process=process).spawn()
        head: Any = made.cluster.hosts["h0"].node
        actor = head._actors.get(keeper._remote.actor_id)
        orders: list[str] = []
        order, worker_for = head.recorder.order, head._worker_for

        async def noted(requests: Any, session: Any, method: str, *args: Any) -> Any:
            orders.append(method)
            return await order(requests, session, method, *args)

        async def ended(which: Any) -> Any:
            worker = await worker_for(which)
            head._retire(which, "the test ends it")
            return worker

        head.recorder.order, head._worker_for = noted, ended
        actor.worker.kill("the test kills it")
        while actor.state != "dead":
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert "create" not in orders
        assert actor.cause == "the test ends it"

    with bench(1) as made:
        made.run(program)
