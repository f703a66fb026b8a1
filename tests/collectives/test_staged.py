"""Reductions between hosts that fail in the middle, and what they leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.kills import survivors_of_a_kill
from tests.collectives.ranks import SIZE, at_rest, everywhere, ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL, LARGE = 100, 50_000
"""Elements of arrays that travel in frames, and that are read by other ranks."""
PLANS = ("naive", "direct", "ring", "halving")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False, transports=("tcp",), store_capacity=64 << 20) as node:
        yield node


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
async def test_members_killed_at_any_moment_leave_right_results_or_none(plan: str, rounds: int) -> None:
    rng = random.Random(plan)
    for _ in range(2 * rounds):
        async with ranks(3) as (group, actors):
            survivors = await survivors_of_a_kill(group, actors, rng, LARGE, plan)
            alone = await zc.group(survivors)
            found = await everywhere(survivors, "call", alone, "allreduce", np.ones(LARGE))
            assert all(result[0] == 2 for result in found)


@pytest.mark.parametrize("operation", ["allreduce", "reduce_scatter", "allgather"])
async def test_a_full_store_is_an_error_on_all_ranks(three: tuple[zc.Group, list[Any]], operation: str) -> None:
    group, actors = three
    await at_rest(actors)  # memory that comes back behind the filling is room again
    errors = [actor.raises_full(group, operation, 1 << 21, rank == 1) for rank, actor in enumerate(actors)]
    assert {name for name, _ in await zc.get(errors)} == {"OutOfMemory"}
    await at_rest(actors)  # ranks that had room may be reading yet
    found = await everywhere(actors, "call", group, "allreduce", np.ones(LARGE))
    assert all(result[0] == SIZE for result in found)


async def test_a_rank_without_room_for_a_broadcast_does_not_wait_for_it(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    await at_rest(actors)
    assert await actors[1].fill() > 0
    calls = [actors[1].raises(group, "broadcast"), actors[0].raises_full(group, "broadcast", LARGE, False)]
    calls.append(actors[2].call(group, "broadcast"))
    async with asyncio.timeout(20):
        found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert found[0][0] == "OutOfMemory"
    # The root has its array, or has heard of the failure before.
    assert isinstance(found[1], AssertionError) or found[1][0] == "OutOfMemory"
    await actors[1].drop("filling")
    assert await everywhere(actors, "call", group, "barrier") == [None] * SIZE


@pytest.mark.parametrize("plan", PLANS)
async def test_operations_leave_nothing(plan: str, rounds: int) -> None:
    """Data sockets are kept, a few of them. Any that each operation left would be more than that."""
    count, few = 40 * rounds, 10
    async with ranks(2) as (group, actors):
        await everywhere(actors, "many", group, few, LARGE, plan)
        before = await at_rest(actors)
        assert await everywhere(actors, "many", group, count, LARGE, plan) == [count] * 2
        for (_, _, then, members), (_, _, now, still) in zip(before, await at_rest(actors), strict=True):
            assert now - then < few and still == members
