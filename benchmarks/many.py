"""Groups of n actors calling n actors: each caller calls all of them in turn, 1,000 calls at a time."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zcactor as zc
from benchmarks.actors import ADDERS, Caller, frame_nbytes
from benchmarks.echo import Driver, Server
from benchmarks.harness import Measurement, Scale, interleave, medians

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FLIGHT = 1000
CALLS = 40_000
"""Calls of each caller in a run."""


async def _echo(drivers: list[Driver], calls: int) -> float:
    before = time.perf_counter()
    for driver in drivers:
        driver.begin(calls)
    for driver in drivers:
        driver.wait()
    return len(drivers) * calls / (time.perf_counter() - before)


async def _actors(callers: list[Any], adders: list[Any], calls: int) -> float:
    before = time.perf_counter()
    await zc.get([caller.drive(adders, calls, IN_FLIGHT) for caller in callers])
    return len(callers) * calls / (time.perf_counter() - before)


async def _scene(scale: Scale, n: int) -> list[Measurement]:
    calls = scale.count(CALLS) // n
    async with zc.init():
        with ExitStack() as stack:
            adders = {kind: [await cls.spawn() for _ in range(n)] for kind, cls in ADDERS.items()}
            callers = [await Caller.spawn() for _ in range(n)]
            nbytes = await frame_nbytes(adders["sync"][0])
            servers = [stack.enter_context(Server("frames")) for _ in range(n)]
            for server in servers:
                server.listening()
            drivers = [stack.enter_context(Driver(servers, nbytes)) for _ in range(n)]
            subjects = {"echo": partial(_echo, drivers, calls)}
            subjects |= {kind: partial(_actors, callers, these, calls) for kind, these in adders.items()}
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


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure 2:2 and 4:4, all calls of all callers per second."""
    for n in (2, 4):
        yield from zc.run(_scene(scale, n))
