"""RDMA over the fake device, in one process: calls beside a base, many connections that end, the registered memory, and
a pull beside a peer that reads with stale keys."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Final

from benchmarks.harness import Measurement, Scale, at_most, spread
from benchmarks.machine import cores
from benchmarks.paired import ROOT, Side, launches
from tests.conformance.connection import Recorder
from tests.transport.verbs.parts import EAGER, SLOT, engine_on
from tests.transport.verbs.sides import Arena, device_of, engine_of, joined, verbs_side
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.verbs.driver import fake
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.peer.connection import VerbsConnection
from zcactor.transport.verbs.peer.queue_pairs import QueuePairs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conformance.connection import ConnectedPair

__all__ = ["calls", "ending", "registering", "stale"]

MIB: Final = 1 << 20
PEERS: Final = 244
ARRAYS, LEAST_MIB, MOST_MIB, ARENA_MIB = 2000, 65, 300, 1024
PULL_MIB: Final = 64
TIMES_BASE, MILLISECONDS, TIMES_ARENA, TIMES_ALONE = 1.03, 50.0, 1.1, 3.0


def calls(scale: Scale, base: Path) -> list[Measurement]:
    """Measure calls between two runtimes of one process, next to those of the base."""
    core, found = cores()[-1], []
    rounds = 16 * scale.runs
    names = {
        "async": "async call over the fake device",
        "pipelined": "call over the fake device, 1,000 in flight",
    }
    sides = [partial(Side, tree, core, {}, "paired_fake.py") for tree in (base, ROOT)]
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
                pairs = [QueuePairs(engine, EAGER) for _ in range(PEERS)]
                before = time.perf_counter()
                for one in pairs:
                    one.close()
                taken.append((time.perf_counter() - before) * 1e3)
    finally:
        fake._is_writable = writable
    name, budget = f"{PEERS} connections that end at once", at_most(MILLISECONDS, "value")
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
