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
from tests.collectives.ranks import SIZE, everywhere, ranks, settled

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
    errors = [actor.raises_full(group, operation, 1 << 21, rank == 1) for rank, actor in enumerate(actors)]
    assert {name for name, _ in await zc.get(errors)} == {"OutOfMemory"}
    found = await everywhere(actors, "call", group, "allreduce", np.ones(LARGE))
    assert all(result[0] == SIZE for result in found)


def grown(before: list[Any], after: list[Any]) -> list[list[int]]:
    """The differences between the facts of actors."""
    return [[now - then for then, now in zip(*both, strict=True)] for both in zip(before, after, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
async def test_operations_leave_nothing(plan: str, rounds: int) -> None:
    """Memory for the next operations and data sockets are kept, a few of each. Anything that each operation left would
    be more than that."""
    count, few = 40 * rounds, 10
    async with ranks(2) as (group, actors):
        await everywhere(actors, "many", group, few, LARGE, plan)
        before = await settled(actors)
        assert await everywhere(actors, "many", group, count, LARGE, plan) == [count] * 2
        async with asyncio.timeout(20):  # releases that no frame has taken along go by themselves after a second
            while any(
                used >= few * LARGE * 4 or leases > 0 or descriptors >= few or groups > 0
                for used, leases, descriptors, groups in grown(before, await settled(actors))
            ):
                await asyncio.sleep(0)
