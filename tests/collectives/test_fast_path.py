"""Sums of small arrays that programs repeat: as they are the first time, also where a rank or a peer does wrong."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import SIZE, everywhere, ranks
from tests.collectives.test_folding import bits, drawn, written_out
from zcactor.collectives.member import word_of
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

EAGER = 16 << 10


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False) as node:
        yield node


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8])
async def test_each_repetition_has_the_bits_of_the_fold(three: tuple[zc.Group, list[Any]], dtype: Any, op: str) -> None:
    group, actors = three
    rng = np.random.default_rng(3)
    if op == "mean" and np.dtype(dtype).kind in "iu":
        return
    for shape in ((), (0,), (3, 5), (EAGER // np.dtype(dtype).itemsize,)):
        for _ in range(3):
            inputs = [drawn(rng, dtype, math.prod(shape)).reshape(shape) for _ in range(SIZE)]
            found = await zc.get([actor.reduce(group, x, op) for actor, x in zip(actors, inputs, strict=True)])
            wanted = written_out(op, inputs)
            for result, writable, during, after in found:
                assert bits(result) == bits(wanted)
                assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
                assert not writable and not during and after


async def test_inputs_that_do_not_lie_as_the_first_ones(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    straight = np.arange(40, dtype=np.int64).reshape(5, 8)
    turned = np.asfortranarray(straight)
    odd = np.frombuffer(b"x" + straight.tobytes(), np.uint8)[1:].view(np.int64).reshape(5, 8)  # not aligned
    for inputs in ([straight] * 3, [straight, turned, odd], [odd, odd, turned]):
        for result in await zc.get([a.call(group, "allreduce", x) for a, x in zip(actors, inputs, strict=True)]):
            assert np.array_equal(result, 3 * straight)


async def test_another_call_on_one_rank_is_told_to_all(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    array = np.ones(10, np.float32)
    for _ in range(2):
        await everywhere(actors, "call", group, "allreduce", array)
    others: list[tuple[Any, ...]] = [
        ("allreduce", array, "max"), ("allreduce", array, "mean"), ("allreduce", np.ones(10)), ("barrier",),
        ("allreduce", np.ones(11, np.float32)), ("reduce_scatter", array), ("allreduce", np.ones(50_000, np.float32)),
    ]  # fmt: skip
    for rank, other in enumerate(others):
        calls = [("allreduce", array)] * SIZE
        calls[rank % SIZE] = other
        errors = await zc.get([a.raises(group, *call) for a, call in zip(actors, calls, strict=True)])
        assert {name for name, _ in errors} == {"GroupMismatch"}, errors
        assert len({text for _, text in errors}) == 1
    for result in await everywhere(actors, "call", group, "allreduce", array):
        assert result.tolist() == [SIZE] * 10


async def test_a_repeated_call_that_waits_for_a_rank() -> None:
    async with ranks(SIZE) as (group, actors):
        array = np.ones(10)
        for _ in range(2):
            await everywhere(actors, "call", group, "allreduce", array)
        name, text = await actors[0].raises(group, "allreduce", array, timeout=0.01)
        assert name == "GroupTimeout" and "1, 2" in text
        results = await everywhere(actors[1:], "call", group, "allreduce", array)
        assert all(result.sum() == 10 * SIZE for result in results), "the operation goes on"
        called = actors[1].next_call()
        waiting = asyncio.ensure_future(actors[1].call(group, "allreduce", array))
        await called
        waiting.cancel()
        results = await everywhere([actors[0], actors[2]], "call", group, "allreduce", array)
        assert all(result.sum() == 10 * SIZE for result in results)
        for result in await everywhere(actors, "call", group, "allreduce", array):
            assert result.sum() == 10 * SIZE


async def test_a_rank_that_is_killed_while_others_repeat() -> None:
    async with ranks(SIZE) as (group, actors):
        array = np.ones(10)
        for _ in range(2):
            await everywhere(actors, "call", group, "allreduce", array)
        called = [actor.next_call() for actor in actors[:2]]
        waiting = [actor.raises(group, "allreduce", array) for actor in actors[:2]]
        pid = await actors[2].pid()
        await zc.get(called)
        os.kill(pid, signal.SIGKILL)
        for name, text in await zc.get(waiting, timeout=20):
            assert name == "GroupBroken" and "rank 2" in text
        name, _ = await actors[0].raises(group, "allreduce", array)
        assert name == "GroupBroken"


async def test_a_plain_method_and_a_deadline_take_the_long_way(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    array = np.ones(10)
    for _ in range(3):
        calls = [actors[0].call_plain(group, "allreduce", array), actors[1].call(group, "allreduce", array, timeout=20)]
        calls.append(actors[2].call.options(timeout=20)(group, "allreduce", array))
        assert [result.sum() for result in await zc.get(calls)] == [30.0] * 3


async def test_forged_publications(three: tuple[zc.Group, list[Any]]) -> None:
    group, actors = three
    array = np.ones(10)
    for _ in range(2):
        await everywhere(actors, "call", group, "allreduce", array)
    session = await current().connections.connect(actors[0]._remote.location[0])
    word, signature = word_of(group._key, 0), f"allreduce(float64, (10,), {'sum'!r})"

    def forge(rank: int, seq: int, *values: Any) -> None:
        assert session.wire.publish(seq + 1 << 20 | rank, word, values, True)

    called = actors[0].next_call()
    waiting = actors[0].call(group, "allreduce", array)
    await called
    seq = await actors[0].last_operation(group)
    forge(0, seq, signature, array)  # its own rank
    forge(9, seq, signature, array)  # there is none
    forge(1, seq - 1, signature, array)  # late: the operation has ended
    forge(1, seq, signature, array)  # as rank 1 itself would
    forge(1, seq, signature, array + 1)  # twice
    forge(1, seq, signature, 7, 3)  # nonsense, but rank 1 has published
    await actors[0].pid()
    assert not waiting.done()
    for result in [*await everywhere(actors[1:], "call", group, "allreduce", array), await waiting]:
        assert result.tolist() == [3.0] * 10
    called = actors[0].next_call()
    failing = actors[0].raises(group, "allreduce", array)
    await called
    forge(1, seq + 1, signature, np.ones(11))
    others = [actor.call(group, "allreduce", array) for actor in actors[1:]]
    for result in await asyncio.gather(*others, return_exceptions=True):  # it may hear of the failure before the end
        assert "rank 1 did not send" in str(result) or np.array_equal(result, 3 * array)  # type: ignore[arg-type]
    name, text = await failing
    assert name == "ProtocolError" and "rank 1 did not send 80 bytes" in text
    for result in await everywhere(actors, "call", group, "allreduce", array):
        assert result.tolist() == [3.0] * 10


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        (7, np.ones(10)), ("signature", np.ones(10), 3), ("signature", np.ones(10), "here", 0, b""),
        ("signature", np.ones(10), b"", "there", b""), ("signature", np.ones(10), b"", 0, 7),
        ("signature", None, b"", 0, b"", 7), (7,),
        ("signature", None, b"", 0, b"", np.ones(10)),  # no memory for a result: its bytes are in the frame
        "pieces",
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [10, 50_000])
async def test_a_publication_that_is_refused_fails_the_operation(
    three: tuple[zc.Group, list[Any]], values: Any, count: int, early: bool
) -> None:
    """On all ranks whose result is not made without it, and none waits for ever."""
    group, actors = three
    array = np.ones(count)
    for _ in range(2):
        await everywhere(actors, "call", group, "allreduce", array)
    calls: dict[int, Any] = {}
    for rank in (1, 0, 2) if early else (0, 1, 2):
        called = actors[rank].next_call()
        if rank == 1:
            calls[1] = actors[1].garble(group, 0, values, "allreduce", array)
        else:
            calls[rank] = actors[rank].call(group, "allreduce", array)
        await called
        await actors[0].pid()  # the messages of rank 1 have come
    results = await asyncio.wait_for(asyncio.gather(*calls.values(), return_exceptions=True), 20)
    for rank, result in zip(calls, results, strict=True):
        refused = isinstance(result, zc.ProtocolError)
        assert refused or (rank and count == 10 and np.array_equal(result, 3 * array)), (rank, result)  # type: ignore[arg-type]
    for result in await everywhere(actors, "call", group, "allreduce", array):
        assert np.array_equal(result, 3 * array)
