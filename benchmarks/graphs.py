"""Chains of calls and compiled graphs.

A chain: three chained calls of three actors, next to the same three awaited one by one.

A compiled graph of the same three calls has no budget here. It sends one message for each edge, and nothing in between
comes back to the caller, so it shows the least that a chain of calls could take.

Graphs: a hop from actor to actor next to half a round trip, a fan-out next to calls, and an idle graph.

A hop is the time by which a run grows with each further method: the difference between a long line of methods and a
short one. Lines go to and fro between two actors. All is measured on one core, before other programs where the user may
choose that, except where processes stay awake: those have a core each. A fan-out and the calls beside it take turns;
the round of the median ratio counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, each, interleave, median_round, medians
from benchmarks.machine import cores, first_on, on_cores

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence


# ---- chains

CHAINS = {"int": 1000, "8 MiB": 30}
LEAST_CHAINS = 30
"""Chains in a turn, at least: the first ones of a turn find other memory in the caches than the later ones."""
CHAIN_ROUNDS = 3
"""Rounds of turns in each run: the one of the median ratio counts."""
CHAIN_LIMITS = {"int": 2.0, "8 MiB": 0.8}
"""Times the three calls awaited one by one, on one core: a chain saves the wake-ups of the caller, and has two frames
more for each edge. Only the bytes of large results make up for these."""


@zc.actor
class ChainLink:
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


async def _compiled(links: Sequence[Any]) -> Any:
    async with zc.graph() as graph:
        node = graph.input()
        for link in links:
            node = link.add.bind(node)
        graph.output(node)
    return await graph.compile()


async def _chains(scale: Scale) -> list[Measurement]:
    found = []
    async with zc.init():
        links: list[Any] = [await ChainLink.spawn() for _ in range(3)]
        run = await _compiled(links)
        values = {"int": 1, "8 MiB": zc.zeros(1 << 20, np.float64)}
        for name, value in values.items():
            chains = scale.count(CHAINS[name], LEAST_CHAINS)
            ways: dict[str, Callable[[int], Awaitable[float]]] = {
                "awaited": partial(_awaited, links, value),
                "chained": partial(_chained, links, value),
                "graph": partial(each, partial(run, value)),
            }
            for way in ways.values():
                await way(3)  # connects the actors
            subjects = {name: partial(way, chains) for name, way in ways.items()}
            rounds = CHAIN_ROUNDS * scale.runs
            times = await interleave(rounds, subjects)
            chained, graph = (median_round(times[way], times["awaited"]) for way in ("chained", "graph"))
            found.append(
                Measurement("chain", f"3 chained calls, {name}, one core", chained[0], "us", chained[1],
                            "the same awaited", at_most(CHAIN_LIMITS[name]), rounds, "round of the median ratio")
            )  # fmt: skip
            found.append(
                Measurement("chain", f"the same as a compiled graph, {name}, one core", graph[0], "us", graph[1],
                            "awaited", runs=rounds, statistic="round of the median ratio")
            )  # fmt: skip
        await run.close()
    return found


def measure_chain(scale: Scale) -> Iterator[Measurement]:
    """Measure an integer, and an array that each method makes anew."""
    with on_cores(cores()[0]):
        yield from zc.run(_chains(scale))


# ---- graphs

SHORT, LONG = 2, 10
"""Methods in a line."""
RUNS, FAN_RUNS, FAN_OUT, FAN_NBYTES = 1000, 200, 8, 64 << 20
FAN_ROUNDS = 3
"""Rounds of a fan-out in each run."""
SPIN_US, IDLE_S = 200.0, 1.0
HOP, FAN, IDLE = 1.5, 1.0, 0.01
"""Budgets: times half a round trip, times the same calls, and processors."""


@zc.actor
class Link:
    """A part of a graph."""

    @zc.method(inline=True)
    def add(self, value: int) -> int:
        """Add one."""
        return value + 1

    @zc.method
    def first(self, array: Any) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    @zc.method(inline=True)
    def cpu(self) -> float:
        """The processor time of this process so far, in seconds."""
        return time.process_time()


async def line(links: Sequence[Any], length: int, **options: Any) -> Any:
    """Compile a line of `length` methods, which goes to and fro."""
    async with zc.graph(**options) as g:
        node = g.input()
        for number in range(length):
            node = links[number % len(links)].add.bind(node)
        g.output(node)
    return await g.compile()


async def _hop(scale: Scale, links: Sequence[Any], **options: Any) -> dict[str, float]:
    count = scale.count(RUNS, 10)
    short, long = await line(links, SHORT, **options), await line(links, LONG, **options)
    subjects = {"short": partial(each, partial(short, 1), count), "long": partial(each, partial(long, 1), count)}
    if not options:
        subjects["call"] = partial(each, partial(links[0].add, 1), count)
    figures = medians(await interleave(scale.runs, subjects))
    for graph in (short, long):
        await graph.close()
    figures["hop"] = (figures["long"] - figures["short"]) / (LONG - SHORT)
    return figures


async def _fan(scale: Scale) -> tuple[tuple[float, float], int]:
    """The times of a fan-out and of as many calls, and the bytes that were copied."""
    links: list[Any] = [await Link.spawn() for _ in range(FAN_OUT)]
    async with zc.graph() as g:
        x = g.input()
        g.output(*[link.first.bind(x) for link in links])
    graph, array = await g.compile(), zc.zeros(FAN_NBYTES, np.uint8)
    count = scale.count(FAN_RUNS, 2)
    subjects = {
        "graph": partial(each, partial(graph, array), count),
        "calls": partial(each, lambda: zc.get([link.first(array) for link in links]), count),
    }
    figures = await interleave(FAN_ROUNDS * scale.runs, subjects)
    copied = sum([(await zc.stats(link)).bytes_copied for link in links]) + zc.stats().bytes_copied
    await graph.close()
    return median_round(figures["graph"], figures["calls"]), copied


async def _idle(links: Sequence[Any]) -> float:
    graph = await line(links, SHORT, spin_us=SPIN_US)
    await graph(1)
    await asyncio.sleep(0.05)  # beyond the time for which processes stay awake
    before: float = time.process_time() + sum([await link.cpu() for link in links])
    began = time.perf_counter()
    await asyncio.sleep(IDLE_S)  # the loop runs, as that of a program which waits
    used: float = time.process_time() + sum([await link.cpu() for link in links]) - before
    await graph.close()
    return used / (time.perf_counter() - began)


async def _one_core(scale: Scale) -> list[Measurement]:
    async with zc.init(num_cpus=FAN_OUT + 4):
        links: list[Any] = [await Link.spawn() for _ in range(2)]
        hop = await _hop(scale, links)
        idle = await _idle(links)
        fan, copied = await _fan(scale)
    return [
        Measurement("graph", "hop, int, one core", hop["hop"], "us", hop["call"] / 2, "half a round trip",
                    at_most(HOP), scale.runs),
        Measurement("graph", f"run of {SHORT} methods, int, one core", hop["short"], "us", runs=scale.runs),
        Measurement("graph", "idle graph, processors", idle, "", budget=at_most(IDLE, "value")),
        Measurement("graph", f"fan-out of 64 MiB to {FAN_OUT}, one core", fan[0], "us", fan[1], f"{FAN_OUT} calls",
                    at_most(FAN), FAN_ROUNDS * scale.runs, "round of the median ratio"),
        Measurement("graph", "fan-out, copied by zcactor", copied, "B", budget=at_most(0, "value")),
    ]  # fmt: skip


async def _awake(scale: Scale) -> list[Measurement]:
    first, second = cores()[:2]
    os.sched_setaffinity(0, {second})
    async with zc.init(num_cpus=2):
        link: Any = await Link.spawn()
        os.sched_setaffinity(0, {first})
        asleep = await _hop(scale, [link], in_flight=1)
        awake = await _hop(scale, [link], spin_us=SPIN_US)
    return [
        Measurement("graph", f"run of {SHORT} methods of one actor, own cores, awake", awake["short"], "us",
                    asleep["short"], "asleep", runs=scale.runs),
    ]  # fmt: skip


def measure_graph(scale: Scale) -> Iterator[Measurement]:
    """Measure lines of methods, a fan-out and an idle graph; and processes that stay awake, where there are two
    cores."""
    with first_on(cores()[0]):
        yield from zc.run(_one_core(scale))
    if len(cores()) > 1:
        before = os.sched_getaffinity(0)
        try:
            yield from zc.run(_awake(scale))
        finally:
            os.sched_setaffinity(0, before)
