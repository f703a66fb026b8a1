"""1,000 calls in flight from one process to one actor."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zcactor as zc
from benchmarks.actors import ADDERS, frame_nbytes
from benchmarks.echo import FrameEcho, Server
from benchmarks.harness import Measurement, Scale, at_least, interleave, medians

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_FLIGHT = 1000
BATCHES = 50
LIMIT = 0.35
"""Limit, as a share of the echo's rate."""


async def _echo(echo: FrameEcho, batches: int) -> float:
    before = time.perf_counter()
    for _ in range(batches):
        await asyncio.gather(*[echo.call() for _ in range(IN_FLIGHT)])
    return batches * IN_FLIGHT / (time.perf_counter() - before)


async def _adder(adder: Any, batches: int) -> float:
    before = time.perf_counter()
    for _ in range(batches):
        await zc.get([adder.add(3, 4.5) for _ in range(IN_FLIGHT)])
    return batches * IN_FLIGHT / (time.perf_counter() - before)


async def _scene(scale: Scale) -> list[Measurement]:
    batches = scale.count(BATCHES)
    async with zc.init(), AsyncExitStack() as stack:
        adders = {kind: await cls.spawn() for kind, cls in ADDERS.items()}
        nbytes = await frame_nbytes(adders["sync"])
        echo = await stack.enter_context(Server("frames")).connect(lambda: FrameEcho(nbytes))
        subjects = {"echo": partial(_echo, echo, batches)}
        subjects |= {kind: partial(_adder, adder, batches) for kind, adder in adders.items()}
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
            at_least(LIMIT),
            scale.runs,
        )
        for kind in ADDERS
    ]


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure sync, async and inline calls."""
    yield from zc.run(_scene(scale))
