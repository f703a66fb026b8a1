"""Three chained calls of three actors, next to the same three awaited one by one.

A compiled graph of the same three calls has no budget here. It sends one message for each edge, and nothing in between
comes back to the caller, so it shows the least that a chain of calls could take.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, interleave, median_round
from benchmarks.machine import cores, on_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CHAINS = {"int": 1000, "8 MiB": 30}
LEAST = 30
"""Chains in a turn, at least: the first ones of a turn find other memory in the caches than the later ones."""
ROUNDS = 3
"""Rounds of turns in each run: the one of the median ratio counts."""
LIMITS = {"int": 2.0, "8 MiB": 0.8}
"""Times the three calls awaited one by one, on one core: a chain saves the wake-ups of the caller, and has two frames
more for each edge. Only the bytes of large results make up for these."""


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


async def _graph(run: Any, value: Any, chains: int) -> float:
    before = time.perf_counter()
    for _ in range(chains):
        await run(value)
    return (time.perf_counter() - before) / chains * 1e6


async def _compiled(links: Sequence[Any]) -> Any:
    async with zc.graph() as graph:
        node = graph.input()
        for link in links:
            node = link.add.bind(node)
        graph.output(node)
    return await graph.compile()


async def _scene(scale: Scale) -> list[Measurement]:
    found = []
    async with zc.init():
        links: list[Any] = [await Link.spawn() for _ in range(3)]
        run = await _compiled(links)
        values = {"int": 1, "8 MiB": zc.zeros(1 << 20, np.float64)}
        for name, value in values.items():
            chains = scale.count(CHAINS[name], LEAST)
            ways = {
                "_awaited": partial(_awaited, links),
                "_chained": partial(_chained, links),
                "_graph": partial(_graph, run),
            }
            for way in ways.values():
                await way(value, 3)  # connects the actors
            subjects = {name: partial(way, value, chains) for name, way in ways.items()}
            rounds = ROUNDS * scale.runs
            times = await interleave(rounds, subjects)
            chained, graph = (median_round(times[way], times["_awaited"]) for way in ("_chained", "_graph"))
            found.append(
                Measurement("chain", f"3 chained calls, {name}, one core", chained[0], "us", chained[1],
                            "the same awaited", at_most(LIMITS[name]), rounds, "round of the median ratio")
            )  # fmt: skip
            found.append(
                Measurement("chain", f"the same as a compiled graph, {name}, one core", graph[0], "us", graph[1],
                            "awaited", runs=rounds, statistic="round of the median ratio")
            )  # fmt: skip
        await run.close()
    return found


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure an integer, and an array that each method makes anew."""
    with on_cores(cores()[0]):
        yield from zc.run(_scene(scale))
