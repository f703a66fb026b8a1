"""Processes and actors: their start, memory, death and leftovers, and many of them in few threads.

Memory is the proportional set size: pages shared with others count once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from benchmarks.calls import SyncAdder
from benchmarks.cluster import Made
from benchmarks.floors import Echo, Forker, Server
from benchmarks.harness import Budget, Measurement, Scale, at_most, interleave, medians
from benchmarks.machine import cores, descendants, descriptors, pss, rss, threads
from tests.control.agents import FakePool, FakeProcess
from zcactor.control.actor_record import ActorRecord
from zcactor.control.head import Head
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_table import facts_of
from zcactor.ids import ProcessId
from zcactor.interface import Interface
from zcactor.options import ActorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator


# ---- starts

STARTED = 20
IMPORTS = ("pass", "import numpy, asyncio", "import zcactor")


async def _python(program: str) -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return (time.perf_counter() - before) * 1e3


async def _import(scale: Scale) -> list[Measurement]:
    times = medians(await interleave(scale.runs + 2, {program: lambda p=program: _python(p) for program in IMPORTS}))  # type: ignore[misc]
    bare, floor, ours = (times[program] for program in IMPORTS)
    limit = at_most(150, "value")
    return [
        Measurement("startup", "import zcactor", ours - bare, "ms", floor - bare, IMPORTS[1], limit, scale.runs + 2)
    ]


async def _round(forker: Forker, times: dict[str, list[float]]) -> None:
    """Time one life of a node, and next to each of its steps the step's floor."""
    began = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()

    await _python(IMPORTS[1])
    lap("init floor")
    await zc.init()
    lap("init")
    handles = [await SyncAdder.spawn()]
    lap("first")
    forker.fork(1)
    lap("first floor")
    handles += [await SyncAdder.spawn() for _ in range(STARTED - 2)]
    forker.fork(STARTED - 2)
    began = time.perf_counter()
    handles.append(await SyncAdder.spawn())
    lap("last")
    forker.fork(1)
    lap("last floor")
    for handle in handles:
        await zc.kill(handle)
    forker.kill()
    began = time.perf_counter()
    handles = await asyncio.gather(*(SyncAdder.spawn() for _ in range(STARTED)))
    lap("at once")
    forker.fork(STARTED)
    lap("at once floor")
    await zc.shutdown()
    lap("shutdown")
    forker.kill()
    lap("shutdown floor")


def measure_startup(scale: Scale) -> Iterator[Measurement]:
    """Measure several lives of a node in one process, the first of which does not count."""
    yield from zc.run(_import(scale))
    times: dict[str, list[float]] = {}
    with Forker() as forker:
        zc.run(_round(forker, {}))
        for _ in range(scale.runs):
            zc.run(_round(forker, times))
    lines: list[tuple[str, str, str, Budget | None]] = [
        ("init", "zc.init()", "a Python with NumPy", at_most(300, "value")),
        ("first", "first spawn", "fork", at_most(60, "value")),
        ("last", f"{STARTED}th spawn", "fork", at_most(60, "value")),
        ("at once", f"{STARTED} spawns at once", f"{STARTED} forks", at_most(600, "value")),
        ("shutdown", f"zc.shutdown() with {STARTED} actors", f"{STARTED} kills", None),
    ]
    for key, name, floor_name, budget in lines:
        floor = median(times[f"{key} floor"])
        yield Measurement("startup", name, median(times[key]), "ms", floor, floor_name, budget, scale.runs)


# ---- memory of idle actors

IDLE_LIMIT, SHARED_LIMIT = 30, 30
"""MB of one idle actor, and KB of one that shares its process."""
SHARED = 1000
"""Idle actors that share processes."""


async def _idle(count: int) -> tuple[float, float]:
    """MB of one actor, and of the processes that serve all of them."""
    before = set(descendants(os.getpid()))
    async with zc.init():
        handles = [await SyncAdder.spawn() for _ in range(count)]
        for handle in handles:
            await handle.add(3, 4.5)
        workers = {info.pid for info in await zc.actors()}
        others = set(descendants(os.getpid())) - before - workers
        return fmean(pss(pid) for pid in workers) / 1e6, sum(pss(pid) for pid in others) / 1e6


async def _idle_shared(count: int) -> float:
    """KB that one more actor takes which shares its process; each has been called once."""
    shared = SyncAdder.options(process="shared")
    async with zc.init():
        handles = [await shared.spawn() for _ in range(2 * len(cores()))]  # so that all processes are there

        async def look() -> int:
            await zc.get([handle.add(3, 4.5) for handle in handles])
            return sum(pss(pid) for pid in {info.pid for info in await zc.actors()})

        before = await look()
        handles += [await shared.spawn() for _ in range(count)]
        return (await look() - before) / count / 1e3


def measure_memory(scale: Scale) -> Iterator[Measurement]:
    """Measure one actor, then 20, then many that share. One look each: memory does not scatter as times do."""
    del scale
    for count in (1, 20):
        with Forker() as forker:
            floor = fmean(pss(pid) for pid in forker.fork(count)) / 1e6
        actor, others = zc.run(_idle(count))
        label = "idle actor, alone" if count == 1 else f"idle actor, one of {count}"
        yield Measurement("memory", label, actor, "MB", floor, "forked Python with NumPy", at_most(IDLE_LIMIT, "value"))
        yield Measurement("memory", f"agent and zygote, {count} {'actor' if count == 1 else 'actors'}", others, "MB")
    label = f"idle shared actor, one of {SHARED:,}"
    yield Measurement("memory", label, zc.run(_idle_shared(SHARED)), "KB", budget=at_most(SHARED_LIMIT, "value"))


# ---- deaths

DEATH_LIMIT = 20
"""Milliseconds from SIGKILL to `ActorDied`."""


@zc.actor
class Sleeper:
    """An actor that never answers one call, and always the other."""

    @zc.method
    async def sleep(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    @zc.method
    async def pid(self) -> int:
        """The pid of the process; when it returns, earlier calls have started."""
        return os.getpid()


async def _killed_actor() -> float:
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


async def _killed_echo() -> float:
    with Server("bytes") as server:
        echo = await server.connect(lambda: Echo(1))
        await echo.call()
        before = time.perf_counter()
        server.process.kill()
        await echo.closed
        return (time.perf_counter() - before) * 1e3


async def _deaths(scale: Scale) -> list[Measurement]:
    runs = 2 * scale.runs
    async with zc.init():
        times = medians(await interleave(runs, {"echo": _killed_echo, "actor": _killed_actor}, warm_up=scale.runs > 1))
    floor_name = "socket of a killed echo closes"
    return [
        Measurement(
            "death",
            "SIGKILL to ActorDied",
            times["actor"],
            "ms",
            times["echo"],
            floor_name,
            at_most(DEATH_LIMIT, "value"),
            runs,
        )
    ]


def measure_death(scale: Scale) -> Iterator[Measurement]:
    """Measure with a call in flight, whose caller waits."""
    yield from zc.run(_deaths(scale))


# ---- what is left behind

DROPPED, REFS, ROUNDS = 1000, 100_000, 3
BATCH = 1000
"""References that live at the same time."""
PATIENCE = 10
"""Seconds for processes to end and leases to come back."""

Footprint = dict[str, int]
UNITS = {"descriptors": "", "threads": "", "processes": "", "bytes in the store": "B"}


def _footprint() -> Footprint:
    gc.collect()
    processes = len(descendants(os.getpid()))
    return {
        "descriptors": descriptors(),
        "threads": threads(),
        "processes": processes,
        "bytes in the store": zc.stats().store_used,
    }


async def _settled(least: Footprint | None) -> Footprint:
    """The footprint once it is down to `least` (with None, once it has not changed for 0.5 s), at the latest after
    `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    seen, since = _footprint(), time.monotonic()
    while time.monotonic() < deadline:
        if least is not None and all(seen[name] <= least[name] for name in least):
            break
        if least is None and time.monotonic() - since > 0.5:
            break
        await asyncio.sleep(0.02)
        now = _footprint()
        if now != seen:
            seen, since = now, time.monotonic()
    return seen


async def _dropped_actors(count: int) -> float:
    """Spawn, call and drop so many actors that share a process. Returns actors per second."""
    before = time.perf_counter()
    shared = SyncAdder.options(process="shared")
    handles = await asyncio.gather(*(shared.spawn() for _ in range(count)))
    await zc.get([handle.add(3, 4.5) for handle in handles])
    del handles
    return count / (time.perf_counter() - before)


async def _dropped_refs(adder: SyncAdder, count: int) -> float:
    """Make and drop so many references: of calls, of small values, of arrays. Returns references per second."""
    array = np.ones(4096)  # 32 KiB: above the eager limit, copied into the store
    before = time.perf_counter()
    for start in range(0, count, BATCH):
        some = min(BATCH, count - start)
        calls = [adder.add(3, 4.5) for _ in range(some // 2)]
        values = [zc.put(i) for i in range(some // 4)]
        arrays = [zc.put(array.copy()) for _ in range(some - some // 2 - some // 4)]
        await zc.get([*calls, *values])
        await adder.first(arrays[0])
        del calls, values, arrays
    return count / (time.perf_counter() - before)


async def _left(scale: Scale) -> list[Measurement]:
    actors, refs = scale.count(DROPPED), scale.count(REFS, least=10)
    spawn_rates, ref_rates, left = [], [], []
    async with zc.init():
        adder = await SyncAdder.spawn()
        await _dropped_actors(10)
        await _dropped_refs(adder, 2 * BATCH)
        baseline = await _settled(None)
        resident = rss(os.getpid())
        for _ in range(ROUNDS):
            spawn_rates.append(await _dropped_actors(actors))
            ref_rates.append(await _dropped_refs(adder, refs))
            left.append(await _settled(baseline))
        grown = rss(os.getpid())
    found = [
        Measurement("leaks", f"{actors:,} shared actors, spawn to drop", median(spawn_rates), "actors/s", runs=ROUNDS),
        Measurement("leaks", f"{refs:,} references, made to dropped", median(ref_rates), "refs/s", runs=ROUNDS),
    ]
    for name, unit in UNITS.items():
        most, before = max(footprint[name] for footprint in left), baseline[name]
        label = f"{name} after each of {ROUNDS} rounds, most"
        found.append(Measurement("leaks", label, most, unit, before, "before", at_most(before, "value"), ROUNDS))
    label = f"resident memory of the driver after {ROUNDS} rounds"
    return [*found, Measurement("leaks", label, grown / 1e6, "MB", resident / 1e6, "before")]


def measure_leaks(scale: Scale) -> Iterator[Measurement]:
    """Measure descriptors, threads, processes and bytes in the store of the driver, against those before."""
    yield from zc.run(_left(scale))


# ---- many actors and idle connections

MANY: Final = 10_000
SECONDS, THREADS = 10.0, 64
BLOCKED, BLOCKED_FOR, BESIDE = 80, 6.0, 4.5
HOLDERS, NODES = 16, 2
FEW: Final = 2 * NODES + 2 * 1 + 4 * 0 + 32
"""Descriptors of a head with so many nodes, one driver and no worker of its own."""
_HOLD: Final = """
import asyncio, json, os, sys
import zcactor as zc

@zc.actor
class Holder:
    async def know(self, others):
        self.others = others
        found = [await zc.get_actor(f"h{n}") for n in range(len(others))]
        return len(found) + sum(await asyncio.gather(*[other.one() for other in others]))

    def one(self):
        return 1

async def main(address, count):
    async with zc.init(address=address):
        head, other = await zc.nodes()
        before = len(os.listdir(f"/proc/{head.pid}/fd"))
        spawns = [Holder.options(node=other.node_id, name=f"h{n}").spawn() for n in range(count)]
        holders = await asyncio.gather(*spawns)
        assert sum(await asyncio.gather(*[holder.know(holders) for holder in holders])) == 2 * count * count
        print(json.dumps((before, len(os.listdir(f"/proc/{head.pid}/fd")))))

zc.run(main(sys.argv[1], int(sys.argv[2])))
"""
"""A program with actors of another node than the head's that hold and look up each other."""
ENDED, FEWEST, MOST, ENDINGS, SLOWER = 64, 640, 64_000, 30, 1.5
PEERS, IDLE_TIMEOUT, LATER, KEPT = 8, 1.0, 6.0, 2


@zc.actor(process="shared")
class Small:
    """One of many actors in a process."""

    def one(self) -> int:
        """Return at once: a plain call."""
        return 1

    def block(self, seconds: float) -> None:
        """Hold a thread of the actors' for that long, as a method that waits for a disk does."""
        time.sleep(seconds)  # as the disk would take

    def threads(self) -> int:
        """The number of threads of the process."""
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


@zc.actor
class Peer:
    """An actor that others call."""

    def pid(self) -> int:
        """The pid of its process."""
        return os.getpid()


@zc.actor
class PeerCaller:
    """An actor that calls others."""

    async def call(self, peers: list[Any]) -> int:
        """Call all peers; the number that have answered."""
        self.peers = peers
        return len(await asyncio.gather(*[peer.pid() for peer in peers]))

    def descriptors(self) -> int:
        """The number of descriptors of its process."""
        return len(os.listdir("/proc/self/fd"))


async def many_shared() -> list[Measurement]:
    """Measure actors that are spawned and called once, and a call beside methods that block."""
    async with zc.init():
        before = time.perf_counter()
        actors: list[Any] = await asyncio.gather(*[zc.spawn(Small) for _ in range(MANY)])
        await zc.get([actor.one() for actor in actors])
        seconds = time.perf_counter() - before
        blocked = [actor.block(BLOCKED_FOR) for actor in actors[:BLOCKED]]
        before = time.perf_counter()
        await zc.get([actor.one() for actor in actors[BLOCKED : 2 * BLOCKED]])
        beside = time.perf_counter() - before
        threads = max(await zc.get([actor.threads() for actor in actors[BLOCKED : BLOCKED + 8]]))
        await zc.get(blocked)
    name = f"{MANY:,} shared actors, spawned and called once"
    others = f"{BLOCKED} other calls beside {BLOCKED} methods that block for {BLOCKED_FOR:g} s"
    return [
        Measurement("scale", name, seconds, "s", budget=at_most(SECONDS, "value")),
        Measurement("scale", others, beside, "s", budget=at_most(BESIDE, "value")),
        Measurement("scale", f"{others}: threads of a process", threads, "", budget=at_most(THREADS, "value")),
    ]  # fmt: skip


async def idle_peers() -> list[Measurement]:
    """Measure the descriptors of a process some seconds after it has called others, and whether it can call them
    again."""
    async with zc.init(config=zc.Config(idle_timeout=IDLE_TIMEOUT)):
        caller: Any = await zc.spawn(PeerCaller)
        peers: list[Any] = await asyncio.gather(*[zc.spawn(Peer) for _ in range(PEERS)])
        before: int = await caller.descriptors()
        await caller.call(peers)
        during: int = await caller.descriptors()
        await asyncio.sleep(LATER)
        after: int = await caller.descriptors()
        answered: int = await caller.call(peers)
    name = f"process that has called {PEERS} others, {LATER:g} s later with idle_timeout={IDLE_TIMEOUT:g}"
    return [
        Measurement("scale", f"{name}: descriptors beyond those before", after - before, "", during - before,
                    "right after", at_most(KEPT, "value")),
        Measurement("scale", f"{name}: calls that fail then", PEERS - answered, "", budget=at_most(0, "value")),
    ]  # fmt: skip


def heads_descriptors() -> list[Measurement]:
    """Measure the head's descriptors while actors of another node hold and look up each other."""
    with Made() as made:
        made.start_many(NODES)
        command = [sys.executable, "-c", _HOLD, made.head(), str(HOLDERS)]
        done = subprocess.run(command, env=made.environ, check=True, capture_output=True, text=True)
    before, during = json.loads(done.stdout)
    name = f"head, {HOLDERS} actors of another node that hold and look up each other: descriptors"
    return [Measurement("scale", name, during, "", before, "without them", at_most(FEW, "value"))]


def _head_of(actors: int) -> tuple[Head, list[Any]]:
    """A head with so many living actors, `ENDED` in each worker process; and the workers."""
    process: Any = FakeProcess()
    pool: Any = FakePool()
    head = Head(process, {}, pool, facts_of("h@host:1", ("local",), "machine"), {"CPU": 1.0}, MemoryLog())
    interface, workers = Interface.of(Small).wire(), []
    for first in range(0, actors, ENDED):
        worker = pool.start("Small", {}, b"d" * 16, shared=True, process=b"%016d" % first)
        for number in range(first, first + ENDED):
            actor = ActorRecord(ActorSpec("default"), "Small", interface, ProcessId(b"d" * 16), number)
            actor.worker = worker
            worker.actors[actor] = None
            head._actors.add(actor)
            actor.set_state("alive")
        workers.append(worker)
    return head, workers


def _pairs(head: Head, workers: list[Any]) -> list[tuple[Head, Any]]:
    return [(head, worker) for worker in workers]


async def ending() -> list[Measurement]:
    """Measure the head's time for the end of a process with many actors, by the number of actors in all."""
    others = np.zeros(32 << 20, np.uint8)
    # So few rounds that no head forgets actors that have died before: it remembers 2,000.
    took: dict[int, list[float]] = {FEWEST: [], MOST: []}
    head, workers = _head_of(MOST)
    small = [each for _ in range(ENDINGS * ENDED // FEWEST) for each in _pairs(*_head_of(FEWEST))]
    for each in zip(small, _pairs(head, workers[:ENDINGS]), strict=True):
        for actors, (agent, worker) in zip(took, each, strict=True):
            worker.ended.set_result("it was killed")
            others += 1  # the few would lie in the processor's caches, and no head's actors do
            before = time.perf_counter()
            agent.worker_ended(worker)
            took[actors].append(time.perf_counter() - before)
    few, many = (statistics.median(seconds) for seconds in took.values())
    name = f"head, {ENDED} of {MOST:,} actors end with their process"
    return [
        Measurement("scale", name, many, "s", few, f"{ENDED} of {FEWEST}", at_most(SLOWER)),
    ]  # fmt: skip


def measure_scale(_: Scale) -> Iterator[Measurement]:
    """Measure everything."""
    yield from zc.run(many_shared())
    yield from zc.run(idle_peers())
    yield from heads_descriptors()
    yield from zc.run(ending())
