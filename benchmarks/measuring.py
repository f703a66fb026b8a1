"""A program inside a cluster that measures: lines of its input name methods of `Commands`, whose results it prints.

`benchmarks.engines` starts it, in a run, beside nodes, or on Ray where ``RAY_ADDRESS`` is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import zcactor as zc
from zcactor.cluster import on_ray
from zcactor.cluster.drain import drain

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    import numpy as np

__all__ = ["Commands", "main"]

PAUSE: Final = 0.002
"""Seconds between two calls that are made beside what is measured."""
_NAME: Final = "known"


@zc.actor
class Near:
    """An actor that is called."""

    def one(self, number: int) -> int:
        """Return at once: a plain call."""
        return number

    def size(self, array: np.ndarray) -> int:
        """The bytes of an array, which is not read."""
        return array.nbytes


@zc.actor
class Counted:
    """An actor that leaves a line in a file when it is constructed."""

    def __init__(self, path: Path | str) -> None:
        with open(path, "a") as file:
            file.write("made\n")

    def one(self) -> int:
        """Return at once: a plain call."""
        return 1


class Calls:
    """Calls that are made one after the other, and counted.

    Attributes:
        count: calls.
        failed: those among them that raised.
        longest: seconds of the longest.
    """

    def __init__(self) -> None:
        self.count, self.failed, self.longest = 0, 0, 0.0

    async def make(self, others: list[Any]) -> None:
        """Call actors in turn until cancelled."""
        while True:
            for other in others:
                before = time.perf_counter()
                try:
                    await other.one(1)
                except zc.ZcactorError as error:
                    print(f"a call has failed: {error}", file=sys.stderr, flush=True)
                    self.failed += 1
                self.count += 1
                self.longest = max(self.longest, time.perf_counter() - before)
                await asyncio.sleep(PAUSE)

    def take(self) -> tuple[int, int, float]:
        """The figures, which begin anew."""
        found = self.count, self.failed, self.longest
        self.count, self.failed, self.longest = 0, 0, 0.0
        return found


@zc.actor
class Caller:
    """An actor that calls another one all the time."""

    async def begin(self, other: Any) -> None:
        """Begin to call `other`."""
        self._calls = Calls()
        self._calling = asyncio.create_task(self._calls.make([other]))

    async def take(self) -> tuple[int, int, float]:
        """Calls since the last time, those that failed, and seconds of the longest."""
        return self._calls.take()


class Commands:
    """The commands by their names; every result can be a line of JSON."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._array: Any = None
        self._callers: list[Any] = []
        self._counted: list[Any] = []
        self._path = os.path.abspath("made")

    async def warm(self) -> None:
        """Begin `call` and `array`, to the last node."""
        nodes = await zc.nodes()
        self._actor = await Near.options(node=nodes[-1].node_id, num_cpus=0).spawn()
        self._array = zc.ones(64 << 20, "u1")
        await self.call(100)
        await self.array(3)

    async def call(self, count: int) -> float:
        """Seconds of a call with an int, the mean of so many."""
        before = time.perf_counter()
        for _ in range(count):
            await self._actor.one(1)
        return (time.perf_counter() - before) / count

    async def array(self, count: int) -> float:
        """Seconds of a call with an array of 64 MiB, the mean of so many."""
        before = time.perf_counter()
        for _ in range(count):
            await self._actor.size(self._array)
        return (time.perf_counter() - before) / count

    async def spawn(self, count: int) -> float:
        """Seconds of so many spawns at once."""
        before = time.perf_counter()
        actors: list[Any] = await asyncio.gather(*(Near.options(num_cpus=0).spawn() for _ in range(count)))
        seconds = time.perf_counter() - before
        for each in actors:
            await zc.kill(each)
        return seconds

    async def begin_calls(self) -> None:
        """Begin calls from the first node to the second and back, and make an actor with a name."""
        nodes = [node.node_id for node in await zc.nodes()][:2]
        near = [await Near.options(node=node, num_cpus=0).spawn() for node in nodes]
        self._callers = [await Caller.options(node=node, num_cpus=0).spawn() for node in nodes]
        for caller, other in zip(self._callers, reversed(near), strict=True):
            await caller.begin(other)
        named = Counted.options(name=_NAME, lifetime="detached", num_cpus=0)
        self._counted.append(await named.spawn(self._path))

    async def take(self) -> tuple[int, int, float]:
        """The calls since the last time, those that failed, and seconds of the longest."""
        found = [await caller.take() for caller in self._callers]
        return sum(each[0] for each in found), sum(each[1] for each in found), max(each[2] for each in found)

    async def decide(self, count: int) -> float:
        """Ask the head for so many spawns, and for an actor by name; the moment at which it has done that, by the
        system's monotonic clock."""
        spawning = asyncio.gather(*(Counted.options(num_cpus=0).spawn(self._path) for _ in range(count)))
        known: Any = await zc.get_actor(_NAME)
        await known.one()
        self._counted += await spawning
        return time.monotonic()

    async def surplus(self) -> int:
        """The actors that were made and not asked for, by the lines that they have left or by the head's list."""
        listed = [each for each in await zc.actors() if each.class_name.endswith(Counted.__name__)]
        with open(self._path) as file:
            made = len(file.readlines())
        return max(made, sum(each.state != "dead" for each in listed)) - len(self._counted)

    async def drained(self, count: int) -> tuple[float, float, int, int]:
        """Spawn so many actors on the first of two nodes, and drain it.

        Returns:
            Seconds of the spawns at once, and of the drain; the calls meanwhile, and those that failed.
        """
        nodes = [node.node_id for node in await zc.nodes()]
        for node in nodes:  # which starts what the first actor of a node needs
            await zc.kill(await Near.options(node=node, num_cpus=0).spawn())
        options = Near.options(node="pack", num_cpus=0, max_restarts=-1)
        before = time.perf_counter()
        actors: list[Any] = await asyncio.gather(*(options.spawn() for _ in range(count)))
        spawned = time.perf_counter() - before
        calls = Calls()
        calling = asyncio.create_task(calls.make(actors))
        before = time.perf_counter()
        done = await drain(nodes[0])
        seconds = time.perf_counter() - before
        if done.moved != count:
            raise RuntimeError(f"{done.moved} of {count} actors have moved")
        calling.cancel()
        await asyncio.wait([calling])
        for actor in actors:
            await zc.kill(actor)
        return spawned, seconds, calls.count, calls.failed


def _joined() -> AbstractAsyncContextManager[Any]:
    return on_ray([{"CPU": 1}] * 2, timeout=300.0) if "RAY_ADDRESS" in os.environ else zc.init()


def _tell(result: Any) -> None:
    print(f"@{json.dumps(result)}", flush=True)


async def serve() -> None:
    """Do what the lines of the standard input say, until it ends."""
    async with _joined():
        commands = Commands()
        _tell("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, *arguments = json.loads(line)
            _tell(await getattr(commands, name)(*arguments))


def main() -> int:
    """Serve; the exit status."""
    with contextlib.suppress(BrokenPipeError):  # the benchmark has ended
        zc.run(serve())
    return 0


if __name__ == "__main__":
    from benchmarks import measuring  # not as __main__, whose actors a worker would look for in vain

    sys.exit(measuring.main())
