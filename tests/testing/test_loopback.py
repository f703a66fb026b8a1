"""Pairs: each fault of a connection, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.testing.plugin import PairStart

Make = Callable[..., PairStart]


@zc.actor
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def ones(self, length: int) -> Any:
        return np.ones(length)

    async def process(self) -> int:
        return id(asyncio.get_running_loop())


async def test_no_faults(zc_loopback: Make) -> None:
    pair = await zc_loopback()
    counter = await pair.spawn(Counter, 1)
    other = await pair.spawn(Counter.options(name="other"), start=7)
    assert (await counter.add(1), await other.add(1)) == (2, 8)
    assert await counter.process() == id(asyncio.get_running_loop())
    assert pair.runtime.processes == []


async def test_plain_classes(zc_loopback: Make) -> None:
    class Plain:
        def name(self) -> str:
            return "plain"

    pair = await zc_loopback()
    assert await (await pair.spawn(Plain)).name() == "plain"


@pytest.mark.parametrize("frames", [0, 1, 2, 7, 24])
async def test_break_after(zc_loopback: Make, frames: int) -> None:
    pair = await zc_loopback(faults={"break_after": frames})
    counter = await pair.spawn(Counter)
    calls = 0
    with pytest.raises(zc.ActorUnavailable, match=f"broke after {frames} frames") as caught:
        while True:
            await counter.add(1)
            calls += 1
    assert calls <= frames // 2
    assert caught.value.maybe_executed
    count = await counter.add(0)  # the actor lives on, and is reached by a new connection
    assert count in (calls, calls + 1)
    for _ in range(50):
        await counter.add(1)


async def test_arrays_outlive_the_connection(zc_loopback: Make) -> None:
    pair = await zc_loopback(faults={"break_after": 2})
    counter = await pair.spawn(Counter)
    array = await counter.ones(1 << 17)
    with pytest.raises(zc.ActorUnavailable):
        await counter.add(1)
    for _ in range(5):  # as much memory as the array has is used again and again
        await counter.ones(1 << 17)
    assert array.sum() == 1 << 17


async def test_delay(zc_loopback: Make) -> None:
    loop = asyncio.get_running_loop()
    pair = await zc_loopback(faults={"delay": (0.03, 0.04)})
    counter = await pair.spawn(Counter)
    begun = loop.time()
    calls = [counter.add(1) for _ in range(10)]
    assert await asyncio.gather(*calls) == list(range(1, 11))  # in order
    assert loop.time() - begun >= 0.06  # there and back


async def test_stall(zc_loopback: Make) -> None:
    loop = asyncio.get_running_loop()
    pair = await zc_loopback(faults={"stall": (0, 0.2)})
    counter = await pair.spawn(Counter)
    begun = loop.time()
    call = counter.add(1)
    with pytest.raises(zc.DeadlineExceeded):
        await counter.add.options(timeout=0.01)(1)
    assert await call == 1
    assert loop.time() - begun >= 0.19
    assert await counter.add(0) >= 1


async def test_one_pair_at_a_time(zc_loopback: Make) -> None:
    first = await zc_loopback()
    with pytest.raises(zc.AlreadyInitialized):
        await zc_loopback()
    await first.aclose()
    async with zc_loopback() as second:
        assert await (await second.spawn(Counter)).add(3) == 3
    await second.aclose()  # idempotent


@pytest.mark.parametrize("faults", [{"lose": 1}, {"delay": 3}])
def test_refused_at_the_call(zc_loopback: Make, faults: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        zc_loopback(faults=faults)
