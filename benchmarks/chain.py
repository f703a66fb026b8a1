"""Three chained calls of three actors, next to the same three awaited one by one."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, interleave, medians
from benchmarks.machine import cores, on_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHAINS = {"int": 1000, "8 MiB": 30}
LIMIT = 0.8
"""Times the three calls awaited one by one, on one core: a chain saves the wake-ups of the caller."""


@zc.actor
class Link:
    """A part of a chain."""

    @zc.method
    def add(self, value: Any) -> Any:
        """Add one."""
        return value + 1


async def _awaited(links: Sequence[Any], value: Any, chains: int) -> float:
    before = time.perf_counter()
    for _ in range(chains):
        result = value
        for link in links:
            result = await link.add(result)
    return (time.perf_counter() - before) / chains * 1e6


async def _chained(links: Sequence[Any], value: Any, chains: int) -> float:
    before = time.perf_counter()
    for _ in range(chains):
        result = value
        for link in links:
            result = link.add(result)
        await result
    return (time.perf_counter() - before) / chains * 1e6


async def _scene(scale: Scale) -> list[Measurement]:
    found = []
    async with zc.init():
        links: list[Any] = [await Link.spawn() for _ in range(3)]
        values = {"int": 1, "8 MiB": zc.zeros(1 << 20, np.float64)}
        for name, value in values.items():
            chains = scale.count(CHAINS[name], 5)
            for way in (_awaited, _chained):
                await way(links, value, 3)  # connects the actors
            subjects = {way.__name__: partial(way, links, value, chains) for way in (_awaited, _chained)}
            times = medians(await interleave(scale.runs, subjects))
            found.append(
                Measurement(
                    "chain", f"3 chained calls, {name}, one core", times["_chained"], "us", times["_awaited"],
                    "the same awaited", at_most(LIMIT), scale.runs,
                )
            )  # fmt: skip
    return found


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure an integer, and an array that each method makes anew."""
    with on_cores(cores()[0]):
        yield from zc.run(_scene(scale))
