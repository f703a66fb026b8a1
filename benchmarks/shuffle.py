"""A shuffle between two actors next to one memcpy of the same bytes, and the memory that it takes.

The exchange is the time of the whole shuffle without that of dividing: dividing is the program's own work. Reducers
join their parts into one array, which is the one copy that a shuffle needs. The floor is that copy alone: both actors
at once copy an array of their share.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, interleave, medians
from benchmarks.machine import available_memory, descendants, pss

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = (1024, 4096)
"""MiB that are shuffled."""
WORKERS = 2
TIMES_MEMCPY, TIMES_NBYTES = 1.3, 2.2
"""Budgets: times one memcpy, and memory at the peak in times the bytes that are shuffled."""
_PAUSE = 0.02
"""Seconds between looks at the memory."""


@zc.actor
class Half:
    """A mapper and reducer of made-up parts."""

    def __init__(self) -> None:
        self.own: Any = None
        self.seconds = 0.0

    @zc.method
    def fill(self, nbytes: int) -> None:
        """Have that many bytes."""
        self.own = np.ones(nbytes, np.uint8)

    @zc.method
    def partition(self, count: int) -> list[Any]:
        """An equal share for each reducer, in an array of its own each. Of `own` nothing is kept."""
        started = time.perf_counter()
        parts = [share.copy() for share in np.array_split(self.own, count)]
        self.own = None
        self.seconds = time.perf_counter() - started
        return parts

    @zc.method
    def merge(self, parts: list[Any]) -> None:
        """Join the parts."""
        self.own = np.concatenate(parts)

    @zc.method
    def memcpy(self) -> float:
        """Copy what there is into new memory, as `merge` does. Returns the seconds."""
        started = time.perf_counter()
        self.own = np.concatenate([self.own])
        return time.perf_counter() - started

    @zc.method
    def partition_seconds(self) -> float:
        """The time that dividing took."""
        return self.seconds


async def _shuffled(halves: list[Any]) -> float:
    started = time.perf_counter()
    await zc.get(await zc.shuffle(halves, "partition", "merge"))
    took = time.perf_counter() - started
    dividing: list[float] = await zc.get([half.partition_seconds() for half in halves])
    return took - max(dividing)


async def _memcpy(halves: list[Any]) -> float:
    times: list[float] = await zc.get([half.memcpy() for half in halves])
    return max(times)


async def _peak(nbytes: int) -> float:
    """The memory of all processes at the peak of a shuffle, in times `nbytes`."""
    async with zc.init():
        halves = [await Half.spawn() for _ in range(WORKERS)]
        await zc.get([half.fill(1 << 20) for half in halves])  # the memory that a process takes anyway
        await zc.get(await zc.shuffle(halves, "partition", "merge"))
        gc.collect()
        mine = [os.getpid(), *descendants(os.getpid())]
        before, peak = sum(map(pss, mine)), 0

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, sum(map(pss, mine)))
                await asyncio.sleep(_PAUSE)

        watching = asyncio.create_task(watch())
        await zc.get([half.fill(nbytes // WORKERS) for half in halves])
        await zc.get(await zc.shuffle(halves, "partition", "merge"))
        watching.cancel()
        await asyncio.wait([watching])
    return (peak - before) / nbytes


async def _exchange(nbytes: int, scale: Scale) -> tuple[dict[str, float], int]:
    async with zc.init():
        halves = [await Half.spawn() for _ in range(WORKERS)]
        await zc.get([half.fill(nbytes // WORKERS) for half in halves])
        subjects = {"memcpy": partial(_memcpy, halves), "shuffle": partial(_shuffled, halves)}
        figures = medians(await interleave(scale.runs, subjects))
        copied = sum([(await zc.stats(half)).bytes_copied for half in halves]) + zc.stats().bytes_copied
    return figures, copied


def measure_shuffle(scale: Scale) -> Iterator[Measurement]:
    """Measure the exchange, the copies and the memory of each size that the machine has room for."""
    for mib in SIZES:
        nbytes = scale.count(mib) << 20
        if available_memory() < 3 * nbytes:  # twice the bytes, and room for the rest of the machine
            continue
        figures, copied = zc.run(_exchange(nbytes, scale))
        name = f"{nbytes >> 20:,} MiB"
        yield Measurement(
            "shuffle", f"{name}, exchange", figures["shuffle"] * 1e3, "ms", figures["memcpy"] * 1e3, "memcpy",
            at_most(TIMES_MEMCPY), scale.runs,
        )  # fmt: skip
        yield Measurement("shuffle", f"{name}, copied by zcactor", copied, "B", budget=at_most(0, "value"))
        peak = zc.run(_peak(nbytes))
        yield Measurement("shuffle", f"{name}, peak memory", peak, "N", budget=at_most(TIMES_NBYTES, "value"))
