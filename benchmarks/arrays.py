"""Arrays: passed, taken as pieces while they are open, forked, computed with, and on the fake GPU.

A piece is compared with a new array of as many bytes, which goes by reference. The difference is one copy. A fork
is compared with that of a process that has the same arrays in NumPy's usual memory: the first one, and a later one,
when the process has written to all arrays since. Both processes then write to all arrays, the child having ended: pages
of the store are copied at the first write, as peers may still read those of the file.

NumPy's own allocations in the store and by NumPy's usual allocator run in one process, in turns: a turn runs the same
operation on arrays of either allocator, a few times each. The medians over the turns are compared. The usual allocator
keeps blocks of up to 32 MiB and returns larger ones, which then fault in page by page with every operation; the store
keeps the memory that a loop used last.

Of the fake GPU no figure says anything about a real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.calls import SyncAdder
from benchmarks.harness import Measurement, Sample, Scale, at_most, each, exactly, interleave, medians
from benchmarks.machine import available_memory
from zcactor.process.context import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ---- as arguments and results

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


@zc.actor
class Keeper:
    """An actor that keeps an array born in the store."""

    def __init__(self, length: int) -> None:
        self.array = zc.ones(length)

    @zc.method
    def kept(self) -> Array:
        """The array."""
        return self.array

    @zc.method
    def nothing(self) -> None:
        """Return a result of no size."""


def _sizes() -> dict[str, int]:
    free = available_memory()
    fitting = {name: nbytes for name, nbytes in SIZES.items() if MEMORY_FACTOR * nbytes <= free}
    for name in SIZES.keys() - fitting.keys():
        print(f"arrays: {name} left out, {free >> 20} MiB of memory are free", file=sys.stderr)
    return fitting


async def _copied(adder: Any) -> int:
    """Bytes copied so far by both sides."""
    return zc.stats().bytes_copied + (await zc.stats(adder)).bytes_copied


async def _born_in_store(scale: Scale, sizes: dict[str, int], adder: Any) -> list[Measurement]:
    calls = scale.count(CALLS)
    arrays = {f"{name} born in the store": zc.ones(nbytes // 8) for name, nbytes in sizes.items()}
    arrays |= {f"{name} that NumPy allocated": np.ones(n // 8) for name, n in sizes.items() if name in NUMPY_SIZES}
    before = await _copied(adder)
    subjects: dict[str, Sample] = {"small": partial(each, partial(adder.add, 3, 4.5), calls)}
    subjects |= {name: partial(each, partial(adder.first, array), calls) for name, array in arrays.items()}
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
        return await each(partial(adder.add, 3, 4.5), passes)

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
    subjects = {"small": partial(each, keeper.nothing, calls), "kept": partial(each, keeper.kept, calls)}
    times = medians(await interleave(scale.runs, subjects))
    copied = await _copied(keeper) - before
    await zc.stop(keeper)
    label = f"{name} as a result, born in the store"
    return [
        Measurement("arrays", label, times["kept"], "us", times["small"], "small sync call", None, scale.runs),
        Measurement("arrays", f"{label}: copied", copied, "B", 0.0, "nothing", exactly(0)),
    ]


async def _passed(scale: Scale, sizes: dict[str, int], sources: dict[str, Array]) -> list[Measurement]:
    async with zc.init():
        adder = await SyncAdder.spawn()
        found = await _born_in_store(scale, sizes, adder)
        for name in list(sources):
            found += await _from_malloc(scale, name, sources.pop(name), adder)
        for name, nbytes in sizes.items():
            if nbytes >= 1 << 20:
                found += await _as_result(scale, name, nbytes)
    return found


def measure_arrays(scale: Scale) -> Iterator[Measurement]:
    """Measure 1 KiB to 1 GiB, without sizes that exceed the machine's memory."""
    sizes = _sizes()
    sources = {name: np.ones(nbytes // 8) for name, nbytes in sizes.items()}  # before zc.init, so surely from malloc
    yield from zc.run(_passed(scale, sizes, sources))


# ---- pieces of open arrays, and forks

MIB = 1 << 20
PIECES = {"1 MiB": MIB, "64 MiB": 64 * MIB}
OUT_OF_CACHE = 64 * MIB
"""Bytes of the targets of memcpy, which take turns: the next one is in no cache, as a block of the store is in none."""
SUMMED = 16 * MIB
FORKED = 1 << 30
"""Bytes of the arrays that a forking process has; the times grow with them."""
ARRAYS = 16
PIECE_LIMIT, FORK_LIMIT = 1.1, 1.5
FORKS = 3


def _beyond(times: dict[str, list[float]], more: str, less: str) -> float:
    """The median of the times by which one subject was slower than the other in the same turn."""
    return median(a - b for a, b in zip(times[more], times[less], strict=True))


async def _memcpy(targets: deque[Any], source: Any) -> float:
    targets.rotate()
    before = time.perf_counter()
    np.copyto(targets[0], source)
    return (time.perf_counter() - before) * 1e6


async def _call(adder: Any, make: Callable[[], Any]) -> float:
    before = time.perf_counter()
    await adder.first(make())
    return (time.perf_counter() - before) * 1e6


async def _pieces(scale: Scale) -> list[Measurement]:
    adder: Any = await SyncAdder.spawn()
    found, runs = [], 10 * scale.runs
    for name, nbytes in PIECES.items():
        held = np.ones(nbytes // 8 + 1)
        targets = deque(np.ones(nbytes // 8) for _ in range(OUT_OF_CACHE // nbytes + 1))
        subjects: dict[str, Sample] = {
            "piece": partial(_call, adder, partial(held.__getitem__, slice(1, None))),
            "new": partial(_call, adder, partial(zc.empty, nbytes // 8)),
            "memcpy": partial(_memcpy, targets, held[1:]),
        }
        times = await interleave(runs, subjects)
        value, floor = _beyond(times, "piece", "new"), median(times["memcpy"])
        what = f"piece of an open array, {name}: more than a new array"
        found.append(Measurement("snapshots", what, value, "us", floor, "memcpy", at_most(PIECE_LIMIT), runs))
    return found


@zc.actor
class _Member:
    """A rank with an array of one element more than it sums."""

    def __init__(self) -> None:
        self.held = np.ones(SUMMED // 8 + 1)
        self.whole = np.ones(SUMMED // 8)
        self.target = np.empty(SUMMED // 8)

    async def sum(self, group: Any, piece: bool) -> None:
        await group.allreduce(self.held[1:] if piece else self.whole)

    def copy(self) -> None:
        np.copyto(self.target, self.held[1:])


async def _sums(scale: Scale) -> Measurement:
    members: list[Any] = [await _Member.spawn() for _ in range(2)]
    group = await zc.group(members)

    async def step(*arguments: Any, method: str = "sum") -> float:
        before = time.perf_counter()
        await asyncio.gather(*(getattr(member, method)(*arguments) for member in members))
        return (time.perf_counter() - before) * 1e6

    runs = 10 * scale.runs
    subjects: dict[str, Sample] = {
        "piece": partial(step, group, True),
        "whole": partial(step, group, False),
        "memcpy": partial(step, method="copy"),
    }
    times = await interleave(runs, subjects)
    value, floor = _beyond(times, "piece", "whole"), median(times["memcpy"])
    what = "allreduce of a piece, 16 MiB on two ranks: more than of a whole array"
    return Measurement("snapshots", what, value, "us", floor, "memcpy on both", at_most(PIECE_LIMIT), runs)


async def _snapshots(scale: Scale) -> list[Measurement]:
    async with zc.init(config=zc.Config(store_capacity=1 << 30)):
        return [*await _pieces(scale), await _sums(scale)]


def _forked() -> list[list[float]]:
    """Milliseconds of the calls of fork, and of the writes to all arrays after the child's end."""
    arrays = [np.ones(FORKED // ARRAYS, np.uint8) for _ in range(ARRAYS)]
    found = []
    for _ in range(FORKS):
        begun = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        forked = time.perf_counter()
        os.waitpid(pid, 0)
        ended = time.perf_counter()
        for array in arrays:
            array += 1
        found.append([(forked - begun) * 1e3, (time.perf_counter() - ended) * 1e3])
    return found


async def _with_store() -> list[list[float]]:
    async with zc.init(config=zc.Config(store_capacity=3 * FORKED)):
        return _forked()


def _forks(scale: Scale) -> Iterator[Measurement]:
    if available_memory() < 4 * FORKED:
        print(f"snapshots: forks left out, {available_memory() >> 20} MiB of memory are free", file=sys.stderr)
        return
    times: dict[str, list[Any]] = {"store": [], "usual": []}
    for _ in range(scale.runs):
        for kind, found in times.items():
            command = [sys.executable, "-m", "benchmarks.arrays", kind]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    for name, turn, at, budget in (
        ("first fork with 1 GiB in the store", 0, 0, at_most(FORK_LIMIT)),
        ("later fork, all written since", -1, 0, at_most(FORK_LIMIT)),
        ("writing all after the first fork", 0, 1, None),
        ("writing all after a later fork", -1, 1, None),
    ):
        value, floor = (median(run[turn][at] for run in times[kind]) for kind in ("store", "usual"))
        yield Measurement("snapshots", name, value, "ms", floor, "NumPy's usual memory", budget, scale.runs)


def measure_snapshots(scale: Scale) -> Iterator[Measurement]:
    """Measure pieces, sums of pieces, and forks."""
    yield from zc.run(_snapshots(scale))
    yield from _forks(scale)


# ---- NumPy's own allocations

OPERANDS = {
    "64 KiB": 1 << 16,
    "1 MiB": 1 << 20,
    "4 MiB": 1 << 22,
    "16 MiB": 1 << 24,
    "64 MiB": 1 << 26,
    "256 MiB": 1 << 28,
}
NOT_SLOWER = 1.03
"""Limit, as a multiple of the usual allocator's time."""
PAIR_LIMIT = 1.0
"""Microseconds for an allocation and its release."""
TURN = 0.03
"""The least seconds of one allocator's share of a turn; an operation that takes longer counts once."""
MAX_SORT = 1 << 24
"""Bytes; larger arrays take seconds to sort, and allocate as little."""


def _operations(nbytes: int) -> dict[str, Callable[[], Any]]:
    n = nbytes // 8
    x, y = np.random.default_rng(1).random(n), np.random.default_rng(2).random(n)
    half = x[: n // 2]
    operations: dict[str, Callable[[], Any]] = {
        "x + y": lambda: x + y,
        "x.copy()": lambda: x.copy(),
        "np.concatenate": lambda: np.concatenate((half, half)),
    }
    if nbytes <= MAX_SORT:
        operations["np.sort"] = lambda: np.sort(x)
    return operations


def _per_call(operation: Callable[[], Any], calls: int) -> float:
    """The microseconds of a call."""
    before = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - before) / calls * 1e6


def _compare(make: Callable[[], Callable[[], Any]], turns: int) -> tuple[float, float]:
    """The microseconds of a call with memory of the store and with NumPy's, operands included."""
    ours = make()
    with zc.numpy_allocator(False):
        theirs = make()
        calls = max(1, int(TURN * 1e6 / _per_call(theirs, 1)))
        _per_call(theirs, calls)
    _per_call(ours, calls)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 else (1, 0):
            with zc.numpy_allocator(False) if which else nullcontext():
                times[which].append(_per_call((ours, theirs)[which], calls))
    return median(times[0]), median(times[1])


async def _allocations(scale: Scale) -> list[Measurement]:
    found = []
    turns = 2 * scale.runs + 1
    async with zc.init():
        for label, nbytes in OPERANDS.items():
            for name in _operations(8):
                if name == "np.sort" and nbytes > MAX_SORT:
                    continue
                ours, theirs = _compare(lambda name=name, nbytes=nbytes: _operations(nbytes)[name], turns)  # type: ignore[misc]
                what = f"{name}, {label}"
                found.append(
                    Measurement("numpy", what, ours, "us", theirs, "NumPy's allocator", at_most(NOT_SLOWER), turns)
                )
        pair, usual = _compare(lambda: lambda: np.empty(1 << 17, np.uint8), turns)
        limit = at_most(PAIR_LIMIT, of="value")
        found.append(
            Measurement("numpy", "allocate and free 128 KiB", pair, "us", usual, "NumPy's allocator", limit, turns)
        )
    return found


def measure_numpy(scale: Scale) -> Iterator[Measurement]:
    """Measure all operations at all sizes, then one allocation with its release."""
    yield from zc.run(_allocations(scale))


# ---- on the fake GPU

GPU: Final = "gpu"
GPU_CALLS: Final = 300
GPU_LIMIT, GPU_SIZE_LIMIT, QUEUED_LIMIT, HOST_LIMIT = 3.0, 1.3, 5.0, 1.5
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


async def _by_reference(scale: Scale) -> list[Measurement]:
    calls = scale.count(GPU_CALLS, 10)
    async with zc.init(config=zc.Config(gpu="fake")):
        reader: Any = await Reader.spawn()
        arrays: dict[str, Any] = {"NumPy": zc.zeros(64 * MIB, "u1")}
        for name, nbytes in (("64 KiB", 1 << 16), ("64 MiB", 64 * MIB), ("256 MiB", 256 * MIB)):
            arrays[name] = zc.zeros(nbytes, "u1", device="cuda")
        await asyncio.to_thread(zc.gpu.to_host, arrays["256 MiB"][:1])  # all are computed
        before = zc.stats().bytes_copied
        subjects: dict[str, Sample] = {
            name: partial(each, partial(reader.take, array), calls) for name, array in arrays.items()
        }
        await subjects["256 MiB"]()  # imports the extents
        times = medians(await interleave(scale.runs, subjects))
        copied = zc.stats().bytes_copied - before + (await zc.stats(reader)).bytes_copied
    found = [
        Measurement(
            GPU, "64 MiB to an actor", times["64 MiB"], "us", times["NumPy"], "with a NumPy array", at_most(GPU_LIMIT),
            scale.runs,
        ),
        Measurement(
            GPU, "256 MiB to an actor", times["256 MiB"], "us", times["64 KiB"], "with 64 KiB", at_most(GPU_SIZE_LIMIT),
            scale.runs,
        ),
    ]  # fmt: skip
    return [*found, Measurement(GPU, "all of these: copied", copied, "B", 0.0, "nothing", exactly(0))]


async def _not_waiting(scale: Scale) -> Measurement:
    """The time that a call takes longer where work is queued on the array."""
    async with zc.init(config=zc.Config(gpu=f"fake:late={QUEUED * 1000}")):
        reader: Any = await Reader.spawn()
        still = zc.empty(MIB, "u1", device="cuda")
        await reader.take(still)

        async def without() -> float:
            return await each(partial(reader.take, still), 1) / 1e3

        async def queued() -> float:
            array = zc.zeros(MIB, "u1", device="cuda")
            return await each(partial(reader.take, array), 1) / 1e3

        times = medians(await interleave(scale.runs, {"without": without, "queued": queued}))
    name = f"a call with {QUEUED * 1000:.0f} ms of work queued: longer by"
    longer = max(0.0, times["queued"] - times["without"])
    return Measurement(GPU, name, longer, "ms", None, "", at_most(QUEUED_LIMIT, "value"), scale.runs)


async def _through_host(scale: Scale) -> list[Measurement]:
    """The time of an array's way where memory cannot be mapped, and what it takes of the stores."""
    nbytes = 256 * MIB
    config = zc.Config(gpu="fake:export=none", device_keep_nbytes=2 * nbytes)
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
            return await each(partial(reader.take, array), 1) / 1e3

        await through()  # memory is taken from the system
        times = medians(await interleave(scale.runs, {"copies": copies, "through": through}))
        grown = max(store.heap.high - here, await reader.used_of_store() - before) / MIB
    return [
        Measurement(
            GPU, "256 MiB through host memory", times["through"], "ms", times["copies"], "two copies in memory",
            at_most(HOST_LIMIT), scale.runs,
        ),
        Measurement(
            GPU, "of either store for that, at most", grown, "MiB", None, "", at_most(STAGING_LIMIT, "value"), 1
        ),
    ]  # fmt: skip


def measure_gpu(scale: Scale) -> Iterator[Measurement]:
    """Measure passing arrays on the fake GPU."""
    print("the GPU is the fake one: no figure says anything about a real GPU")
    yield from zc.run(_by_reference(scale))
    yield zc.run(_not_waiting(scale))
    yield from zc.run(_through_host(scale))


if __name__ == "__main__":
    print(json.dumps(_forked() if sys.argv[1] == "usual" else zc.run(_with_store())))
