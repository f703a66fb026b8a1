"""Members that end, groups that are formed anew, and what is left of groups."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import uvloop

import zcactor as zc
from tests.collectives.kills import survivors_of_a_kill
from tests.collectives.ranks import Rank, at_rest, everywhere, ranks, settled

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL, LARGE = 100, 50_000


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False) as node:
        yield node


# ---------------------------------------------------------------- the end of a member


@pytest.mark.parametrize("count", [SMALL, LARGE])
async def test_the_end_of_a_process_is_told_to_all_who_wait(count: int) -> None:
    async with ranks(3) as (group, actors):
        label = actors[1]._remote.label
        pid = await actors[1].pid()
        waiting = [actors[rank].next_call() for rank in (0, 2)]
        calls = [actors[rank].watched(group, "allreduce", np.ones(count)) for rank in (0, 2)]
        await zc.get(waiting)
        os.kill(pid, signal.SIGKILL)
        for name, (rank, actor, epoch, text), _ in await zc.get(calls, timeout=20):
            assert name == "GroupBroken"
            assert (rank, actor, epoch) == (1, label, 0)
            assert f"rank 1, actor {label}, is gone" in text and "reform" in text
        # From now on every call says so at once.
        name, (rank, *_), _ = await actors[0].watched(group, "barrier")
        assert rank == 1


@pytest.mark.parametrize("how", [zc.kill, zc.stop])
async def test_the_end_of_an_actor_in_a_process_that_goes_on(how: Any) -> None:
    async with ranks(3, process="shared") as (group, actors):
        waiting = [actors[rank].next_call() for rank in (0, 1)]
        calls = [actors[rank].watched(group, "allreduce", np.ones(LARGE)) for rank in (0, 1)]
        await zc.get(waiting)
        await how(actors[2])
        for _, (rank, _, _, _), _ in await zc.get(calls, timeout=20):
            assert rank == 2
        del actors[2]


async def test_results_that_were_given_stay_valid() -> None:
    async with ranks(2) as (group, actors):
        found = await everywhere(actors, "call", group, "allreduce", np.arange(LARGE))
        os.kill(await actors[0].pid(), signal.SIGKILL)
        assert np.array_equal(found[0], np.arange(LARGE) * 2) and np.array_equal(found[1], found[0])


@pytest.mark.slow
async def test_a_failure_keeps_no_memory() -> None:
    async with ranks(2) as (group, actors):
        survivor = actors[0]
        used = (await survivor.facts())[0]
        call = survivor.watched(group, "allreduce", np.ones(LARGE))
        os.kill(await actors[1].pid(), signal.SIGKILL)
        await call
        # The memory for the result was leased to the process that is gone: it is free once that is certain.
        end = time.monotonic() + 15
        while (await survivor.facts())[0] > used and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert (await survivor.facts())[0] <= used


@pytest.mark.slow
@pytest.mark.parametrize("elements", [SMALL, LARGE])
async def test_members_killed_at_any_moment_leave_right_results_or_none(elements: int, rounds: int) -> None:
    rng = random.Random(elements)
    for _ in range(4 * rounds):
        async with ranks(3) as (group, actors):
            survivors = await survivors_of_a_kill(group, actors, rng, elements)
            alone = await zc.group(survivors)
            assert await everywhere(survivors, "call", alone, "barrier") == [None, None]


# ---------------------------------------------------------------- epochs


async def test_a_group_without_the_dead_member() -> None:
    async with ranks(3) as (group, actors):
        os.kill(await actors[1].pid(), signal.SIGKILL)
        await actors[0].watched(group, "barrier")
        with pytest.raises(zc.ActorDied):
            await group.reform()
        again = await group.without(1)
        assert again.epoch == 1 and again.actors == (actors[0], actors[2]) and again != group
        found = await everywhere([actors[0], actors[2]], "call", again, "allreduce", np.ones(LARGE))
        assert all(np.array_equal(result, np.full(LARGE, 2.0)) for result in found)
        assert await everywhere([actors[0], actors[2]], "rank", again) == [0, 1]


async def test_a_member_that_was_started_again_rejoins() -> None:
    async with ranks(2, max_restarts=1) as (group, actors):
        os.kill(await actors[1].pid(), signal.SIGKILL)
        await actors[0].watched(group, "barrier")
        again = await group.reform()
        assert again.epoch == 1 and again.actors == group.actors
        found = await everywhere(actors, "call", again, "allreduce", np.ones(LARGE))
        assert all(result[0] == 2 for result in found)


async def test_a_member_is_replaced() -> None:
    async with ranks(2) as (group, actors):
        other: Any = await Rank.spawn()
        again = await group.reform(replace={1: other})
        assert again.actors == (actors[0], other)
        assert await everywhere([actors[0], other], "call", again, "barrier") == [None, None]
        # The former member lives, and has been told.
        _, (rank, _, epoch, text), _ = await actors[1].watched(group, "barrier")
        assert rank == -1 and epoch == 0 and "epoch 1 has replaced it" in text
        with pytest.raises(ValueError, match="is there twice"):
            await group.reform(replace={0: actors[1]})
        with pytest.raises(ValueError, match="there is no rank 2"):
            await group.reform(replace={2: other})
        with pytest.raises(TypeError, match="type str"):
            await group.reform(replace={1: "other"})
        with pytest.raises(ValueError, match="there is no rank 7"):
            await group.without(7)
        with pytest.raises(ValueError, match="there are no actors"):
            await group.without(0, 1)
        await zc.kill(other)


async def test_a_healthy_group_that_is_formed_anew_ends_the_former_epoch() -> None:
    async with ranks(2) as (group, actors):
        called = actors[0].next_call()
        waiting = actors[0].watched(group, "allreduce", np.ones(LARGE))
        await called
        again = await group.reform()
        _, (rank, actor, epoch, _), _ = await waiting
        assert (rank, actor, epoch) == (-1, "", 0)
        for actor_ in actors:
            _, (rank, *_), _ = await actor_.watched(group, "barrier")
            assert rank == -1
        assert await everywhere(actors, "call", again, "barrier") == [None, None]


async def test_of_two_epochs_at_once_the_later_one_stays() -> None:
    async with ranks(3) as (group, actors):
        made = await asyncio.gather(*[group.reform() for _ in range(4)])
        assert len({each.epoch for each in made}) == 4
        latest = max(made, key=lambda each: each.epoch)
        assert await everywhere(actors, "call", latest, "barrier") == [None] * 3
        for each in made:
            if each is not latest:
                _, (rank, *_), _ = await actors[0].watched(each, "barrier")
                assert rank == -1


# ---------------------------------------------------------------- order


async def test_two_groups_over_the_same_actors_in_opposite_orders() -> None:
    async with ranks(2) as (group, actors):
        other = await zc.group(actors[::-1])
        calls = [
            actor.call(each, "allreduce", np.full(count, rank))
            for count in (SMALL, LARGE)
            for rank, actor in enumerate(actors)
            for each in ((group, other) if rank else (other, group))
        ]
        for result in await zc.get(calls, timeout=20):
            assert result[0] == 1


async def test_a_member_may_run_ahead(rounds: int) -> None:
    async with ranks(2) as (group, actors):
        ahead = [actors[0].call(group, "allreduce", np.full(SMALL, number)) for number in range(50 * rounds)]
        await actors[0].pid()
        for number in range(50 * rounds):
            assert (await actors[1].call(group, "allreduce", np.full(SMALL, number)))[0] == 2 * number
        for number, result in enumerate(await zc.get(ahead, timeout=20)):
            assert result[0] == 2 * number


# ---------------------------------------------------------------- what is left


def repeats(most: int) -> int:
    """`most` on uvloop, and a tenth on asyncio: leaks are counted exactly, so few rounds show them as well."""
    return most if isinstance(asyncio.get_running_loop(), uvloop.Loop) else most // 10


@pytest.mark.slow
async def test_a_thousand_groups_leave_nothing() -> None:
    async with ranks(2) as (group, actors):
        for count in (SMALL, LARGE):
            await everywhere(actors, "call", group, "allreduce", np.ones(count))
        before = await at_rest(actors)
        for number in range(repeats(1000)):
            another = await zc.group(actors)
            await everywhere(actors, "call", another, "allreduce", np.ones(LARGE if number % 10 == 0 else SMALL))
            del another
        assert await settled(actors, before) == before


@pytest.mark.slow
async def test_ten_thousand_operations_leave_nothing() -> None:
    async with ranks(2) as (group, actors):
        await everywhere(actors, "many", group, 10, LARGE)
        before = await at_rest(actors)
        count = repeats(10_000)
        assert await everywhere(actors, "many", group, count, 5_000) == [count, count]
        assert await settled(actors, before) == before
