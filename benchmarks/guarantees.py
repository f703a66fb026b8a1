"""The costs of guarantees: sealed objects, arrays that outlive their makers, tables, and many actors in few threads."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import time
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import Measurement, Scale, at_most, exactly, interleave, medians, spread
from benchmarks.machine import cores
from benchmarks.paired import ITEMS, ROOT, WAYS, Side

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

MIB = 1 << 20
OBJECTS = ("object-20k", "object-100k", "object-1m")
SEALED_OBJECTS = 1.3
"""Times the same over TCP without sealing."""
ADOPTED_MIB, TIMES_MEMCPY = 256, 1.3
TABLE_ROWS, TABLE_COPIES, TABLE_TIMES_MEMCPY = 1 << 20, 1.05, 1.5
SHARED, SHARED_THREADS, SHARED_SECONDS = 1000, 64, 1.0
PEERS, BUSY = 48, 8
SETTLING = 2.0
"""Seconds between two counts of connections: twins are looked at every second."""

Array = npt.NDArray[np.float64]


@zc.actor
class Maker:
    """An actor that makes an array and ends."""

    def make(self, nbytes: int) -> Array:
        """Make an array of ones."""
        return np.ones(nbytes // 8)


@zc.actor
class Reader:
    """An actor that takes arrays and tables."""

    def first(self, array: Array) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    def rows(self, table: Any) -> int:
        """The number of rows of an Arrow table."""
        return int(table.num_rows)


@zc.actor(process="shared")
class Small:
    """One of many actors in a process."""

    def one(self) -> int:
        """Return at once: a plain call."""
        return 1

    def threads(self) -> int:
        """The number of threads of the process."""
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@zc.actor
class Talker:
    """An actor that calls all others."""

    async def reach(self, others: list[Any]) -> int:
        """Call each actor; the number that have answered."""
        return sum(await asyncio.gather(*[other.answer() for other in others]))

    async def answer(self) -> int:
        """Answer a call of another actor."""
        return 1

    async def connections(self) -> int:
        """The number of connections of its process."""
        return zc.stats().connections


def objects(scale: Scale) -> list[Measurement]:
    """Measure objects above the eager limit over TCP, sealed and not, all on one core."""
    core, found = cores()[-1], []
    with Side(ROOT, core, WAYS["tcp"]) as plain, Side(ROOT, core, WAYS["sealed"]) as sealed:
        for item in OBJECTS:
            name, full = ITEMS[item]
            count = scale.count(full, least=50)
            figures: dict[Side, list[float]] = {plain: [], sealed: []}
            for turn in range(scale.runs + 1):
                for side in (plain, sealed) if turn % 2 else (sealed, plain):
                    figures[side].append(side.measure(item, count))
            floor, value = (min(figures[side][1:]) for side in (plain, sealed))  # as in `benchmarks.paired`
            budget = at_most(SEALED_OBJECTS)
            found.append(
                Measurement("guarantees", f"{name}, sealed TCP", value, "us", floor, "not sealed", budget, scale.runs,
                            "least", spread(figures[sealed][1:]))
            )  # fmt: skip
    return found


async def _seconds(run: Callable[[], Awaitable[Any]]) -> float:
    before = time.perf_counter()
    await run()
    return (time.perf_counter() - before) * 1e3


async def _memcpy(target: mmap.mmap, source: Array) -> None:
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(target)), source.ctypes.data, source.nbytes)


def _touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
    return memory


async def passed_on(scale: Scale) -> list[Measurement]:
    """Measure the bytes copied by a holder that has pulled an array over TCP, and passes it on when its maker has
    ended."""
    nbytes = ADOPTED_MIB * MIB
    async with zc.init(transports=("tcp",)):
        reader: Any = await zc.spawn(Reader)
        maker: Any = await zc.spawn(Maker)
        array = await maker.make(nbytes)
        await zc.stop(maker)
        before = zc.stats().bytes_copied
        await reader.first(array)
        copied = zc.stats().bytes_copied - before
    name = f"{ADOPTED_MIB} MiB that was pulled and whose maker has ended: copied"
    return [Measurement("guarantees", name, copied, "B", budget=exactly(0))]


async def adoption(scale: Scale) -> list[Measurement]:
    """Measure the first call that passes on an array whose maker has ended, next to a memcpy of the array."""
    nbytes = ADOPTED_MIB * MIB
    memory, source = _touched(nbytes), np.ones(nbytes // 8)
    times, floors, copied = [], [], 0
    async with zc.init():
        reader: Any = await zc.spawn(Reader)
        for _ in range(min(scale.runs, 5) + 1):
            maker: Any = await zc.spawn(Maker)
            array = await maker.make(nbytes)
            floors.append(await _seconds(partial(_memcpy, memory, source)))
            await zc.stop(maker)
            before = zc.stats().bytes_copied
            times.append(await _seconds(partial(reader.first, array)))
            copied = zc.stats().bytes_copied - before
            del array
    name, budget, floor = (
        f"first call with {ADOPTED_MIB} MiB whose maker has ended",
        at_most(TIMES_MEMCPY),
        median(floors),
    )
    fresh, *warm = times  # the first time the system has to give the store its memory
    return [
        Measurement("guarantees", name, median(warm), "ms", floor, "memcpy", budget, len(warm), spread=spread(warm)),
        Measurement("guarantees", f"{name}, store still empty", fresh, "ms", floor, "memcpy", None, 1),
        Measurement("guarantees", f"{name}: copied", copied, "B", nbytes, "once", at_most(1.0)),
    ]  # fmt: skip


async def table(scale: Scale) -> list[Measurement]:
    """Measure an Arrow table of numbers and texts as an argument, next to a memcpy of it."""
    import pyarrow as pa

    columns = {f"x{i}": np.arange(TABLE_ROWS, dtype=np.float64) + i for i in range(3)}
    texts = pa.array([f"{number:06d}" for number in range(TABLE_ROWS)])
    table = pa.table({**columns, "text": texts})
    nbytes = table.nbytes
    memory, source = _touched(nbytes), np.ones(nbytes // 8 + 1)[: nbytes // 8]
    async with zc.init():
        reader: Any = await zc.spawn(Reader)
        before = zc.stats().bytes_copied
        await reader.rows(table)
        copied = zc.stats().bytes_copied - before

        async def fresh() -> float:
            again = pa.table(
                {name: pa.array(column.to_numpy() + 0) for name, column in zip(columns, table, strict=False)}
            )
            again = again.append_column("text", pa.concat_arrays([texts]))
            return await _seconds(partial(reader.rows, again))

        samples = await interleave(
            scale.runs, {"table": fresh, "memcpy": partial(_seconds, partial(_memcpy, memory, source))}
        )
        figures = medians(samples)
    name = f"Arrow table of {nbytes / 1e6:.0f} MB"
    budget = at_most(TABLE_TIMES_MEMCPY)
    return [
        Measurement(
            "guarantees",
            name,
            figures["table"],
            "ms",
            figures["memcpy"],
            "memcpy",
            budget,
            scale.runs,
            spread=spread(samples["table"]),
        ),
        Measurement("guarantees", f"{name}: copied", copied, "B", nbytes, "its bytes", at_most(TABLE_COPIES)),
    ]


async def shared(scale: Scale) -> list[Measurement]:
    """Measure the actors of one process with a plain call each."""
    count = scale.count(SHARED, least=SHARED)
    async with zc.init():
        before = time.perf_counter()
        actors: list[Any] = await asyncio.gather(*[zc.spawn(Small) for _ in range(count)])
        await zc.get([actor.one() for actor in actors])
        seconds = time.perf_counter() - before
        threads = max(await zc.get([actor.threads() for actor in actors[:8]]))
    name, budget = f"{count:,} shared actors with a plain call each", at_most(SHARED_THREADS, "value")
    return [
        Measurement("guarantees", name, seconds, "s", budget=at_most(SHARED_SECONDS, "value")),
        Measurement("guarantees", f"{name}: threads of a process", threads, "", budget=budget),
    ]  # fmt: skip


def _spin() -> None:
    while True:
        pass


async def _settled(talkers: list[Any]) -> int:
    """The most connections of one of `talkers`, once that number has not fallen since the look before. Two talkers that
    connect to each other at the same moment have two, until they have agreed which of them stays."""
    seen: int = max(await zc.get([talker.connections() for talker in talkers]))
    while True:
        await asyncio.sleep(SETTLING)
        found: int = max(await zc.get([talker.connections() for talker in talkers]))
        if found >= seen:
            return found
        seen = found


async def all_to_all(scale: Scale) -> list[Measurement]:
    """Measure actors that all call all, beside processes that keep the machine busy."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        for _ in range(BUSY):
            process = context.Process(target=_spin, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        async with zc.init():
            talkers: list[Any] = await asyncio.gather(*[zc.spawn(Talker) for _ in range(PEERS)])
            before = time.perf_counter()
            answers = await zc.get([talker.reach([t for t in talkers if t != talker]) for talker in talkers])
            seconds = time.perf_counter() - before
            connections = await _settled(talkers)
    name = f"{PEERS} actors that all call all beside {BUSY} busy processes"
    most = PEERS - 1 + 2  # the node agent and the driver
    return [
        Measurement("guarantees", name, seconds, "s"),
        Measurement("guarantees", f"{name}: unanswered", PEERS * (PEERS - 1) - sum(answers), "", budget=exactly(0)),
        Measurement("guarantees", f"{name}: connections, most", connections, "", budget=at_most(most, "value")),
    ]


def measure(scale: Scale) -> Iterator[Measurement]:
    """Measure all guarantees."""
    yield from objects(scale)
    yield from zc.run(adoption(scale))
    yield from zc.run(passed_on(scale))
    yield from zc.run(table(scale))
    yield from zc.run(shared(scale))
    yield from zc.run(all_to_all(scale))
