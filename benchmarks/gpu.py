"""Arrays on the fake GPU: the cost of passing them beside NumPy arrays, and that nobody waits for their work.

No figure says anything about a real GPU.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Sample, Scale, at_most, exactly, interleave, medians
from zcactor.process.context import current

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GROUP", "measure"]

GROUP: Final = "gpu"
MIB: Final = 1 << 20
CALLS: Final = 300
LIMIT, SIZE_LIMIT, QUEUED_LIMIT, HOST_LIMIT = 3.0, 1.3, 5.0, 1.5
"""Times the call with a NumPy array, times that with 64 KiB, milliseconds, and times two copies in memory."""
STAGING_LIMIT: Final = 16
"""MiB of either process's store."""
QUEUED: Final = 0.3
"""Seconds of work that is queued before a call."""


@zc.actor
class Reader:
    """An actor that takes arrays and looks at none."""

    async def take(self, x: Any) -> int:
        """Take an array."""
        return len(x)

    async def used_of_store(self) -> int:
        """The highest byte that the store has ever used."""
        return int(current().store.heap.high)


async def _calls(reader: Any, array: Any, calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        await reader.take(array)
    return (time.perf_counter() - before) / calls * 1e6


async def _by_reference(scale: Scale) -> list[Measurement]:
    calls = scale.count(CALLS, 10)
    async with zc.init(config=zc.Config(gpu="fake")):
        reader: Any = await Reader.spawn()
        arrays: dict[str, Any] = {"NumPy": zc.zeros(64 * MIB, "u1")}
        for name, nbytes in (("64 KiB", 1 << 16), ("64 MiB", 64 * MIB), ("256 MiB", 256 * MIB)):
            arrays[name] = zc.zeros(nbytes, "u1", device="cuda")
        await asyncio.to_thread(zc.to_host, arrays["256 MiB"][:1])  # all are computed
        before = zc.stats().bytes_copied
        subjects: dict[str, Sample] = {name: partial(_calls, reader, array, calls) for name, array in arrays.items()}
        await subjects["256 MiB"]()  # imports the extents
        times = medians(await interleave(scale.runs, subjects))
        copied = zc.stats().bytes_copied - before + (await zc.stats(reader)).bytes_copied
    found = [
        Measurement(
            GROUP, "64 MiB to an actor", times["64 MiB"], "us", times["NumPy"], "with a NumPy array", at_most(LIMIT),
            scale.runs,
        ),
        Measurement(
            GROUP, "256 MiB to an actor", times["256 MiB"], "us", times["64 KiB"], "with 64 KiB", at_most(SIZE_LIMIT),
            scale.runs,
        ),
    ]  # fmt: skip
    return [*found, Measurement(GROUP, "all of these: copied", copied, "B", 0.0, "nothing", exactly(0))]


async def _not_waiting(scale: Scale) -> Measurement:
    """The time that a call takes longer where work is queued on the array."""
    async with zc.init(config=zc.Config(gpu="fake", gpu_fake=f"late={QUEUED * 1000}")):
        reader: Any = await Reader.spawn()
        still = zc.empty(MIB, "u1", device="cuda")
        await reader.take(still)

        async def without() -> float:
            return await _calls(reader, still, 1) / 1e3

        async def queued() -> float:
            array = zc.zeros(MIB, "u1", device="cuda")
            return await _calls(reader, array, 1) / 1e3

        times = medians(await interleave(scale.runs, {"without": without, "queued": queued}))
    name = f"a call with {QUEUED * 1000:.0f} ms of work queued: longer by"
    longer = max(0.0, times["queued"] - times["without"])
    return Measurement(GROUP, name, longer, "ms", None, "", at_most(QUEUED_LIMIT, "value"), scale.runs)


async def _through_host(scale: Scale) -> list[Measurement]:
    """The time of an array's way where memory cannot be mapped, and what it takes of the stores."""
    nbytes = 256 * MIB
    config = zc.Config(gpu="fake", gpu_fake="export=none", device_keep_nbytes=2 * nbytes)
    async with zc.init(config=config):
        reader: Any = await Reader.spawn()
        array = zc.zeros(nbytes, "u1", device="cuda")
        source, target = np.ones(nbytes, "u1"), np.zeros(nbytes, "u1")
        store, before = current().store, await reader.used_of_store()
        here = store.heap.high

        async def copies() -> float:
            begun = time.perf_counter()
            for _ in range(2):
                np.copyto(target, source)
            return (time.perf_counter() - begun) * 1e3

        async def through() -> float:
            return await _calls(reader, array, 1) / 1e3

        await through()  # memory is taken from the system
        times = medians(await interleave(scale.runs, {"copies": copies, "through": through}))
        grown = max(store.heap.high - here, await reader.used_of_store() - before) / MIB
    return [
        Measurement(
            GROUP, "256 MiB through host memory", times["through"], "ms", times["copies"], "two copies in memory",
            at_most(HOST_LIMIT), scale.runs,
        ),
        Measurement(
            GROUP, "of either store for that, at most", grown, "MiB", None, "", at_most(STAGING_LIMIT, "value"), 1
        ),
    ]  # fmt: skip


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure passing arrays on the fake GPU."""
    print("the GPU is the fake one: no figure says anything about a real GPU")
    yield from zc.run(_by_reference(scale))
    yield zc.run(_not_waiting(scale))
    yield from zc.run(_through_host(scale))
