"""Memory of idle actors: proportional set size, so that pages shared with others count once."""

from __future__ import annotations

import os
from statistics import fmean
from typing import TYPE_CHECKING

import zcactor as zc
from benchmarks.actors import SyncAdder
from benchmarks.forker import Forker
from benchmarks.harness import Measurement, Scale, at_most
from benchmarks.machine import cores, descendants, pss

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT, SHARED_LIMIT = 30, 30
"""MB of one idle actor, and KB of one that shares its process."""
SHARED = 1000
"""Idle actors that share processes."""


async def _scene(count: int) -> tuple[float, float]:
    """MB of one actor, and of the processes that serve all of them."""
    before = set(descendants(os.getpid()))
    async with zc.init():
        handles = [await SyncAdder.spawn() for _ in range(count)]
        for handle in handles:
            await handle.add(3, 4.5)
        workers = {info.pid for info in await zc.actors()}
        others = set(descendants(os.getpid())) - before - workers
        return fmean(pss(pid) for pid in workers) / 1e6, sum(pss(pid) for pid in others) / 1e6


async def _shared(count: int) -> float:
    """KB that one more actor takes which shares its process; each has been called once."""
    shared = SyncAdder.options(process="shared")
    async with zc.init():
        handles = [await shared.spawn() for _ in range(2 * len(cores()))]  # so that all processes are there

        async def look() -> int:
            await zc.get([handle.add(3, 4.5) for handle in handles])
            return sum(pss(pid) for pid in {info.pid for info in await zc.actors()})

        before = await look()
        handles += [await shared.spawn() for _ in range(count)]
        return (await look() - before) / count / 1e3


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure one actor, then 20, then many that share. One look each: memory does not scatter as times do."""
    del scale
    for count in (1, 20):
        with Forker() as forker:
            floor = fmean(pss(pid) for pid in forker.fork(count)) / 1e6
        actor, others = zc.run(_scene(count))
        label = "idle actor, alone" if count == 1 else f"idle actor, one of {count}"
        yield Measurement("memory", label, actor, "MB", floor, "forked Python with NumPy", at_most(LIMIT, "value"))
        yield Measurement("memory", f"agent and zygote, {count} {'actor' if count == 1 else 'actors'}", others, "MB")
    label = f"idle shared actor, one of {SHARED:,}"
    yield Measurement("memory", label, zc.run(_shared(SHARED)), "KB", budget=at_most(SHARED_LIMIT, "value"))
