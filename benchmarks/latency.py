"""One call at a time with two small arguments: at once after the last, and after a pause."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zcactor as zc
from benchmarks.actors import ADDERS, frame_nbytes
from benchmarks.echo import Echo, FrameEcho, Server
from benchmarks.harness import Measurement, Scale, at_most, interleave, medians
from benchmarks.machine import cores, on_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

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


async def _echo(echo: Echo | FrameEcho, calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        await echo.call()
    return (time.perf_counter() - before) / calls * 1e6


async def _adder(adder: Any, calls: int) -> float:
    before = time.perf_counter()
    for _ in range(calls):
        await adder.add(3, 4.5)
    return (time.perf_counter() - before) / calls * 1e6


async def _scene(
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
        subjects = {"echo": partial(_echo, echo), "frames": partial(_echo, frames)}
        subjects |= {kind: partial(_adder, adder) for kind, adder in adders.items()}
        calls = scale.count(CALLS)
        busy = medians(await interleave(scale.runs, {name: partial(run, calls) for name, run in subjects.items()}))
        for kind, limit in LIMITS.items():
            name, budget = f"{kind} method, {where}", at_most(limit) if limited else None
            found.append(Measurement("latency", name, busy[kind], "us", busy["echo"], floor_name, budget, scale.runs))
        if not pauses:
            return found
        count = scale.count(IDLE_CALLS, least=min(10, 2 * scale.runs))
        single: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(count):
            for name, run in subjects.items():
                await asyncio.sleep(PAUSE)
                single[name].append(await run(1))
        idle = medians(single)
        for kind, limit in LIMITS.items():
            name = f"{kind} method after {PAUSE:g} s of idling, {where}"
            budget = at_most(min(limit, busy[kind] / busy["echo"])) if limited else None
            found.append(Measurement("latency", name, idle[kind], "us", idle["echo"], floor_name, budget, count))
            found.append(Measurement("latency", name, idle[kind], "us", idle["frames"], "echo of frames", None, count))
    return found


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure all on one core; on two, as the kernel places them; the driver on one of two, all others on the other.

    With the kernel's choice a pair of processes may settle on one core or on two, and the latter costs wake-ups across
    cores: values scatter. The third scene has the same placement for all.
    """
    first, *others = cores()
    with on_cores(first):
        yield from zc.run(_scene(scale, "one core", limited=True))
    if others:
        with on_cores(first, others[0]):
            yield from zc.run(_scene(scale, "two cores"))
        with on_cores(others[0]):
            yield from zc.run(_scene(scale, "driver on another core", driver_core=first, pauses=False))
