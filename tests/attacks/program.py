"""A program that joins a cluster and passes values to another host, for tests with an attacker in between.

It takes commands as `tests.hosts.netns.Program` gives them. Values are arrays of zeros with a mark at one place.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import zcactor as zc

NBYTES = 3 << 20
SMALL = 400_000
"""Bytes of an array that travels in one piece, and is pulled from its owner without a question before."""


def marked(mark: str, place: int, nbytes: int = NBYTES) -> Any:
    """An array with 256 copies of a mark, from `place` on."""
    array = np.zeros(nbytes, np.uint8)
    pattern = np.frombuffer(bytes.fromhex(mark) * 256, np.uint8)
    begin = min(place, nbytes - pattern.size)
    array[begin : begin + pattern.size] = pattern
    return array


def digest(array: Any) -> str:
    """A hash of all bytes of an array."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@dataclass
class Order:
    """A value that travels as a pickle."""

    text: str


@zc.actor
class Far:
    """The actor on the other host."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def received(self, array: Any) -> str:
        return digest(array)

    def made(self, mark: str, place: int, nbytes: int = NBYTES) -> Any:
        self.kept.append(marked(mark, place, nbytes))
        return self.kept[-1]

    async def items(self, mark: str, place: int) -> Any:
        yield marked(mark, place)

    def taken(self, order: Order) -> str:
        return order.text


class Commands:
    """The commands: each method is one."""

    def __init__(self) -> None:
        self.far: Any = None

    async def spawn(self) -> list[Any]:
        """Spawn the actor on the other host; return facts about the path to it."""
        there = next(node.node_id for node in await zc.nodes() if node.host != "a")
        self.far = await Far.options(node=there).spawn()
        path = await zc.explain(self.far)
        return [path.transport, path.sealed, path.integrity]

    async def _end(self, attempt: Callable[[], Awaitable[tuple[str, str]]]) -> str:
        """``"right"``, ``"changed"``, or the name of the error's type."""
        try:
            async with asyncio.timeout(20):
                got, wanted = await attempt()
        except (zc.ZcactorError, TimeoutError) as error:
            return type(error).__name__
        return "right" if got == wanted else "changed"

    async def argument(self, mark: str, place: int) -> str:
        """Pass an array."""
        array = marked(mark, place)

        async def attempt() -> tuple[str, str]:
            return await self.far.received(array), digest(array)

        return await self._end(attempt)

    async def put(self, mark: str, place: int) -> str:
        """Pass an array by `zc.put`."""
        array = marked(mark, place)

        async def attempt() -> tuple[str, str]:
            return await self.far.received(zc.put(array)), digest(array)

        return await self._end(attempt)

    async def result(self, mark: str, place: int) -> str:
        """Get an array as a result."""

        async def attempt() -> tuple[str, str]:
            return digest(await self.far.made(mark, place)), digest(marked(mark, place))

        return await self._end(attempt)

    async def item(self, mark: str, place: int) -> str:
        """Get an array as an item of a stream."""

        async def attempt() -> tuple[str, str]:
            found = [digest(item) async for item in self.far.items(mark, place)]
            return "".join(found), digest(marked(mark, place))

        return await self._end(attempt)

    async def pickle(self, mark: str) -> str:
        """Pass a pickle above the eager limit, with the mark in it."""
        text = bytes.fromhex(mark).decode("ascii") * 4000

        async def attempt() -> tuple[str, str]:
            return await self.far.taken(Order(text)), text

        return await self._end(attempt)

    async def two(self, mark: str) -> str:
        """Get two arrays of one size in turn; return the outcome of the second."""

        async def attempt() -> tuple[str, str]:
            await self.far.made(mark, 0, SMALL)
            return digest(await self.far.made("00", 0, SMALL)), digest(marked("00", 0, SMALL))

        return await self._end(attempt)


async def answer(commands: Commands, given: dict[str, Any]) -> None:
    """Run a command and print its answer."""
    number = given.pop("id")
    found = {"value": await getattr(commands, given.pop("do"))(**given)}
    print(json.dumps({"id": number, **found}), flush=True)


async def main() -> None:
    """Join, and serve commands."""
    commands = Commands()
    async with zc.init(sys.argv[1], store_capacity=1 << 28):
        while line := await asyncio.to_thread(sys.stdin.readline):
            await answer(commands, json.loads(line))


if __name__ == "__main__":
    zc.run(main())
