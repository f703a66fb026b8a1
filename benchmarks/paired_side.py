"""One of the two sides of `benchmarks.paired`: a program that measures the zcactor that it finds on its path.

It imports nothing of this repository but the public names of zcactor, so that it runs with the package of any revision.
Lines on its standard input name the item to measure; it answers each by a line with the seconds of one call, array or
spawn.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import numpy as np

import zcactor as zc

ARRAY_NBYTES = 8 << 20


@zc.actor
class Adder:
    """An actor with one method of each kind."""

    def sync(self, a: int, b: float) -> float:
        """Add in the actor's thread."""
        return a + b

    async def coro(self, a: int, b: float) -> float:
        """Add on the actor's loop."""
        return a + b

    @zc.method(inline=True)
    def inline(self, a: int, b: float) -> float:
        """Add on the loop as soon as the call has arrived."""
        return a + b

    def first(self, array: Any) -> float:
        """The first element: proof that the array is here."""
        return float(array[0])

    def length(self, value: Any) -> int:
        """The length of the text that was passed: proof that the object is here."""
        return len(value["text"])


@zc.actor(process="shared")
class SharedAdder(Adder):
    """An actor that shares its process with many others."""


async def _calls(method: Any, count: int) -> None:
    for _ in range(count):
        await method(3, 4.5)


async def _pipelined(method: Any, count: int) -> None:
    for _ in range(count // 1000):
        await zc.get([method(3, 4.5) for _ in range(1000)])


async def _arrays(method: Any, nbytes: int, count: int) -> None:
    array = zc.ones(nbytes // 8)
    for _ in range(count):
        await method(array)


async def _objects(method: Any, nbytes: int, count: int) -> None:
    value = {"text": "x" * nbytes}
    for _ in range(count):
        await method(value)


async def _shared(count: int) -> None:
    actors: list[Any] = await asyncio.gather(*[SharedAdder.spawn() for _ in range(count)])
    await asyncio.gather(*[actor.sync(3, 4.5) for actor in actors])
    await asyncio.gather(*[zc.kill(actor) for actor in actors])


async def _spawns(count: int) -> None:
    for _ in range(count):
        await zc.kill(await zc.spawn(Adder))


async def measured(adder: Any, item: str, count: int) -> float:
    """Run `item` so often; the seconds of one call, array or spawn."""
    subjects = {
        "sync": lambda: _calls(adder.sync, count),
        "async": lambda: _calls(adder.coro, count),
        "inline": lambda: _calls(adder.inline, count),
        "pipelined": lambda: _pipelined(adder.coro, count),
        "array": lambda: _arrays(adder.first, ARRAY_NBYTES, count),
        "array-16m": lambda: _arrays(adder.first, 16 << 20, count),
        "object-20k": lambda: _objects(adder.length, 20 << 10, count),
        "object-100k": lambda: _objects(adder.length, 100 << 10, count),
        "object-1m": lambda: _objects(adder.length, 1 << 20, count),
        "shared": lambda: _shared(count),
        "shared-1000": lambda: _shared(count),
        "spawn": lambda: _spawns(count),
    }
    before = time.perf_counter()
    await subjects[item]()
    return (time.perf_counter() - before) / count


async def main() -> None:
    """Answer lines until the input ends."""
    core, tree = int(sys.argv[1]), sys.argv[2]
    os.sched_setaffinity(0, {core})
    assert zc.__file__.startswith(tree), f"{zc.__file__} does not lie in {tree}"
    async with zc.init():
        adder: Any = await zc.spawn(Adder)
        await adder.first(np.ones(8))
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            item, count = line.split()
            print(await measured(adder, item, int(count)), flush=True)


if __name__ == "__main__":
    zc.run(main())
