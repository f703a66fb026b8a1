"""A program that joins a cluster and passes arrays on fake GPUs between its hosts, by commands.

`tests.hosts.netns.Program` gives it the commands.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zcactor as zc
from tests.actors_gpu import Gpus
from tests.cluster.far_driver import main
from zcactor.device.staging import PIECE_NBYTES, PIECES
from zcactor.process.context import current

HOST = "through host memory"


def _copies(stats: zc.Stats) -> list[int]:
    found = stats.copies.get(HOST)
    return [0, 0] if found is None else [found.count, found.nbytes]


class Commands:
    """The commands: each method is one, and its result is the answer."""

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}
        self.calls: dict[str, asyncio.Future[Any]] = {}

    async def nodes(self) -> list[str]:
        return [node.node_id for node in await zc.nodes()]

    async def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in zc.gpu.gpus()]

    async def spawn(self, name: str, node: str) -> None:
        self.actors[name] = await Gpus.options(node=node).spawn()

    async def path(self, name: str) -> list[Any]:
        path = (await zc.explain(self.actors[name])).device
        assert path is not None
        return [path.path, path.proven, path.rejected]

    async def full(self, array: str, nbytes: int, value: int) -> None:
        """Make an array here."""
        self.arrays[array] = zc.full(nbytes, value, "u1", device="cuda")

    async def made(self, maker: str, array: str, nbytes: int, value: int) -> list[Any]:
        """Take an array that an actor makes. Returns its type, its GPU and whether it is read-only."""
        x = self.arrays[array] = await self.actors[maker].full(nbytes, value)
        return [type(x).__name__, x.uuid, x.readonly]

    async def sum(self, array: str) -> int:
        """The sum of an array that this process has."""
        found: int = zc.gpu.to_host(self.arrays[array]).sum(dtype="u8").item()
        return found

    async def total(self, reader: str, array: str) -> list[Any]:
        """The type of an array at an actor, and its sum."""
        return list(await self.actors[reader].total(self.arrays[array]))

    async def passed(self, maker: str, reader: str, nbytes: int, value: int) -> list[Any]:
        """Pass an array from one actor to another."""
        return list(await self.actors[reader].total(self.actors[maker].full(nbytes, value)))

    async def drop(self, array: str) -> None:
        del self.arrays[array]

    async def hold(self, name: str) -> None:
        """Hold back an actor's copies of pieces."""
        await self.actors[name].hold_pieces()

    async def let_go(self, name: str) -> None:
        await self.actors[name].let_go()

    async def begin(self, maker: str, reader: str, nbytes: int, value: int) -> None:
        """Begin to pass an array from one actor to another."""
        self.calls[reader] = asyncio.ensure_future(self.passed(maker, reader, nbytes, value))

    async def ended(self, reader: str) -> str:
        """The error of a call that was begun."""
        try:
            await self.calls.pop(reader)
        except zc.ZcactorError as error:
            return type(error).__name__
        return ""

    async def under_way(self, name: str) -> bool:
        """Whether an actor has as many pieces on their way as may be."""
        return bool((await self.actors[name].arena())[2] == PIECES * PIECE_NBYTES)

    async def kill(self, name: str) -> None:
        await zc.kill(self.actors.pop(name))

    async def copies(self, name: str = "") -> list[int]:
        """The arrays, and their bytes, that a process copied through host memory; here or at an actor."""
        return _copies(await self.actors[name].stats() if name else zc.stats())

    async def idle(self, name: str = "") -> bool:
        """Whether a process uses no GPU memory, has nobody's lease, and has all pieces back."""
        if name:
            stats, used = await self.actors[name].stats(), (await self.actors[name].arena())[2]
        else:
            process: Any = current()
            pieces = process.resolver.devices.pieces
            stats, used = zc.stats(), pieces.nbytes - pieces.idle_nbytes
        return bool(stats.device_used == stats.leases == used == 0)


if __name__ == "__main__":
    zc.run(main(Commands()))
