"""Many actors in few threads, and idle connections."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import zcactor as zc
from benchmarks.cluster import Made
from benchmarks.harness import Measurement, Scale, at_most
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

__all__ = ["ending", "heads_descriptors", "idle_peers", "measure", "shared"]

ACTORS: Final = 10_000
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
ENDED, FEWEST, MOST, ROUNDS, SLOWER = 64, 640, 64_000, 30, 1.5
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
class Caller:
    """An actor that calls others."""

    async def call(self, peers: list[Any]) -> int:
        """Call all peers; the number that have answered."""
        self.peers = peers
        return len(await asyncio.gather(*[peer.pid() for peer in peers]))

    def descriptors(self) -> int:
        """The number of descriptors of its process."""
        return len(os.listdir("/proc/self/fd"))


async def shared() -> list[Measurement]:
    """Measure actors that are spawned and called once, and a call beside methods that block."""
    async with zc.init():
        before = time.perf_counter()
        actors: list[Any] = await asyncio.gather(*[zc.spawn(Small) for _ in range(ACTORS)])
        await zc.get([actor.one() for actor in actors])
        seconds = time.perf_counter() - before
        blocked = [actor.block(BLOCKED_FOR) for actor in actors[:BLOCKED]]
        before = time.perf_counter()
        await zc.get([actor.one() for actor in actors[BLOCKED : 2 * BLOCKED]])
        beside = time.perf_counter() - before
        threads = max(await zc.get([actor.threads() for actor in actors[BLOCKED : BLOCKED + 8]]))
        await zc.get(blocked)
    name = f"{ACTORS:,} shared actors, spawned and called once"
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
        caller: Any = await zc.spawn(Caller)
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
    small = [each for _ in range(ROUNDS * ENDED // FEWEST) for each in _pairs(*_head_of(FEWEST))]
    for each in zip(small, _pairs(head, workers[:ROUNDS]), strict=True):
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


def measure(_: Scale) -> Iterator[Measurement]:
    """Measure everything."""
    yield from zc.run(shared())
    yield from zc.run(idle_peers())
    yield from heads_descriptors()
    yield from zc.run(ending())
