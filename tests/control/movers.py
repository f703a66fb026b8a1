"""An actor that moves from node to node, in a module that workers can import without importing a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import zcactor as zc

__all__ = ["Tally"]


@zc.actor(concurrency_groups={"control": 64})
class Tally:
    """An actor that counts calls, and writes them and its ends to a file.

    Args:
        path: of the file; empty for none.
        failing: a file whose presence makes the constructor raise.
    """

    closed: ClassVar[list[str]] = []
    """The names of those that were closed in this process."""
    entering: ClassVar[list[int]] = []
    """The numbers of those in construction in this process, at the beginning of each."""
    now: ClassVar[int] = 0

    def __init__(self, name: str = "", path: str = "", failing: str = "") -> None:
        self.name, self.path = name, path
        self.entries: list[Any] = []
        self.opened = asyncio.Event()
        if failing and Path(failing).exists():
            raise ValueError("not here")

    async def __aenter__(self) -> None:
        Tally.now += 1
        Tally.entering.append(Tally.now)
        await asyncio.sleep(0.01)
        Tally.now -= 1

    def add(self, entry: Any) -> Any:
        self.entries.append(entry)
        self._write(entry)
        return entry

    async def aadd(self, entry: Any, *, more: Any = None) -> Any:
        self.entries.append(entry)
        return entry if more is None else [entry, more]

    @zc.method(inline=True)
    def iadd(self, entry: Any) -> Any:
        self.entries.append(entry)
        return entry

    async def all(self) -> list[Any]:
        return self.entries

    async def total(self, array: Any) -> float:
        return float(array.sum())

    async def writes(self, array: np.ndarray) -> float:
        """Write to an array that was handed over."""
        array += 1
        return float(array.sum())

    def make(self, count: int) -> Any:
        return np.ones(count)

    async def items(self, count: int) -> AsyncIterator[int]:
        for item in range(count):
            yield item

    async def hold(self, entry: Any) -> Any:
        """Wait for `open`."""
        self.entries.append(f"{entry} began")
        await self.opened.wait()
        return entry

    @zc.method(concurrency_group="control")
    async def began(self, entry: Any) -> None:
        """Return once `hold` has begun."""
        while f"{entry} began" not in self.entries:
            await asyncio.sleep(0.005)

    @zc.method(concurrency_group="control")
    async def open(self) -> None:
        self.opened.set()

    async def ask_back(self, other: Any, me: Any, entry: Any) -> Any:
        """Have another actor call this one, and wait for that."""
        return await other.call(me, entry)

    async def call(self, other: Any, entry: Any) -> Any:
        return await other.aadd(entry)

    async def node(self) -> str:
        return zc.current_actor().node

    async def restarts(self) -> int:
        return zc.current_actor().restarts

    async def __aexit__(self, *_: object) -> None:
        Tally.closed.append(self.name)
        self._write("closed")

    def _write(self, entry: Any) -> None:
        if self.path:
            with open(self.path, "a") as file:
                file.write(f"{entry}\n")
