"""Makers of arrays die at random moments while readers pass arrays on: no call hangs, no bytes mix, nothing is left.

``--rounds`` makes the test longer; the seed of a failing run repeats it.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

import zcactor as zc

pytestmark = pytest.mark.slow
PATIENCE = 60.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""
STEPS, MAKERS, READERS = 120, 2, 3
COUNTS = (3_000, 9_000, 40_000, 300_000)
"""Elements of an array: some arrays share pages, some are copied by a thread."""
LOSSES = (zc.ActorDied, zc.ActorUnavailable, zc.ConnectionLost, zc.ObjectLost)
"""The errors of calls to a dead process, and of arrays without a living holder."""

Array = np.ndarray[Any, Any]
spawn: Any = zc.spawn
"""`zc.spawn` without static types, which know decorated methods only."""


def ends(array: Array) -> list[float]:
    return [float(array.min()), float(array.max())]


class Maker:
    def made(self, count: int, value: float) -> Array:
        return np.full(count, value)

    def moved(self, count: int, value: float) -> Array:
        return zc.move(np.full(count, value))


class Reader:
    """An actor that keeps arrays, each full of its own key."""

    def __init__(self) -> None:
        self.kept: dict[float, Array] = {}

    def take(self, key: float, array: Array) -> list[float]:
        self.kept[key] = array
        return ends(array)

    def look(self, key: float) -> list[float] | None:
        return ends(self.kept[key]) if key in self.kept else None

    def give(self, key: float) -> Array | None:
        return self.kept.get(key)

    async def pass_on(self, key: float, other: Any) -> list[float] | None:
        array = self.kept.get(key)
        return None if array is None else await other.take(key, array)

    def drop(self, key: float) -> None:
        self.kept.pop(key, None)

    def wrong(self) -> list[float]:
        """The keys of arrays that have changed."""
        return [key for key, array in self.kept.items() if ends(array) != [key, key]]

    def left(self) -> tuple[int, int]:
        gc.collect()
        stats = zc.stats()
        return stats.store_used, stats.leases


class Run:
    """One run of the program, with all choices drawn from its seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.makers: list[Any] = []
        self.readers: list[Any] = []
        self.mine: dict[float, Array] = {}
        self.keys: list[float] = []
        self.right = self.lost = 0

    async def check(self, key: float, coming: Awaitable[Any], *, keep: bool = False) -> None:
        try:
            found = await coming
        except LOSSES:
            self.lost += 1
            return
        if isinstance(found, np.ndarray):
            if keep:
                self.mine[key] = found
            found = ends(found)
        assert found is None or found == [key, key]
        self.right += found is not None

    async def make(self) -> None:
        key = float(len(self.keys) + 1)
        self.keys.append(key)
        maker, reader = self.random.choice(self.makers), self.random.choice(self.readers)
        count = self.random.choice(COUNTS)
        if self.random.random() < 0.2:
            await self.check(key, maker.moved(count, key), keep=True)
        else:
            await self.check(key, reader.take(key, maker.made(count, key)))

    async def kill(self) -> None:
        await zc.kill(self.makers.pop(self.random.randrange(len(self.makers))))
        self.makers.append(await spawn(Maker))

    async def act(self) -> None:
        key, reader = self.random.choice(self.keys), self.random.choice(self.readers)
        what = self.random.randrange(5)
        if what == 0:
            await self.check(key, reader.look(key))
        elif what == 1:
            await self.check(key, reader.give(key), keep=True)
        elif what == 2 and key in self.mine:
            await self.check(key, reader.take(key, self.mine[key]))
        elif what == 3:
            self.mine.pop(key, None)
            await reader.drop(key)
        else:
            await self.check(key, reader.pass_on(key, self.random.choice(self.readers)))

    async def go(self, steps: int) -> None:
        self.makers = [await spawn(Maker) for _ in range(MAKERS)]
        self.readers = [await spawn(Reader) for _ in range(READERS)]
        running: set[asyncio.Task[None]] = set()
        for _ in range(steps):
            chance = self.random.random()
            step = self.make() if chance < 0.3 or not self.keys else self.act()
            running.add(asyncio.ensure_future(step))
            if chance > 0.95:
                await self.kill()
            if len(running) > 8:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await asyncio.sleep(0)
        for task in running:
            await task
        for maker in self.makers:
            await zc.kill(maker)
        self.makers.clear()
        for reader in self.readers:
            assert await reader.wrong() == []
        assert all(ends(array) == [key, key] for key, array in self.mine.items())

    async def end(self) -> None:
        """Drop all arrays, and wait until every store is as it was."""
        self.mine.clear()
        for reader in self.readers:
            for key in self.keys:
                await reader.drop(key)
        before = (0, 0)
        for reader in self.readers:
            while await reader.left() != before:
                await asyncio.sleep(0)
        while (zc.stats().store_used, zc.stats().leases) != before:
            gc.collect()
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", [1, 2])
async def test_makers_that_die_at_any_moment(seed: int, rounds: int) -> None:
    async with asyncio.timeout(PATIENCE * rounds), zc.init(num_cpus=4, store_capacity=256 << 20):
        run = Run(seed)
        await run.go(STEPS * rounds)
        await run.end()
        assert run.right > run.lost
