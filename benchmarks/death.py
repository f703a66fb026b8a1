"""The time until a caller gets the news that the actor was killed."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import zcactor as zc
from benchmarks.actors import Sleeper
from benchmarks.echo import Echo, Server
from benchmarks.harness import Measurement, Scale, at_most, interleave, medians

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 20
"""Milliseconds from SIGKILL to `ActorDied`."""


async def _actor() -> float:
    sleeper = await Sleeper.spawn()
    pending = sleeper.sleep()
    pid = await sleeper.pid()
    before = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    try:
        await pending
    except zc.ActorDied:
        return (time.perf_counter() - before) * 1e3
    raise RuntimeError("a call to a killed actor returned")


async def _echo() -> float:
    with Server("bytes") as server:
        echo = await server.connect(lambda: Echo(1))
        await echo.call()
        before = time.perf_counter()
        server.process.kill()
        await echo.closed
        return (time.perf_counter() - before) * 1e3


async def _scene(scale: Scale) -> list[Measurement]:
    runs = 2 * scale.runs
    async with zc.init():
        times = medians(await interleave(runs, {"echo": _echo, "actor": _actor}, warm_up=scale.runs > 1))
    floor_name = "socket of a killed echo closes"
    return [
        Measurement(
            "death",
            "SIGKILL to ActorDied",
            times["actor"],
            "ms",
            times["echo"],
            floor_name,
            at_most(LIMIT, "value"),
            runs,
        )
    ]


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure with a call in flight, whose caller waits."""
    yield from zc.run(_scene(scale))
