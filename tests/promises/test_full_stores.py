"""Stores between hosts: memory comes back in time, and a full store is a condition that passes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.filling import fill_store

pytestmark = pytest.mark.asyncio(loop_scope="module")

CAPACITY = 8 << 20
COUNT = 60_000
"""Elements of an array, of which a store holds 17."""


@zc.actor
class Maker:
    """An actor that makes arrays, and takes them."""

    def __init__(self) -> None:
        self.kept: Any = None

    def make(self, value: float) -> Any:
        return np.full(COUNT, value)

    def puts(self, value: float) -> list[Any]:
        return [zc.put(np.full(COUNT, value))]

    def first(self, x: Any) -> float:
        return float(x[0])

    def fill(self) -> int:
        self.kept = fill_store()
        return len(self.kept)

    def drop(self) -> None:
        self.kept = None

    def fail(self, value: float) -> None:
        raise LookupError("with an array", np.full(COUNT, value))

    async def get(self, refs: list[Any]) -> float:
        return float((await refs[0])[0])


async def spawned() -> Any:
    """An actor, whose methods are not typed here: each call is awaited."""
    return await Maker.spawn()


async def awaited(ref: Any) -> Any:
    """Await a reference in a task."""
    return await ref


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[None]:
    async with zc.init(num_cpus=4, log_to_driver=False, transports=("tcp",), store_capacity=CAPACITY):
        yield


async def test_results_that_are_passed_on_one_after_the_other_need_the_memory_of_a_few() -> None:
    maker, taker = await spawned(), await spawned()
    for number in range(100):
        assert await taker.first(maker.make(number)) == number
    async with zc.graph() as graph:
        value = graph.input()
        graph.output(taker.first.bind(maker.make.bind(value)))
    run = await graph.compile()
    for number in range(100):
        assert await run(float(number)) == number
    await run.close()
    for each in (maker, taker):
        await zc.stop(each)


@pytest.mark.parametrize("kind", ["result", "put"])
async def test_a_value_is_had_when_the_store_has_room_again(kind: str) -> None:
    maker, taker = await spawned(), await spawned()
    full = fill_store()
    ref: Any = maker.make(3.0) if kind == "result" else (await maker.puts(3.0))[0]
    for _ in range(2):
        with pytest.raises(zc.OutOfMemory):
            await ref
        with pytest.raises(zc.OutOfMemory):
            await zc.get([ref])
    assert await taker.first(ref) == 3.0, "it is passed on without a byte of it here"
    waits: list[Any] = [asyncio.ensure_future(awaited(ref)) for _ in range(3)]
    waits += [zc.get([ref]) for _ in range(3)]
    waits += [asyncio.to_thread(ref.result, 20) for _ in range(3)]
    assert all(type(each) is zc.OutOfMemory for each in await asyncio.gather(*waits, return_exceptions=True))
    full.clear()
    gc.collect()
    assert (await ref)[0] == 3.0
    assert await asyncio.to_thread(lambda: float(ref.result()[0])) == 3.0
    for each in (maker, taker):
        await zc.stop(each)


@pytest.mark.parametrize("outputs", [1, 2])
async def test_the_outputs_of_a_run_are_had_when_the_store_has_room_again(outputs: int) -> None:
    maker, taker = await spawned(), await spawned()
    async with zc.graph() as graph:
        value = graph.input()
        for each in (maker, taker)[:outputs]:
            graph.output(each.make.bind(value))
    run = await graph.compile()
    full = fill_store()
    ref: Any = run(5.0)
    for _ in range(2):
        with pytest.raises(zc.OutOfMemory):
            await ref
    if outputs == 1:
        assert await taker.first(ref) == 5.0
    full.clear()
    gc.collect()
    found = await ref
    assert [each[0] for each in (found if outputs == 2 else [found])] == [5.0] * outputs
    del found
    await run.close()
    for actor in (maker, taker):
        await zc.stop(actor)


async def test_an_error_with_an_array_is_had_when_the_store_has_room_again() -> None:
    maker = await spawned()
    full = fill_store()
    ref: Any = maker.fail(6.0)
    with pytest.raises((zc.OutOfMemory, zc.RemoteError)):
        await ref
    full.clear()
    gc.collect()
    with pytest.raises(LookupError, match="with an array") as caught:
        await ref
    assert caught.value.args[1][0] == 6.0
    await zc.stop(maker)


async def test_an_actor_gets_a_value_when_its_store_has_room_again() -> None:
    maker, taker = await spawned(), await spawned()
    refs = await maker.puts(4.0)
    assert await taker.fill()
    with pytest.raises(zc.OutOfMemory):
        await taker.get(refs)
    with pytest.raises(zc.OutOfMemory):
        await taker.first(refs[0])
    await taker.drop()
    assert await taker.get(refs) == await taker.first(refs[0]) == 4.0
    for each in (maker, taker):
        await zc.stop(each)
