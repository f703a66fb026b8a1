"""A program that loads a cluster of `tests.engines.sites` without end, and counts the failures.

`tests.hosts.netns.Program` gives it the commands. Its arguments are the addresses of heads and the folder of beats.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

import zcactor as zc
from tests.cluster.far_driver import answer
from tests.engines.beats import beat_for_ever
from zcactor.process.cluster import HeadService
from zcactor.process.context import current

PAUSE = 0.02
"""Seconds between two operations of one kind at one actor."""
NUMBERS = 3
"""The numbers of a stream."""
NBYTES = 1 << 18
"""Bytes of an array that is pulled from another host."""


@zc.actor
class Beating:
    """An actor that shows at each moment that it lives."""

    def __init__(self, folder: str, name: str) -> None:
        me = zc.current_actor()
        beat_for_ever(folder, name, me.id)
        self.count = 0

    async def add(self, more: int = 1) -> int:
        self.count += more
        return self.count

    async def host(self) -> str:
        return socket.gethostname()

    async def greet(self, other: Any) -> int:
        """Call another actor."""
        found: int = await other.add(0)
        return found

    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    async def make(self, nbytes: int) -> Any:
        return np.full(nbytes // 8, 1.0)

    async def total(self, array: Any) -> float:
        return float(array.sum())


class Load:
    """Operations of all kinds between this program and actors, each again and again.

    Args:
        actors: by the host that each was placed on.
    """

    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors
        self.done: Counter[str] = Counter()
        self.failed: list[list[Any]] = []
        """The kind of each failed operation, the names of the actors of it, and the error's type and text."""
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        names = list(self._actors)
        for name, following in zip(names, [*names[1:], names[0]], strict=True):
            one, two = self._actors[name], self._actors[following]
            kinds: dict[str, tuple[list[str], Callable[..., Awaitable[None]], tuple[Any, ...]]] = {
                "call": ([name], self._call, (one,)),
                "stream": ([name], self._stream, (one,)),
                "actor to actor": ([name, following], self._greet, (one, two)),
                "array": ([name, following], self._array, (one, two)),
                "promise": ([name, following], self._promise, (one, two)),
            }
            for kind, (between, operation, given) in kinds.items():
                self._tasks.append(asyncio.create_task(self._again(kind, between, operation, given)))

    async def _again(
        self, kind: str, between: list[str], operation: Callable[..., Awaitable[None]], given: Any
    ) -> None:
        while self._going:
            begun = time.clock_gettime(time.CLOCK_BOOTTIME)
            try:
                await operation(*given)
                self.done[kind] += 1
            except zc.ZcactorError as error:
                seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - begun
                self.failed.append([kind, between, f"{type(error).__name__}: {error} ({seconds:.1f} s)"])
            await asyncio.sleep(PAUSE)

    async def _call(self, one: Any) -> None:
        await one.add()

    async def _stream(self, one: Any) -> None:
        assert [number async for number in one.numbers(NUMBERS)] == list(range(NUMBERS))

    async def _greet(self, one: Any, two: Any) -> None:
        await one.greet(two)

    async def _array(self, one: Any, two: Any) -> None:
        array = await one.make(NBYTES)
        assert await two.total(array) == NBYTES // 8

    async def _promise(self, one: Any, two: Any) -> None:
        assert await two.total(one.make(NBYTES)) == NBYTES // 8

    async def end(self) -> None:
        """Begin no further operation, and wait for those under way."""
        self._going = False
        await asyncio.gather(*self._tasks)


class Commands:
    """The commands: each method is one, and its result is the answer."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._load: Load | None = None

    async def nodes(self) -> dict[str, str]:
        """The nodes by their hosts."""
        return {node.host: node.node_id for node in await zc.nodes()}

    async def spawn(self, name: str, node: str = "spread") -> str:
        """Spawn a detached actor, which starts again elsewhere; return its host."""
        options = Beating.options(name=name, node=node, max_restarts=-1, lifetime="detached", num_cpus=0.2)
        actor = await options.spawn(self._folder, name)
        host: str = await actor.host()
        return host

    async def refused(self, name: str) -> str:
        """The error of a spawn; empty where the actor was made."""
        try:
            await self.spawn(name)
        except zc.ZcactorError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def names(self) -> list[str]:
        """The names of living actors, each as often as an actor has it."""
        return sorted(str(each.name) for each in await zc.actors() if each.name and each.state != "dead")

    async def found(self, name: str) -> list[Any]:
        """Find an actor; return its id, its host and what it has counted."""
        actor = await zc.get_actor(name)
        (actor_id,) = [each.actor_id for each in await zc.actors() if each.name == name and each.state != "dead"]
        return [actor_id, await actor.host(), await actor.add()]

    async def place(self, name: str) -> str:
        """The host of an actor; empty where it is not available now."""
        try:
            host: str = await (await zc.get_actor(name)).host()
        except (zc.ActorUnavailable, zc.ActorDied):
            return ""
        return host

    async def leader(self) -> dict[str, Any]:
        """The facts that the head tells of itself."""
        told: dict[str, Any] = await current().head.ask(HeadService.leader)
        return told

    async def load(self, names: list[str]) -> None:
        """Begin operations at the actors of these names."""
        self._load = Load({name: await zc.get_actor(name) for name in names})
        self._load.begin()

    async def operations(self) -> dict[str, int]:
        """The number of operations that have succeeded up to now, by kind."""
        assert self._load is not None
        return dict(self._load.done)

    async def failures(self) -> list[Any]:
        """The operations that have failed up to now."""
        assert self._load is not None
        return self._load.failed

    async def rest(self) -> list[Any]:
        """End the load in order; return the operations that have failed."""
        assert self._load is not None
        await self._load.end()
        return self._load.failed

    async def kill(self, names: list[str]) -> None:
        """End the actors of these names."""
        for name in names:
            await zc.kill(await zc.get_actor(name))


async def main() -> None:
    address, folder = sys.argv[1:]
    commands = Commands(folder)
    tasks = []
    async with zc.init(address, store_capacity=1 << 26):
        print(json.dumps({"id": 0, "value": None}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.append(asyncio.ensure_future(answer(commands, json.loads(line))))
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    zc.run(main())
