"""Calls: one at a time, 1,000 in flight, and of n actors by n actors; and the encoding of their frames."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from timeit import Timer
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.floors import Driver, Echo, FrameEcho, Server
from benchmarks.harness import Measurement, Sample, Scale, at_least, at_most, each, interleave, medians
from benchmarks.machine import cores, on_cores
from zcactor.objectstore.ref import Region
from zcactor.rpc import codec, generic
from zcactor.rpc.codec import frame_size
from zcactor.rpc.messages import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ---- actors that are called

Array = npt.NDArray[np.float64]


@zc.actor
class SyncAdder:
    """An actor with a sync method, which runs in the actor's thread."""

    @zc.method
    def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b

    @zc.method
    def first(self, array: Array) -> float:
        """The first element: proof that the array is here, at no further cost."""
        return float(array[0])


@zc.actor
class AsyncAdder:
    """An actor with a coroutine method, which runs on the actor's loop, as a task."""

    @zc.method
    async def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b


@zc.actor
class InlineAdder:
    """An actor with an inline method, which runs on the actor's loop as soon as the call has arrived."""

    @zc.method(inline=True)
    def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b


ADDERS: dict[str, Any] = {"sync": SyncAdder, "async": AsyncAdder, "inline": InlineAdder}
"""The actors by the kind of their method."""


@zc.actor
class Caller:
    """An actor that calls others."""

    @zc.method
    async def drive(self, adders: list[Any], calls: int, in_flight: int) -> None:
        """Call ``add`` of each actor in turn, `calls` times in all, `in_flight` at a time."""
        for start in range(0, calls, in_flight):
            stop = min(start + in_flight, calls)
            await zc.get([adders[i % len(adders)].add(3, 4.5) for i in range(start, stop)])


async def frame_nbytes(adder: Any) -> int:
    """Bytes of the frame in which a call of ``add(3, 4.5)`` travels."""
    await adder.add(3, 4.5)
    before = zc.stats()
    for _ in range(8):
        await adder.add(3, 4.5)
    after = zc.stats()
    return frame_size(0, 0, (after.bytes_eager - before.bytes_eager) // (after.calls - before.calls))


# ---- one at a time

CALLS = 5000
IDLE_CALLS = 30
PAUSE = 0.2
"""Seconds. Long enough for a core to sleep, and for any spinning to have stopped."""
LIMITS = {"sync": 3.0, "async": 2.0, "inline": 2.0}
"""Times the echo on one core. After a pause a call may be no slower, against the echo after the same pause, than
without a pause. On two cores the kernel's placement decides more than the program does, so no limit applies.

With cold caches all work of a program beyond one ``recv`` and one ``send`` costs more than these, so after a pause an
echo of frames, the least that a request with an answer needs, stands beside the echo of bytes.
"""


async def _one_at_a_time(
    scale: Scale, where: str, *, limited: bool = False, driver_core: int | None = None, pauses: bool = True
) -> list[Measurement]:
    """Measure on the cores of this process; `driver_core` is the core to which it moves when the others have
    started."""
    found = []
    async with zc.init(), AsyncExitStack() as stack:
        adders = {kind: await cls.spawn() for kind, cls in ADDERS.items()}
        nbytes = await frame_nbytes(adders["sync"])
        echo = await stack.enter_context(Server("bytes")).connect(lambda: Echo(nbytes))
        if driver_core is not None:
            os.sched_setaffinity(0, {driver_core})
        floor_name = f"echo of {nbytes} B"
        frames = await stack.enter_context(Server("frames")).connect(lambda: FrameEcho(nbytes))
        subjects: dict[str, Callable[[], Any]] = {"echo": echo.call, "frames": frames.call}
        subjects |= {kind: partial(adder.add, 3, 4.5) for kind, adder in adders.items()}
        calls = scale.count(CALLS)
        busy = medians(
            await interleave(scale.runs, {name: partial(each, call, calls) for name, call in subjects.items()})
        )
        for kind, limit in LIMITS.items():
            name, budget = f"{kind} method, {where}", at_most(limit) if limited else None
            found.append(Measurement("latency", name, busy[kind], "us", busy["echo"], floor_name, budget, scale.runs))
        if not pauses:
            return found
        count = scale.count(IDLE_CALLS, least=min(10, 2 * scale.runs))
        single: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(count):
            for name, call in subjects.items():
                await asyncio.sleep(PAUSE)
                single[name].append(await each(call, 1))
        idle = medians(single)
        for kind, limit in LIMITS.items():
            name = f"{kind} method after {PAUSE:g} s of idling, {where}"
            budget = at_most(min(limit, busy[kind] / busy["echo"])) if limited else None
            found.append(Measurement("latency", name, idle[kind], "us", idle["echo"], floor_name, budget, count))
            found.append(Measurement("latency", name, idle[kind], "us", idle["frames"], "echo of frames", None, count))
    return found


def measure_latency(scale: Scale) -> Iterator[Measurement]:
    """Measure all on one core; on two, as the kernel places them; the driver on one of two, all others on the other.

    With the kernel's choice a pair of processes may settle on one core or on two, and the latter costs wake-ups across
    cores: values scatter. The third scene has the same placement for all.
    """
    first, *others = cores()
    with on_cores(first):
        yield from zc.run(_one_at_a_time(scale, "one core", limited=True))
    if others:
        with on_cores(first, others[0]):
            yield from zc.run(_one_at_a_time(scale, "two cores"))
        with on_cores(others[0]):
            yield from zc.run(_one_at_a_time(scale, "driver on another core", driver_core=first, pauses=False))


# ---- many in flight

IN_FLIGHT = 1000
BATCHES = 50
LEAST_RATE = 0.35
"""Limit, as a share of the echo's rate."""


async def _echo_batches(echo: FrameEcho, batches: int) -> float:
    before = time.perf_counter()
    for _ in range(batches):
        await asyncio.gather(*[echo.call() for _ in range(IN_FLIGHT)])
    return batches * IN_FLIGHT / (time.perf_counter() - before)


async def _adder_batches(adder: Any, batches: int) -> float:
    before = time.perf_counter()
    for _ in range(batches):
        await zc.get([adder.add(3, 4.5) for _ in range(IN_FLIGHT)])
    return batches * IN_FLIGHT / (time.perf_counter() - before)


async def _in_flight(scale: Scale) -> list[Measurement]:
    batches = scale.count(BATCHES)
    async with zc.init(), AsyncExitStack() as stack:
        adders = {kind: await cls.spawn() for kind, cls in ADDERS.items()}
        nbytes = await frame_nbytes(adders["sync"])
        echo = await stack.enter_context(Server("frames")).connect(lambda: FrameEcho(nbytes))
        subjects = {"echo": partial(_echo_batches, echo, batches)}
        subjects |= {kind: partial(_adder_batches, adder, batches) for kind, adder in adders.items()}
        rates = medians(await interleave(scale.runs, subjects))
    floor_name = f"echo of {nbytes} B"
    return [
        Measurement(
            "pipeline",
            f"{kind} method, {IN_FLIGHT:,} in flight",
            rates[kind],
            "calls/s",
            rates["echo"],
            floor_name,
            at_least(LEAST_RATE),
            scale.runs,
        )
        for kind in ADDERS
    ]


def measure_pipeline(scale: Scale) -> Iterator[Measurement]:
    """Measure sync, async and inline calls."""
    yield from zc.run(_in_flight(scale))


# ---- from a thread without a loop

BLOCKING_CALLS = 3000
MOST_BLOCKING, LEAST_BLOCKING_RATE = 1.3, 0.7
"""Limits, as multiples of the awaited calls of the same process."""


def _blocking_calls(adder: Any, calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        adder.add(3, 4.5).result()
    return (time.perf_counter() - before) / calls * 1e6


def _blocking_batches(adder: Any, batches: int) -> float:
    before = time.perf_counter()
    for _ in range(batches):
        zc.get([adder.add(3, 4.5) for _ in range(IN_FLIGHT)]).result()
    return batches * IN_FLIGHT / (time.perf_counter() - before)


async def _blocked(scale: Scale) -> list[Measurement]:
    calls, batches = scale.count(BLOCKING_CALLS), scale.count(BATCHES)
    async with zc.init():
        adder = await SyncAdder.spawn()
        subjects: dict[str, Sample] = {
            "awaited": lambda: each(lambda: adder.add(3, 4.5), calls),
            "blocking": lambda: asyncio.to_thread(_blocking_calls, adder, calls),
            "awaited batches": lambda: _adder_batches(adder, batches),
            "blocking batches": lambda: asyncio.to_thread(_blocking_batches, adder, batches),
        }
        found = medians(await interleave(scale.runs, subjects))
    return [
        Measurement(
            "blocking", "sync method, from a plain thread", found["blocking"], "us", found["awaited"], "awaited",
            at_most(MOST_BLOCKING), scale.runs,
        ),
        Measurement(
            "blocking", "sync method, 1,000 in flight from a plain thread", found["blocking batches"], "calls/s",
            found["awaited batches"], "awaited", at_least(LEAST_BLOCKING_RATE), scale.runs,
        ),
    ]  # fmt: skip


def measure_blocking(scale: Scale) -> Iterator[Measurement]:
    """Measure calls of a thread that runs no event loop, beside awaited ones."""
    yield from zc.run(_blocked(scale))


# ---- many callers

CALLS_OF_EACH = 40_000
"""Calls of each caller in a run."""


async def _driven(drivers: list[Driver], calls: int) -> float:
    before = time.perf_counter()
    for driver in drivers:
        driver.begin(calls)
    for driver in drivers:
        driver.wait()
    return len(drivers) * calls / (time.perf_counter() - before)


async def _called(callers: list[Any], adders: list[Any], calls: int) -> float:
    before = time.perf_counter()
    await zc.get([caller.drive(adders, calls, IN_FLIGHT) for caller in callers])
    return len(callers) * calls / (time.perf_counter() - before)


async def _between(scale: Scale, n: int) -> list[Measurement]:
    calls = scale.count(CALLS_OF_EACH) // n
    async with zc.init():
        with ExitStack() as stack:
            adders = {kind: [await cls.spawn() for _ in range(n)] for kind, cls in ADDERS.items()}
            callers = [await Caller.spawn() for _ in range(n)]
            nbytes = await frame_nbytes(adders["sync"][0])
            servers = [stack.enter_context(Server("frames")) for _ in range(n)]
            for server in servers:
                server.listening()
            drivers = [stack.enter_context(Driver(servers, nbytes)) for _ in range(n)]
            subjects = {"echo": partial(_driven, drivers, calls)}
            subjects |= {kind: partial(_called, callers, these, calls) for kind, these in adders.items()}
            rates = medians(await interleave(scale.runs, subjects))
    return [
        Measurement(
            "many",
            f"{n}:{n}, {kind} method",
            rates[kind],
            "calls/s",
            rates["echo"],
            f"echo of {nbytes} B",
            runs=scale.runs,
        )
        for kind in ADDERS
    ]


def measure_many(scale: Scale) -> Iterator[Measurement]:
    """Measure 2:2 and 4:4, all calls of all callers per second."""
    for n in (2, 4):
        yield from zc.run(_between(scale, n))


# ---- frames

CODEC_SECONDS = 0.5
"""Seconds for each figure."""
REGION = Region(0, bytes(range(16)), 1234567, 1 << 26, 1 << 30, 0)
FRAMES = {
    "call": ((), (), bytes(41)),
    "call, 1 region": ((REGION,), (), bytes(41)),
    "call, 1 region, 1 release": ((REGION,), ((7, 1),), bytes(41)),
    "call, 8 regions": ((REGION,) * 8, (), bytes(41)),
    "call, 4 KiB payload": ((), (), bytes(4096)),
}


def microseconds(operation: Callable[[], object], seconds: float, runs: int) -> float:
    """The best time of one call in microseconds, from `runs` runs that take `seconds` together."""
    timer = Timer(operation)
    calls = 1
    taken = timer.timeit(calls)
    while taken < seconds / runs / 10:
        calls *= 4
        taken = timer.timeit(calls)
    calls = max(1, int(calls * seconds / runs / taken))
    return min(timer.repeat(runs, calls)) / calls * 1e6


def measure_codec(scale: Scale) -> Iterator[Measurement]:
    """Measure frames of calls, from none to eight regions."""
    seconds = CODEC_SECONDS * scale.share
    for name, (regions, releases, payload) in FRAMES.items():
        buffer = memoryview(bytearray(codec.frame_size(len(regions), len(releases), len(payload))))
        frame = (Kind.CALL, 0, 3, 2, 1, 77777, 0, regions, releases, payload)
        nbytes = codec.encode_into(buffer, 0, *frame)
        foreign = generic.encode(*frame)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "encode": (partial(codec.encode_into, buffer, 0, *frame), partial(generic.encode, *frame)),
            "decode": (partial(codec.decode, buffer, 4, nbytes), partial(generic.decode, foreign, 4, len(foreign))),
        }
        for verb, (ours, generated) in pairs.items():
            value, floor = (microseconds(operation, seconds, scale.runs) for operation in (ours, generated))
            label = f"{verb} {name} ({nbytes:,} B)"
            yield Measurement("codec", label, value, "us", floor, "generated code", None, scale.runs)
