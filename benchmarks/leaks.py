"""The leftovers of 1,000 actors and 100,000 references, three times."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

import zcactor as zc
from benchmarks.actors import SyncAdder
from benchmarks.harness import Measurement, Scale, at_most
from benchmarks.machine import descendants, descriptors, rss, threads

if TYPE_CHECKING:
    from collections.abc import Iterator

ACTORS, REFS, ROUNDS = 1000, 100_000, 3
BATCH = 1000
"""References that live at the same time."""
PATIENCE = 10
"""Seconds for processes to end and leases to come back."""

Footprint = dict[str, int]
UNITS = {"descriptors": "", "threads": "", "processes": "", "bytes in the store": "B"}


def _footprint() -> Footprint:
    gc.collect()
    processes = len(descendants(os.getpid()))
    return {
        "descriptors": descriptors(),
        "threads": threads(),
        "processes": processes,
        "bytes in the store": zc.stats().store_used,
    }


async def _settled(least: Footprint | None) -> Footprint:
    """The footprint once it is down to `least` (with None, once it has not changed for 0.5 s), at the latest after
    `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    seen, since = _footprint(), time.monotonic()
    while time.monotonic() < deadline:
        if least is not None and all(seen[name] <= least[name] for name in least):
            break
        if least is None and time.monotonic() - since > 0.5:
            break
        await asyncio.sleep(0.02)
        now = _footprint()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


async def _actors(count: int) -> float:
    """Spawn, call and drop so many actors that share a process. Returns actors per second."""
    before = time.perf_counter()
    shared = SyncAdder.options(process="shared")
    handles = await asyncio.gather(*(shared.spawn() for _ in range(count)))
    await zc.get([handle.add(3, 4.5) for handle in handles])
    del handles
    return count / (time.perf_counter() - before)


async def _refs(adder: SyncAdder, count: int) -> float:
    """Make and drop so many references: of calls, of small values, of arrays. Returns references per second."""
    array = np.ones(4096)  # 32 KiB: above the eager limit, copied into the store
    before = time.perf_counter()
    for start in range(0, count, BATCH):
        some = min(BATCH, count - start)
        calls = [adder.add(3, 4.5) for _ in range(some // 2)]
        values = [zc.put(i) for i in range(some // 4)]
        arrays = [zc.put(array.copy()) for _ in range(some - some // 2 - some // 4)]
        await zc.get([*calls, *values])
        await adder.first(arrays[0])
        del calls, values, arrays
    return count / (time.perf_counter() - before)


async def _scene(scale: Scale) -> list[Measurement]:
    actors, refs = scale.count(ACTORS), scale.count(REFS, least=10)
    spawn_rates, ref_rates, left = [], [], []
    async with zc.init():
        adder = await SyncAdder.spawn()
        await _actors(10)
        await _refs(adder, 2 * BATCH)
        baseline = await _settled(None)
        resident = rss(os.getpid())
        for _ in range(ROUNDS):
            spawn_rates.append(await _actors(actors))
            ref_rates.append(await _refs(adder, refs))
            left.append(await _settled(baseline))
        grown = rss(os.getpid())
    found = [
        Measurement("leaks", f"{actors:,} shared actors, spawn to drop", median(spawn_rates), "actors/s", runs=ROUNDS),
        Measurement("leaks", f"{refs:,} references, made to dropped", median(ref_rates), "refs/s", runs=ROUNDS),
    ]
    for name, unit in UNITS.items():
        most, before = max(footprint[name] for footprint in left), baseline[name]
        label = f"{name} after each of {ROUNDS} rounds, most"
        found.append(Measurement("leaks", label, most, unit, before, "before", at_most(before, "value"), ROUNDS))
    label = f"resident memory of the driver after {ROUNDS} rounds"
    return [*found, Measurement("leaks", label, grown / 1e6, "MB", resident / 1e6, "before")]


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure descriptors, threads, processes and bytes in the store of the driver, against those before."""
    yield from zc.run(_scene(scale))
