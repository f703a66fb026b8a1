"""A program that joins a cluster and does what it is told, for tests whose hosts are elsewhere: see
`tests.hosts.netns.Program`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

import zcactor as zc


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
    """Each method is one; what it returns is the answer."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}

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
        """How a call ends that nobody answers, and after how many seconds."""
        before = time.monotonic()
        try:
            await self.actors[name].wait()
        except zc.ZcactorError as error:
            return [type(error).__name__, str(error), time.monotonic() - before]
        return ["", "", 0.0]

    async def reaches(self, name: str) -> bool:
        """Whether a call is answered."""
        try:
            await self.actors[name].counted()
        except zc.ActorUnavailable:
            return False
        return True

    async def stats(self) -> dict[str, int]:
        stats = zc.stats()
        return {name: getattr(stats, name) for name in ("bytes_copied", "bytes_received", "bytes_mapped")}


async def answer(commands: Commands, given: dict[str, Any]) -> None:
    number = given.pop("id")
    try:
        found = {"value": await getattr(commands, given.pop("do"))(**given)}
    except (zc.ZcactorError, ValueError, TypeError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": number, **found}), flush=True)


async def main() -> None:
    commands = Commands()
    tasks = []
    async with zc.init(sys.argv[1], store_capacity=1 << 28):
        while line := await asyncio.to_thread(sys.stdin.readline):
            tasks.append(asyncio.ensure_future(answer(commands, json.loads(line))))
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    zc.run(main())
