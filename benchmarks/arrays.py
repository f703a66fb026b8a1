"""Passing arrays: born in the store, made by NumPy there, fresh from malloc, and as a result."""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.actors import Keeper, SyncAdder
from benchmarks.harness import Measurement, Sample, Scale, at_most, exactly, interleave, medians
from benchmarks.machine import available_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

Array = npt.NDArray[np.float64]
SIZES = {"1 KiB": 1 << 10, "16 KiB": 1 << 14, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26, "1 GiB": 1 << 30}
MEMORY_FACTOR = 6
"""Bytes of free memory for each byte of an array: the source, its copy in the store, the previous copy, memcpy's
target."""
NUMPY_SIZES = ("1 MiB", "1 GiB")
CALLS = 1000
BULK = 64 << 20
"""The least bytes of a pass from malloc that is compared with memcpy; the copy of a smaller array is lost in the
call."""
STORE_LIMIT, MALLOC_LIMIT = 1.3, 1.15
"""Limits: times a small sync call, and times the fastest memcpy."""


def _sizes() -> dict[str, int]:
    free = available_memory()
    fitting = {name: nbytes for name, nbytes in SIZES.items() if MEMORY_FACTOR * nbytes <= free}
    for name in SIZES.keys() - fitting.keys():
        print(f"arrays: {name} left out, {free >> 20} MiB of memory are free", file=sys.stderr)
    return fitting


async def _copied(adder: Any) -> int:
    """Bytes copied so far by both sides."""
    return zc.stats().bytes_copied + (await zc.stats(adder)).bytes_copied


async def _calls(method: Any, arguments: tuple[Any, ...], calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        await method(*arguments)
    return (time.perf_counter() - before) / calls * 1e6


async def _born_in_store(scale: Scale, sizes: dict[str, int], adder: Any) -> list[Measurement]:
    calls = scale.count(CALLS)
    arrays = {f"{name} born in the store": zc.ones(nbytes // 8) for name, nbytes in sizes.items()}
    arrays |= {f"{name} that NumPy allocated": np.ones(n // 8) for name, n in sizes.items() if name in NUMPY_SIZES}
    before = await _copied(adder)
    subjects: dict[str, Sample] = {"small": partial(_calls, adder.add, (3, 4.5), calls)}
    subjects |= {name: partial(_calls, adder.first, (array,), calls) for name, array in arrays.items()}
    times = medians(await interleave(scale.runs, subjects))
    found = []
    for name in arrays:
        limit = at_most(STORE_LIMIT) if name.startswith("1 GiB") else None
        found.append(
            Measurement("arrays", name, times[name], "us", times["small"], "small sync call", limit, scale.runs)
        )
    copied = await _copied(adder) - before
    return [
        *found,
        Measurement("arrays", "born in the store, all sizes: copied", copied, "B", 0.0, "nothing", exactly(0)),
    ]


async def _settled(used: int) -> None:
    """Wait until the last pass has given its bytes back, or for a second."""
    deadline = time.monotonic() + 1
    while zc.stats().store_used > used and time.monotonic() < deadline:
        await asyncio.sleep(0.001)


async def _from_malloc(scale: Scale, name: str, source: Array, adder: Any) -> list[Measurement]:
    target = np.ones_like(source)
    half = len(source) // 2
    bulk = source.nbytes >= BULK
    passes = 1 if bulk else scale.count(CALLS)
    used, copies = zc.stats().store_used, []
    executor = ThreadPoolExecutor(2)

    async def one_thread() -> float:
        before = time.perf_counter()
        np.copyto(target, source)
        return (time.perf_counter() - before) * 1e6

    async def two_threads() -> float:
        before = time.perf_counter()
        parts = [executor.submit(np.copyto, target[part], source[part]) for part in (slice(half), slice(half, None))]
        for part in parts:
            part.result()
        return (time.perf_counter() - before) * 1e6

    async def small() -> float:
        return await _calls(adder.add, (3, 4.5), passes)

    async def passed() -> float:
        if bulk:
            await _settled(used)  # so that the copy goes where the last one was, and not into fresh memory
        copied = zc.stats().bytes_copied
        before = time.perf_counter()
        for _ in range(passes):
            source.flags.writeable = True  # it may have been written to since, so it has to be copied again
            await adder.first(source)
        elapsed = (time.perf_counter() - before) * 1e6
        copies.append((zc.stats().bytes_copied - copied) / passes)
        return elapsed / passes

    floors: dict[str, Sample] = {"memcpy, one thread": one_thread, "memcpy, two threads": two_threads}
    if not bulk:
        floors = {"small sync call": small}
    with executor:
        times = medians(await interleave(scale.runs, {**floors, "passed": passed}))
    floor_name = min(floors, key=times.__getitem__)
    limit = at_most(MALLOC_LIMIT) if name == "1 GiB" else None
    label = f"{name} from malloc"
    found = [Measurement("arrays", label, times["passed"], "us", times[floor_name], floor_name, limit, scale.runs)]
    if bulk:
        found.append(
            Measurement(
                "arrays",
                f"{label}: copied by each pass",
                median(copies),
                "B",
                float(source.nbytes),
                "once",
                exactly(source.nbytes),
            )
        )
    return found


async def _as_result(scale: Scale, name: str, nbytes: int) -> list[Measurement]:
    keeper = await Keeper.spawn(nbytes // 8)
    await keeper.kept()
    before = await _copied(keeper)
    calls = scale.count(CALLS)
    subjects = {"small": partial(_calls, keeper.nothing, (), calls), "kept": partial(_calls, keeper.kept, (), calls)}
    times = medians(await interleave(scale.runs, subjects))
    copied = await _copied(keeper) - before
    await zc.stop(keeper)
    label = f"{name} as a result, born in the store"
    return [
        Measurement("arrays", label, times["kept"], "us", times["small"], "small sync call", None, scale.runs),
        Measurement("arrays", f"{label}: copied", copied, "B", 0.0, "nothing", exactly(0)),
    ]


async def _scene(scale: Scale, sizes: dict[str, int], sources: dict[str, Array]) -> list[Measurement]:
    async with zc.init():
        adder = await SyncAdder.spawn()
        found = await _born_in_store(scale, sizes, adder)
        for name in list(sources):
            found += await _from_malloc(scale, name, sources.pop(name), adder)
        for name, nbytes in sizes.items():
            if nbytes >= 1 << 20:
                found += await _as_result(scale, name, nbytes)
    return found


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure 1 KiB to 1 GiB, without sizes that exceed the machine's memory."""
    sizes = _sizes()
    sources = {name: np.ones(nbytes // 8) for name, nbytes in sizes.items()}  # before zc.init, so surely from malloc
    yield from zc.run(_scene(scale, sizes, sources))
