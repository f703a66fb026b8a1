"""The costs of guarantees, one by one: ``python -m benchmarks.guarantees ITEM``.

Sealed objects, arrays that outlive their makers, tables, many actors in few threads; data sockets and the memory kept
of pulled arrays, over TCP on this machine alone; and over the fake device, in one process, calls beside a base, many
connections that end, the registered memory, and a pull beside a peer that reads with stale keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import mmap
import multiprocessing
import random
import resource
import socket
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import (
    FULL,
    Measurement,
    Scale,
    at_most,
    exactly,
    interleave,
    medians,
    options_of,
    report,
    show,
    spread,
)
from benchmarks.machine import cores, descriptors
from benchmarks.paired import ITEMS as PAIRED
from benchmarks.paired import ROOT, WAYS, Side, launches
from tests.conformance.connection import Recorder
from tests.transport.tcp_arena import tcp_side
from tests.transport.verbs.parts import EAGER, SLOT, engine_on
from tests.transport.verbs.sides import Arena, device_of, engine_of, joined, verbs_side
from zcactor.process import context
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.stream.handshake import Handshake, Purpose
from zcactor.transport.tcp import crew, pull
from zcactor.transport.tcp.authenticated import DataSeal
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.endpoint import TcpEndpoint
from zcactor.transport.verbs.driver import fake
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping

    from tests.conformance.connection import ConnectedPair
    from zcactor.transport.base import Connection, Endpoint


__all__ = ["ITEMS", "main", "measure_guarantees"]


# ---- objects, arrays, tables and actors

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
            name, full = PAIRED[item]
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


def measure_guarantees(scale: Scale) -> Iterator[Measurement]:
    """Measure all guarantees."""
    yield from objects(scale)
    yield from zc.run(adoption(scale))
    yield from zc.run(passed_on(scale))
    yield from zc.run(table(scale))
    yield from zc.run(shared(scale))
    yield from zc.run(all_to_all(scale))


# ---- over the fake device

FAKE_PEERS: Final = 244
ARRAYS, LEAST_MIB, MOST_MIB, ARENA_MIB = 2000, 65, 300, 1024
PULL_MIB: Final = 64
TIMES_BASE, MILLISECONDS, TIMES_ARENA, TIMES_ALONE = 1.03, 50.0, 1.1, 3.0


def fake_calls(scale: Scale, base: Path) -> list[Measurement]:
    """Measure calls between two runtimes of one process, next to those of the base."""
    core, found = cores()[-1], []
    rounds = 16 * scale.runs
    names = {"async": "async call over the fake device", "pipelined": "call over the fake device, 1,000 in flight"}
    sides = [partial(Side, tree, core, {}, "fake") for tree in (base, ROOT)]
    for item, (before, after) in launches(sides, {"async": 500, "pipelined": 3000}, rounds).items():
        found.append(
            Measurement("over_fake", names[item], min(after), "us", min(before), "the base", at_most(TIMES_BASE),
                        rounds, "least", spread(after))
        )  # fmt: skip
    return found


async def ending(scale: Scale) -> list[Measurement]:
    """Measure connections that end in one turn of the loop, beside much memory that stays registered."""
    taken = []
    writable, fake._is_writable = fake._is_writable, lambda *_: True  # it reads a file for each region
    try:
        for _ in range(scale.runs):
            with engine_on(FakeFabric(), "a", SLOT) as engine:
                for number in range(2000):
                    engine.device.register((number + 1) << 20, 4096, remote_read=True)
                pairs = [QueuePairs(engine, EAGER) for _ in range(FAKE_PEERS)]
                before = time.perf_counter()
                for one in pairs:
                    one.close()
                taken.append((time.perf_counter() - before) * 1e3)
    finally:
        fake._is_writable = writable
    name, budget = f"{FAKE_PEERS} connections that end at once", at_most(MILLISECONDS, "value")
    return [
        Measurement("over_fake", name, median(taken), "ms", budget=budget, runs=len(taken), spread=spread(taken))
    ]  # fmt: skip


async def registering(scale: Scale) -> list[Measurement]:
    """Measure the registered memory after the keys of many large arrays all over an arena were given."""
    fabric = FakeFabric()
    for name in ("fake0", "fake1"):
        fabric.add_nic(name)
    arrays = random.Random(1)
    pin, Arena.pin = Arena.pin, lambda *_: None  # type: ignore[method-assign]  # no byte is read, so no pages are taken
    try:
        with (
            verbs_side(lambda: fabric.binding("fake0"), ARENA_MIB * MIB) as owner,
            verbs_side(lambda: fabric.binding("fake1"), MIB) as reader,
        ):
            async with joined((owner, reader)):
                device, extents = device_of(owner), engine_of(owner).extents
                slots = sum(region.nbytes for region in device.regions.values()) - extents.nbytes
                for _ in range(ARRAYS):
                    nbytes = arrays.randint(LEAST_MIB * MIB, MOST_MIB * MIB)
                    await extents.keys(arrays.randrange(0, ARENA_MIB * MIB - nbytes, 4096), nbytes)
                registered = sum(region.nbytes for region in device.regions.values())
    finally:
        Arena.pin = pin  # type: ignore[method-assign]
    name = f"registered after {ARRAYS:,} arrays of {LEAST_MIB} to {MOST_MIB} MiB"
    beside = ARENA_MIB * MIB + slots
    return [Measurement("over_fake", name, registered, "B", beside, "arena and slots", at_most(TIMES_ARENA))]


async def _wanted(pair: ConnectedPair, nbytes: int) -> RemoteRegion:
    await pair.left.pull(RemoteRegion(1, 0, 1), pair.sides[0].address, None)  # has the memory registered
    assert pair.right.export is not None
    seal, rkey = pair.right.export(1, 0, nbytes)
    return RemoteRegion(1, 0, nbytes, seal, rkey)


async def stale(scale: Scale) -> list[Measurement]:
    """Measure a pull beside a peer whose READs have stale keys, one after the other, next to the pull alone."""
    nbytes, fabric = PULL_MIB * MIB, FakeFabric()
    for name in ("fake0", "fake1"):
        fabric.add_nic(name)
    alone, beside = [], []
    with (
        verbs_side(lambda: fabric.binding("fake0"), nbytes) as reader,
        verbs_side(lambda: fabric.binding("fake1"), nbytes) as owner,
    ):
        async with joined((reader, owner)) as pair:
            pair.left.start(Recorder())
            pair.right.start(Recorder())
            wanted = await _wanted(pair, nbytes)
            left = pair.left
            assert isinstance(left, VerbsConnection)

            async def timed() -> float:
                before = time.perf_counter()
                await left.pull(wanted, reader.address, reader)
                return (time.perf_counter() - before) * 1e3

            async def repeat() -> None:
                while True:  # the peer gets a good key when it asks
                    await pair.right.pull(RemoteRegion(6, 0, 64, 0, 0xDEAD), owner.address + nbytes - 64, owner)

            await timed()
            for _ in range(scale.runs):
                alone.append(await timed())
                generation = left.generation
                bad = asyncio.create_task(repeat())
                while left.generation < generation + 5:
                    await asyncio.sleep(0)
                beside.append(await timed())
                assert not bad.done(), "the peer has stopped"
                bad.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await bad
    name = f"pull of {PULL_MIB} MiB beside stale READs"
    return [
        Measurement("over_fake", name, median(beside), "ms", median(alone), "alone", at_most(TIMES_ALONE), len(beside),
                    spread=spread(beside))
    ]  # fmt: skip


# ---- over TCP

OPENED: Final = 200
OPENING: Final = 0.2
TCP_PEERS: Final = 1000
SHORT: Final = 20.0
"""The factor by which a minute is shorter here, and with it all times after which idle resources end."""
RESULTS, RESULT_MIB, STORE_MIB = 8, 100, 1024


@contextlib.contextmanager
def _descriptors(wanted: int) -> Iterator[None]:
    """Raise the limit of descriptors for this process.

    Raises:
        OSError, ValueError: the system allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _until(holds: Callable[[], bool], seconds: float) -> bool:
    """Whether `holds` becomes true within that time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.01)
    return True


def _shaken(reader: Endpoint, owner: Endpoint, purpose: Purpose) -> tuple[Handshake, Handshake]:
    """Both ends of a complete handshake that no socket carries."""
    assert isinstance(reader, TcpEndpoint)
    assert isinstance(owner, TcpEndpoint)
    with socket.socket() as sock:
        left = reader._handshake(sock, purpose, accepting=False)
        right = owner._handshake(sock, Purpose.PEER, accepting=True)
    said, heard = bytearray(left.opening), bytearray()
    while left.wants or right.wants:
        for end, taken, given in ((right, said, heard), (left, heard, said)):
            if end.wants and len(taken) >= end.wants:
                message = bytes(taken[: end.wants])
                del taken[: end.wants]
                given += end.receive(message)
    return left, right


def _computed(reader: Endpoint, owner: Endpoint) -> float:
    """Milliseconds of processor time that both ends compute for a data socket: its handshake and its keys."""
    seals = [end.seals for end in _shaken(reader, owner, Purpose.PEER)]
    before = time.process_time()
    for _ in range(OPENED):
        for end, its in zip(_shaken(reader, owner, Purpose.DATA), seals, strict=True):
            if its is not None:
                DataSeal.of(its, end.transcript)
    return (time.process_time() - before) / OPENED * 1e3


async def sockets(scale: Scale) -> list[Measurement]:
    """Measure the processor time of both ends, which are in this process, for each newly opened data socket: their
    computing, and the whole time, with the system's share, the wake-up of the other end, and the thread that
    answers."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    computed: dict[bool, list[float]] = {False: [], True: []}
    for sealing in (False, True):
        with tcp_side(nbytes=MIB, sealing=sealing) as owner, tcp_side(nbytes=MIB, sealing=sealing) as reader:
            accepted: asyncio.Queue[Connection] = asyncio.Queue()
            await owner.endpoint.start(accepted.put_nowait)
            try:
                for turn in range(scale.runs + 1):
                    pairs, channels = [], []
                    for _ in range(OPENED // pull.STREAMS):
                        connection = await reader.endpoint.connect(owner.endpoint.address)
                        pairs += [connection, await accepted.get()]
                        assert isinstance(connection, TcpConnection)
                    for end in pairs:
                        end.start(Recorder())
                    before = time.process_time()
                    for end in pairs[::2]:
                        assert isinstance(end, TcpConnection)
                        channels += [await end._puller._connect() for _ in range(pull.STREAMS)]
                    spent = (time.process_time() - before) / OPENED * 1e3
                    for channel in channels:
                        channel.close()
                    for end in pairs:
                        end.abort()
                    if turn:
                        taken[sealing].append(spent)
                        computed[sealing].append(_computed(reader.endpoint, owner.endpoint))
            finally:
                await owner.endpoint.aclose()
                await reader.endpoint.aclose()
    return [
        Measurement("over_tcp", f"opening a data socket{how}, {what} of both ends", median(times[sealing]), "ms",
                    budget=budget, runs=len(times[sealing]), spread=spread(times[sealing]))
        for sealing, how in ((False, ""), (True, ", sealed"))
        for times, what, budget in (
            (computed, "computing", at_most(OPENING, "value")), (taken, "processor time", None)
        )
    ]  # fmt: skip


async def idle(scale: Scale) -> list[Measurement]:
    """Measure the leftovers of the data sockets of many peers that pulled once."""
    idle_seconds, rest = pull.IDLE, crew.REST
    pull.IDLE, crew.REST = idle_seconds / SHORT, rest / SHORT  # type: ignore[misc]
    connections: list[Connection] = []
    accepted: list[Connection] = []
    try:
        with _descriptors(6 * TCP_PEERS), tcp_side(nbytes=MIB) as owner, tcp_side(nbytes=MIB) as reader:

            def accept(connection: Connection) -> None:
                connection.start(Recorder())
                accepted.append(connection)

            await owner.endpoint.start(accept)
            try:
                for _ in range(TCP_PEERS):
                    connection = await reader.endpoint.connect(owner.endpoint.address)
                    connection.start(Recorder())
                    connections.append(connection)
                await _until(lambda: len(accepted) == TCP_PEERS, 30)
                open_before = descriptors()
                threads = set(threading.enumerate())
                for connection in connections:
                    await connection.pull(RemoteRegion(1, 0, 4096), reader.address, reader)
                pulled_at = time.monotonic()

                def left() -> tuple[int, int]:
                    data = [t for t in threading.enumerate() if t not in threads and t.name.startswith("zcactor data")]
                    return descriptors() - open_before, len(data)

                most = left()
                await _until(lambda: time.monotonic() - pulled_at >= 60 / SHORT, 60)
                sockets_left, threads_left = left()
            finally:
                for connection in connections + accepted:
                    connection.abort()
                await owner.endpoint.aclose()
                await reader.endpoint.aclose()
    finally:
        pull.IDLE, crew.REST = idle_seconds, rest  # type: ignore[misc]
    name = f"{TCP_PEERS:,} TCP peers that pulled once, a minute later"
    return [
        Measurement("over_tcp", f"{name}: data sockets of both ends", max(0, sockets_left), "", most[0], "right after",
                    exactly(0)),
        Measurement("over_tcp", f"{name}: threads", threads_left, "", most[1], "right after", exactly(0)),
    ]  # fmt: skip


async def keeping(scale: Scale) -> list[Measurement]:
    """Measure the memory that the store still uses one turn of the loop after results that came over TCP were
    dropped."""
    async with zc.init(transports=("tcp",), config=zc.Config(store_capacity=STORE_MIB * MIB)):
        process = context.current()
        keep, heap = process.config.store_keep_nbytes, process.store.heap
        maker: Any = await zc.spawn(Maker)
        held: list[Array] = [await maker.make(RESULT_MIB * MIB) for _ in range(RESULTS)]
        most = heap.used
        held.clear()
        await asyncio.sleep(0)
        used = heap.used
    name = f"{RESULTS} results of {RESULT_MIB} MiB held and dropped over TCP: used"
    return [Measurement("over_tcp", name, used / MIB, "MiB", most / MIB, "held", at_most(keep / MIB, "value"))]


# ---- threads that take turns

INTERVAL: Final = 1e-6
SWITCHING: Final = 60.0
UNDER_WAY: Final = 64
FLOATS: Final = 1024


@zc.actor
class Switcher:
    """An actor that returns arrays from its thread, while its loop sends others."""

    def set_interval(self, seconds: float) -> None:
        """Set the switch interval of its process."""
        sys.setswitchinterval(seconds)

    def make(self, number: int) -> Array:
        """Make a new array."""
        array = zc.empty(FLOATS)
        array[:] = number
        return array


async def switching(scale: Scale) -> list[Measurement]:
    """Count the connections that were lost in a minute, and the wrong bytes."""
    lost = wrong = results = 0
    interval = sys.getswitchinterval()
    async with zc.init():
        maker: Any = await zc.spawn(Switcher)
        await maker.set_interval(INTERVAL)
        sys.setswitchinterval(INTERVAL)
        sessions = set(map(id, context.current().sessions.all()))
        try:
            end = time.monotonic() + SWITCHING * min(1.0, scale.share)
            while time.monotonic() < end:
                found = await asyncio.gather(
                    *[maker.make(number) for number in range(UNDER_WAY)], return_exceptions=True
                )
                for number, array in enumerate(found):
                    if isinstance(array, BaseException):
                        lost += 1
                    else:
                        results += 1
                        wrong += int(array[0] != number or array[-1] != number)
                del found, array
        finally:
            sys.setswitchinterval(interval)
        lost += len(sessions - set(map(id, context.current().sessions.all())))
    name = f"array results for {SWITCHING:.0f} s with a switch interval of 1 us"
    return [
        Measurement("switching", f"{name}: connections lost and calls failed", lost, "", budget=exactly(0)),
        Measurement("switching", f"{name}: wrong arrays", wrong, "", budget=exactly(0)),
        Measurement("switching", f"{name}: results", results, ""),
    ]


# ---- the program

ITEMS: Final[Mapping[str, Callable[..., Any]]] = {
    "objects": objects,
    "adoption": adoption,
    "passed-on": passed_on,
    "table": table,
    "shared": shared,
    "all-to-all": all_to_all,
    "sockets": sockets,
    "idle": idle,
    "keeping": keeping,
    "switching": switching,
    "fake-calls": fake_calls,
    "ending": ending,
    "registering": registering,
    "stale": stale,
}
NEED_BASE: Final = ("fake-calls",)
QUICK: Final = Scale(5, 0.25)


def main(arguments: list[str] | None = None) -> int:
    """Measure and show.

    Returns:
        0; 1 with ``--strict`` when a budget does not hold.
    """
    parser = options_of("benchmarks.guarantees", "What has a budget, one by one.")
    parser.add_argument("items", nargs="+", metavar="ITEM", choices=list(ITEMS), help=f"which: {', '.join(ITEMS)}")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help=f"the package of the base, for {NEED_BASE[0]}")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    found: list[Measurement] = []
    for item in options.items:
        if item in NEED_BASE:
            if options.built is None:
                parser.error(f"{item} needs --built")
            part = ITEMS[item](scale, options.built)
        else:
            part = ITEMS[item](scale)
        part = zc.run(part) if inspect.iscoroutine(part) else list(part)
        show(item, part)
        found += part
    return report(options, found)


if __name__ == "__main__":
    from benchmarks import guarantees  # not as __main__, whose actors a worker would look for in vain

    sys.exit(guarantees.main())
