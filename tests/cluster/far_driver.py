"""A program that joins a cluster and takes commands, for tests with hosts in other network namespaces.

`tests.hosts.netns.Program` gives it the commands.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

import zcactor as zc
from tests.collectives.ranks import Rank


@zc.actor
class Keeper:
    """An actor with a state."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, array: Any) -> float:
        self.count += 1
        return float(array.sum())

    def make(self, nbytes: int) -> Any:
        return np.full(nbytes // 8, 1.0)

    def counted(self) -> int:
        return self.count

    def where(self) -> tuple[str, int]:
        current = zc.current_actor()
        return current.node, current.restarts

    async def wait(self) -> None:
        await asyncio.Event().wait()


class Commands:
    """The commands: each method is one, and its result is the answer."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.members: Any = None

    async def nodes(self) -> list[list[Any]]:
        return [[node.node_id, node.host, list(node.transports)] for node in await zc.nodes()]

    async def spawn(self, name: str, node: str, restarts: int = 0) -> None:
        options = Keeper.options(name=name, node=node, max_restarts=restarts, lifetime="detached")
        self.actors[name] = await options.spawn()

    async def find(self, name: str) -> None:
        self.actors[name] = await zc.get_actor(name)

    async def where(self, name: str) -> Any:
        return await self.actors[name].where()

    async def path(self, name: str) -> list[str]:
        path = await zc.explain(self.actors[name])
        return [path.transport, path.reason]

    async def total(self, name: str, nbytes: int) -> float:
        result: float = await self.actors[name].add(np.full(nbytes // 8, 2.0))
        return result

    async def passed(self, maker: str, reader: str, nbytes: int) -> float:
        result: float = await self.actors[reader].add(self.actors[maker].make(nbytes))
        return result

    async def failure(self, name: str) -> list[Any]:
        """Make a call that is never answered: the error's type and text, and the seconds until it came."""
        before = time.monotonic()
        try:
            await self.actors[name].wait()
        except zc.ZcactorError as error:
            return [type(error).__name__, str(error), time.monotonic() - before]
        return ["", "", 0.0]

    async def reaches(self, name: str) -> bool:
        """Whether the actor answers a call."""
        try:
            await self.actors[name].counted()
        except zc.ActorUnavailable:
            return False
        return True

    async def group(self, nodes: list[str], reproducible: Any) -> list[str]:
        """Make a group of a new actor on each node. Returns the plan for large arrays."""
        actors = [await Rank.options(node=node, num_cpus=0).spawn() for node in nodes]
        self.members = await zc.group(actors, reproducible=reproducible)
        return [(await self.members.explain(1 << 24)).plan]

    async def sums(self, count: int, elements: int, plan: str) -> list[int]:
        """Reduce float32 arrays, made by the members, as often as said. Returns the number of right results of each."""
        calls = [actor.many(self.members, count, elements, plan) for actor in self.members.actors]
        found: list[int] = await zc.get(calls)
        return found

    async def stats(self) -> dict[str, int]:
        stats = zc.stats()
        return {name: getattr(stats, name) for name in ("bytes_copied", "bytes_received", "bytes_mapped")}


async def answer(commands: Any, given: dict[str, Any]) -> None:
    number = given.pop("id")
    try:
        found = {"value": await getattr(commands, given.pop("do"))(**given)}
    except (zc.ZcactorError, ValueError, TypeError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": number, **found}), flush=True)


async def main(commands: Any) -> None:
    """Join a cluster, and answer commands until there are no more."""
    tasks = []
    async with zc.init(sys.argv[1], store_capacity=1 << 28):
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.append(asyncio.ensure_future(answer(commands, json.loads(line))))
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    zc.run(main(Commands()))
