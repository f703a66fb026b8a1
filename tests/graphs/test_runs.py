"""Runs under faults: actors that die, start again or are stopped, messages that are lost, and a full store."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.filling import fill_store
from tests.graphs.parts import Node, failure_of, line

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False, store_capacity=8 << 20) as node:
        yield node


async def begun(actor: Any, count: int) -> None:
    """Wait until so many calls of `Node.passes` have begun."""
    while await actor.has_entered() < count:
        await asyncio.sleep(0)


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_a_member_that_is_killed_fails_the_runs_under_way(place: int) -> None:
    actors: list[Any] = [await Node.spawn() for _ in range(3)]
    a, b, c = actors
    run = await line(a.add, b.passes, c.add)
    references = [run(number) for number in range(6)]
    await begun(b, 4)
    os.kill(await actors[place].pid(), signal.SIGKILL)
    for reference in references[:4]:
        error = await failure_of(reference)
        assert type(error) is zc.ActorDied and error.actor == actors[place]._remote.label and error.maybe_executed
    for reference in references[4:]:  # they had not begun, and the actor is dead for good
        assert type(await failure_of(reference)) is zc.ActorDied
    assert type(await failure_of(run(7))) is zc.ActorDied
    await asyncio.wait_for(run.close(), 20)
    for actor in actors:
        await zc.kill(actor)


async def test_an_actor_with_restarts_left_takes_the_next_run(two: list[Any]) -> None:
    lives: Any = await Node.options(max_restarts=1).spawn()
    run = await line(two[0].add, lives.passes, two[1].add)
    references = [run(number) for number in range(6)]
    await begun(lives, 4)
    os.kill(await lives.pid(), signal.SIGKILL)
    for reference in references[:4]:
        assert type(await failure_of(reference)) is zc.ActorDied
    while True:
        try:
            await lives.open()
            break
        except zc.ActorUnavailable:  # it is being started again
            await asyncio.sleep(0.01)
    assert [await reference for reference in references[4:]] == [6, 7]
    assert await run(10) == 12
    await run.close()
    await zc.kill(lives)


async def test_a_shared_process_loses_one_actor(two: list[Any]) -> None:
    shared: list[Any] = [await Node.options(process="shared").spawn() for _ in range(2)]
    first, second = await line(shared[0].passes, two[0].add), await line(shared[1].add, two[0].add)
    reference = first(1)
    await begun(shared[0], 1)
    await zc.kill(shared[0])
    error = await failure_of(reference)
    assert type(error) is zc.ActorDied and error.actor == shared[0]._remote.label
    assert await second(1) == 3
    assert type(await failure_of(first(2))) is zc.ActorDied
    await zc.kill(shared[1])


async def test_a_stopped_actor(two: list[Any]) -> None:
    stops = await Node.spawn()
    run = await line(stops.add, two[0].add)
    assert await run(1) == 3
    await zc.stop(stops)
    assert type(await failure_of(run(2))) is zc.ActorDied


async def test_a_dead_actor_is_refused_when_the_graph_is_compiled(two: list[Any]) -> None:
    dead = await Node.spawn()
    await zc.kill(dead)
    with pytest.raises(zc.ActorDied):
        await line(two[0].add, dead.add)


async def test_messages_that_are_lost_between_living_actors(two: list[Any], node: Any) -> None:
    a, b = two
    run = await line(a.passes, b.add)
    reference = run(1)
    await begun(a, 1)
    await a.break_connection(b._remote.location[0])
    error = await failure_of(reference)
    assert type(error) is zc.ConnectionLost and "a connection to its process broke" in str(error)
    await a.open()
    assert await run(2) == 3
    await run.close()


async def test_the_programs_graphs_end_with_it(two: list[Any], node: Any) -> None:
    run = await line(two[0].passes, two[1].add)
    reference = run(1)
    await begun(two[0], 1)
    node.process.graphs().close()
    error = await failure_of(reference)
    assert type(error) is zc.ConnectionLost and "shut down" in str(error)
    with pytest.raises(RuntimeError, match="closed"):
        run(2)


async def test_a_full_store(two: list[Any]) -> None:
    run = await line(two[0].describe)
    filling = fill_store()
    with pytest.raises(zc.OutOfMemory):
        run([np.zeros(1 << 17)])
    del filling
    assert await run(np.zeros(1 << 17)) == (False, 0.0, 1 << 17)
    await asyncio.wait_for(run.close(), 20)
