"""Sums of two ranks that take turns: the same results and errors on both, also where a rank does wrong."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.kills import survivors_of_a_kill
from tests.collectives.ranks import Rank, at_rest, everywhere, ranks
from tests.collectives.test_folding import bits, drawn, written_out
from zcactor.collectives.in_turn import goes_in_turn
from zcactor.collectives.member import word_of
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 20_000
"""Elements of arrays that do not travel in frames."""
MIB = 1 << 20


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False, store_capacity=64 << 20) as node:
        yield node


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(node: zc.Runtime) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    async with ranks(2) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["processes", "one process"])
async def placed(request: pytest.FixtureRequest) -> AsyncIterator[tuple[zc.Group, list[Any]]]:
    async with ranks(2, **({} if request.param == "processes" else {"process": "shared"})) as made:
        yield made


async def test_two_ranks_with_swift_sums_of_up_to_a_mebibyte_take_turns() -> None:
    most = np.zeros(MIB // 4, np.float32)
    assert goes_in_turn(2, most, "sum") and goes_in_turn(2, most, "mean")
    assert not goes_in_turn(3, most, "sum") and not goes_in_turn(1, most, "sum")
    assert not goes_in_turn(2, np.zeros(MIB // 4 + 1, np.float32), "sum")
    assert not goes_in_turn(2, most, "max") and not goes_in_turn(2, most.view(np.float16), "sum")


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.complex64])
async def test_each_turn_has_the_bits_of_the_fold(placed: tuple[zc.Group, list[Any]], dtype: Any, op: str) -> None:
    group, actors = placed
    rng = np.random.default_rng(3)
    if op == "mean" and np.dtype(dtype).kind in "iu":
        return
    for nbytes in (20_000, MIB):
        shape = (2, nbytes // np.dtype(dtype).itemsize // 2)
        for _ in range(4):
            inputs = [drawn(rng, dtype, shape[0] * shape[1]).reshape(shape) for _ in range(2)]
            found = await zc.get([actor.reduce(group, x, op) for actor, x in zip(actors, inputs, strict=True)])
            wanted = written_out(op, inputs)
            for result, writable, during, after in found:
                assert bits(result) == bits(wanted)
                assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
                assert result.flags.c_contiguous and not writable and not during and after


async def test_one_array_again_and_again(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    for plan in ("auto", "shared"):
        assert await everywhere(actors, "again", group, COUNT, plan) == [[2.0, 4.0, 6.0]] * 2


async def test_inputs_that_do_not_lie_as_the_first_ones(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    straight = np.arange(COUNT, dtype=np.int64).reshape(100, 200)
    turned = np.asfortranarray(straight)
    odd = np.frombuffer(b"x" + straight.tobytes(), np.uint8)[1:].view(np.int64).reshape(100, 200)  # not aligned
    for inputs in ([straight] * 2, [straight, turned], [turned, straight], [odd, straight], [straight, odd]):
        for _ in range(2):
            for result in await zc.get([a.call(group, "allreduce", x) for a, x in zip(actors, inputs, strict=True)]):
                assert np.array_equal(result, 2 * straight)


async def test_inputs_of_a_third_process(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    third: Any = await Rank.spawn()
    x = await third.give(zc.full(COUNT, 3.0))
    copied = [(await zc.stats(actor)).bytes_copied for actor in actors]
    for inputs in ([x, x], [x, zc.full(COUNT, 3.0)], [zc.full(COUNT, 3.0), x]):
        for _ in range(2):
            for result in await zc.get([a.call(group, "allreduce", y) for a, y in zip(actors, inputs, strict=True)]):
                assert np.array_equal(result, np.full(COUNT, 6.0))
    assert [(await zc.stats(actor)).bytes_copied for actor in actors] == copied
    await zc.kill(third)


async def test_in_place_the_result_is_the_input(placed: tuple[zc.Group, list[Any]]) -> None:
    group, actors = placed
    array = np.arange(COUNT)
    for _ in range(2):
        for result, is_itself in await everywhere(actors, "in_place", group, array):
            assert is_itself and np.array_equal(result, 2 * array)
        results = await zc.get([actors[0].in_place(group, array), actors[1].call(group, "allreduce", array)])
        assert np.array_equal(results[0][0], 2 * array) and np.array_equal(results[1], 2 * array)


async def test_plain_methods_timeouts_and_deadlines(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    array = np.ones(COUNT)
    for first, second in (actors, actors[::-1]):
        for _ in range(2):
            calls = [first.call_plain(group, "allreduce", array), second.call(group, "allreduce", array, timeout=20)]
            assert [result.sum() for result in await zc.get(calls)] == [2.0 * COUNT] * 2
            calls = [first.call.options(timeout=20)(group, "allreduce", array), second.call(group, "allreduce", array)]
            assert [result.sum() for result in await zc.get(calls)] == [2.0 * COUNT] * 2


async def test_bytes_are_counted_where_they_are_read(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    before = [(await zc.stats(actor)).bytes_reduced for actor in actors]
    for _ in range(4):
        await everywhere(actors, "call", group, "allreduce", np.ones(COUNT))
    after = [(await zc.stats(actor)).bytes_reduced for actor in actors]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * 2 * 8 * COUNT] * 2, "two turns each"


async def test_a_rank_may_run_ahead(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    for first, second in (actors, actors[::-1]):
        ahead = [first.call(group, "allreduce", np.full(COUNT, float(number))) for number in range(5)]
        await first.pid()
        for number in range(5):
            assert (await second.call(group, "allreduce", np.full(COUNT, float(number))))[0] == 2 * number
        assert [result[0] for result in await zc.get(ahead, timeout=20)] == [0, 2, 4, 6, 8]


async def test_another_call_on_one_rank_is_told_to_both(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    array = np.ones(COUNT)
    for _ in range(2):
        await everywhere(actors, "call", group, "allreduce", array)
    others: list[tuple[Any, ...]] = [
        ("allreduce", array, "max"), ("allreduce", array, "mean"), ("barrier",), ("allreduce", np.ones(10)),
        ("allreduce", np.ones(COUNT - 1)), ("reduce_scatter", array), ("allgather", array), ("alltoall", [1, 2]),
    ]  # fmt: skip
    for rank in range(2):
        for other in others:
            for _ in range(2):
                calls = [("allreduce", array), ("allreduce", array)]
                calls[rank] = other
                errors = await zc.get([a.raises(group, *call) for a, call in zip(actors, calls, strict=True)])
                assert {name for name, _ in errors} == {"GroupMismatch"}, errors
                assert len({text for _, text in errors}) == 1
            # An odd number of calls gives the next kind to the other rank.
            for result in await everywhere(actors, "call", group, "allreduce", array):
                assert result.sum() == 2 * COUNT


async def test_a_call_that_waits_for_a_rank() -> None:
    async with ranks(2) as (group, actors):
        array = np.ones(COUNT)
        for number in range(4):
            waiting = actors[number % 2]
            for _ in range(number // 2):  # the one that waits reduces then, or does not
                await everywhere(actors, "call", group, "allreduce", array)
            name, text = await waiting.raises(group, "allreduce", array, timeout=0.01)
            assert name == "GroupTimeout" and f"missing ranks: {1 - number % 2};" in text
            assert (await actors[1 - number % 2].call(group, "allreduce", array)).sum() == 2 * COUNT
            called = waiting.next_call()
            cancelled = asyncio.ensure_future(waiting.call(group, "allreduce", array))
            await called
            cancelled.cancel()
            assert (await actors[1 - number % 2].call(group, "allreduce", array)).sum() == 2 * COUNT
            del cancelled  # it keeps its call, which may have ended first
        await everywhere(actors, "call", group, "barrier")
        await at_rest(actors)


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
async def test_a_rank_is_killed_while_the_other_waits(calls: int) -> None:
    async with ranks(2) as (group, actors):
        for _ in range(calls):
            await everywhere(actors, "call", group, "allreduce", np.ones(COUNT))
        waiting = [actors[0].next_call(), actors[0].watched(group, "allreduce", np.ones(COUNT))]
        pid = await actors[1].pid()
        await waiting[0]
        os.kill(pid, signal.SIGKILL)
        name, (rank, *_), _ = await waiting[1]
        assert (name, rank) == ("GroupBroken", 1)
        await at_rest(actors[:1])


@pytest.mark.slow
@pytest.mark.parametrize("elements", [5_000, MIB // 4])
async def test_a_rank_killed_at_any_moment_leaves_right_results_or_none(elements: int, rounds: int) -> None:
    rng = random.Random(elements)
    for _ in range(4 * rounds):
        async with ranks(2) as (group, actors):
            await at_rest(await survivors_of_a_kill(group, actors, rng, elements))


async def test_an_epoch_that_ends_gives_inputs_back() -> None:
    async with ranks(2) as (group, actors):
        for calls in range(2):
            for waiting in actors:
                for _ in range(calls):
                    await everywhere(actors, "call", group, "allreduce", np.ones(COUNT))
                called = waiting.next_call()
                failing = waiting.watched(group, "allreduce", np.ones(COUNT))
                await called
                group = await group.reform()
                name, (rank, *_), _ = await failing
                assert (name, rank) == ("GroupBroken", -1)
        await everywhere(actors, "call", group, "barrier")
        await at_rest(actors)


@pytest.mark.slow
@pytest.mark.parametrize("full", [0, 1])
async def test_a_full_store_is_an_error_on_both(full: int) -> None:
    async with ranks(2) as (group, actors):
        for _ in range(full):  # the one with the full store reduces
            await everywhere(actors, "call", group, "barrier")
        for number in range(4):  # the long way, and then the short one
            errors = [
                actor.raises_full(group, "allreduce", MIB // 8, rank == full) for rank, actor in enumerate(actors)
            ]
            found = await zc.get(errors if number % 2 == 0 else errors[::-1], timeout=20)
            assert {name for name, _ in found} == {"OutOfMemory"}, found
            await everywhere(actors, "call", group, "allreduce", zc.ones(MIB // 8))


async def test_forged_publications(two: tuple[zc.Group, list[Any]]) -> None:
    group, actors = two
    array = np.ones(COUNT)
    signature = f"allreduce(float64, ({COUNT},), {'sum'!r})"
    for _ in range(2):
        await everywhere(actors, "call", group, "allreduce", array)
    session = await current().connections.connect(actors[0]._remote.location[0])
    word = word_of(group._key, 0)
    values: list[Any] = [np.ones(3), 7, -1, 1 << 60, None, "x", b"y"]
    for value in values:
        for _ in range(2):  # rank 0 reduces, or does not
            called = actors[0].next_call()
            failing = actors[0].raises(group, "allreduce", array)
            await called
            seq = await actors[0].last_operation(group)
            assert session.wire.publish(seq + 1 << 20 | 1, word, (signature, value), True)
            name, text = await failing
            assert name == "ProtocolError", (value, text)
            other = actors[1].call(group, "allreduce", array)
            for result in await asyncio.gather(other, return_exceptions=True):
                failed = isinstance(result, zc.ZcactorError)  # it hears of the failure, or was ahead of it
                assert failed or np.array_equal(result, 2 * array)  # type: ignore[arg-type]
    group = await group.reform()
    for result in await everywhere(actors, "call", group, "allreduce", array):
        assert result.sum() == 2 * COUNT
