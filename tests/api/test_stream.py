"""Streams as their consumers see them: items in order, the window, leaving early, failures."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import tests.api.test_future as awaiting
import zcactor as zc
from tests.actors import Probe
from tests.api.test_future import cancelled

pytestmark = pytest.mark.asyncio(loop_scope="module")

node, actors = awaiting.node, awaiting.actors


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x, {1}]])
async def test_a_stream_travels_nowhere(wrap: Any) -> None:
    probe: Any = await Probe.spawn()
    stream = probe.count(3)
    for use in (probe.anote, zc.put, pickle.dumps):
        with pytest.raises(TypeError, match="an ObjectStream belongs to the process.*pass its items"):
            use(wrap(stream))
    assert [item async for item in stream] == [0, 1, 2]


@pytest.mark.parametrize("method", ["acount", "count"])
async def test_a_stream(method: str) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)
    assert isinstance(stream(0), zc.ObjectStream)
    assert [item async for item in stream(0)] == []
    assert [item async for item in stream(100)] == list(range(100))
    both = [[item async for item in s] for s in (stream(50), stream(30))]
    assert both == [list(range(50)), list(range(30))]
    ended = stream(1)
    assert [item async for item in ended] == [0]
    with pytest.raises(StopAsyncIteration):
        await anext(ended)


@pytest.mark.parametrize("method", ["acount", "count"])
async def test_the_producer_stays_within_its_window(method: str) -> None:
    from zcactor.rpc.stream import STREAM_WINDOW

    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(10_000)
    for taken in range(1, 60):
        await anext(stream)
        produced = sum(type(entry) is tuple for entry in await probe.entries())
        assert taken <= produced <= taken + STREAM_WINDOW
    await probe.until(("item", 59))
    await stream.aclose()
    await probe.until("stream closed")


@pytest.mark.parametrize("method", ["acount", "count"])
@pytest.mark.parametrize("how", ["break", "aclose", "drop", "raise", "cancel"])
async def test_leaving_closes_the_generator(method: str, how: str) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(10_000)
    if how == "break":
        async for item in stream:
            if item == 3:
                break
        del stream
    elif how == "aclose":
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    elif how == "drop":
        del stream
    elif how == "raise":
        with pytest.raises(LookupError):
            async for _ in stream:
                raise LookupError
        del stream
    else:

        async def consume() -> None:
            async for item in getattr(probe, method)(10_000):
                if item == 20:
                    await asyncio.Event().wait()

        await anext(stream)
        task = asyncio.create_task(consume())
        await probe.until(("item", 20))
        await cancelled(task)
        del task
        await stream.aclose()
    gc.collect()
    if how != "drop" or "stream closed" in await probe.entries() or await probe.note("x"):
        async with asyncio.timeout(20):
            if any(type(entry) is tuple for entry in await probe.entries()):
                await probe.until("stream closed")
    assert await probe.note("alive") == "alive"


async def test_cancelling_anext_loses_no_item() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(3)
    assert await anext(stream) == 0
    await probe.until("stalled")
    for _ in range(2):
        assert await anext(stream) in (1, 2)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
    await probe.open("stall")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("method", ["afail_at", "fail_at"])
@pytest.mark.parametrize("n", [0, 1, 40])
async def test_an_exception_arrives_at_its_own_item(method: str, n: int) -> None:
    probe: Any = await Probe.spawn()
    stream = getattr(probe, method)(n)
    got = []
    with pytest.raises(ValueError, match=f"at {n}") as caught:
        async for item in stream:
            got.append(item)
    assert got == list(range(n))
    assert isinstance(caught.value, zc.RemoteError)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_an_item_that_raises_the_end_of_the_stream_does_not_end_it() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.endings()
    assert await anext(stream) == 1
    with pytest.raises(RuntimeError, match="raised StopAsyncIteration while it was unpickled"):
        await anext(stream)
    assert [item async for item in stream] == [3]


async def test_an_actor_killed_in_the_middle_of_a_stream() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(5)
    assert await anext(stream) == 0
    await probe.until("stalled")
    await zc.kill(probe)
    got = []
    with pytest.raises(zc.ActorDied) as died:
        async for item in stream:
            got.append(item)
    assert got == [1, 2, 3, 4]
    assert died.value.maybe_executed
    with pytest.raises(zc.ActorDied):
        async for _ in probe.acount(3):
            pass


async def test_two_tasks_on_one_stream() -> None:
    probe: Any = await Probe.spawn()
    stream = probe.astall_at(0)
    await probe.until("stalled")
    first = asyncio.create_task(stream.__anext__())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await anext(stream)
    await probe.open("stall")
    with pytest.raises(StopAsyncIteration):
        await first


async def test_streams_of_arrays_and_references(actors: Any) -> None:
    class Source:
        async def arrays(self, n: int) -> AsyncIterator[Any]:
            for i in range(n):
                yield np.full(20_000, float(i))

        async def refs(self, handle: Any, n: int) -> AsyncIterator[Any]:
            for i in range(n):
                yield handle.echo(i)

    plain, _, _ = actors
    source: Any = await zc.spawn(Source)
    async for i, array in _enumerate(source.arrays(40)):
        np.testing.assert_array_equal(array, np.full(20_000, float(i)))
    assert [await ref async for ref in source.refs(plain, 40)] == list(range(40))


async def _enumerate(stream: Any) -> AsyncIterator[tuple[int, Any]]:
    i = 0
    async for item in stream:
        yield i, item
        i += 1
