"""Holders of arrays, in programs and in actors, and the model of what each of them has to see."""

from __future__ import annotations

import asyncio
import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from zcactor import context

__all__ = ["ASYNC", "Holder", "Model", "Root", "Slot", "pattern"]

Array = npt.NDArray[np.int64]
ASYNC = ("send", "fetch", "move", "pid", "cut", "reach")
"""Methods of `Holder` that are awaited."""


def pattern(value: int, length: int) -> Array:
    """Elements that tell arrays of different values apart at each place."""
    made: Array = np.arange(value, value + 7 * length, 7, dtype=np.int64)
    return made


class Tagged(np.ndarray[Any, Any]):
    """A subclass, which travels inside a pickle."""


class Holder:
    """Arrays by name; in a program a plain object, elsewhere an actor."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def make(self, name: str, value: int, length: int, how: str) -> None:
        """Have an array of `pattern` that was made in one of several ways."""
        if how == "store":
            made: Array = zc.empty(length, dtype=np.int64)
            made[:] = pattern(value, length)
        elif how == "malloc":
            with zc.numpy_allocator(False):
                made = pattern(value, length)
        elif how == "reshaped":
            made = pattern(value, length // 2 * 2).reshape(2, -1)
        elif how == "subclass":
            made = pattern(value, length).view(Tagged)
        else:
            made = pattern(value, length)
        self.arrays[name] = made

    def take(self, name: str, array: Array) -> None:
        """Keep what was passed."""
        self.arrays[name] = array

    def same(self, array: Array) -> Array:
        """What was passed."""
        return array

    def give(self, name: str) -> Array:
        """Share it as a result."""
        return self.arrays[name]

    def hand(self, name: str) -> Array:
        """Hand it over as a result."""
        return zc.move(self.arrays.pop(name))

    async def send(self, name: str, other: Any, new: str) -> None:
        """Share it with another holder."""
        await other.take(new, self.arrays[name])

    async def fetch(self, name: str, other: Any, new: str) -> None:
        """Keep what another holder shares."""
        self.arrays[new] = await other.give(name)

    async def move(self, name: str, other: Any, new: str) -> bool:
        """Hand it over to another holder; False where that is refused, and then it stays."""
        array = self.arrays.pop(name)
        try:
            await other.take(new, zc.move(array))
        except ValueError:
            self.arrays[name] = array
            return False
        return True

    def part(self, name: str, new: str, start: int, step: int) -> None:
        """Keep a view of it as well."""
        self.arrays[new] = self.arrays[name][..., start::step]

    def write(self, name: str, value: int) -> bool:
        """Add to every element; False where NumPy refuses that."""
        try:
            self.arrays[name] += value
        except ValueError:
            return False
        return True

    def drop(self, name: str) -> None:
        """Let go of it."""
        del self.arrays[name]

    def fill(self, length: int, count: int) -> None:
        """Take and give back memory that others may have had."""
        made = [np.full(length, -0x2222222222222223, dtype=np.int64) for _ in range(count)]
        del made

    def look(self) -> dict[str, int]:
        """A checksum of each."""
        return {name: zlib.crc32(array.tobytes()) for name, array in self.arrays.items()}

    async def pid(self) -> int:
        """The process."""
        return os.getpid()

    async def cut(self, other: Any) -> None:
        """End the connections to another holder's process, and open the next."""
        pid = await other.pid()
        sessions = [one for one in context.current().sessions.all() if one.peer_hello and one.peer_hello.pid == pid]
        for session in sessions:
            session.connection.abort()
        await self.reach(other)

    async def reach(self, other: Any) -> None:
        """Return when calls arrive there: those in the turn in which a connection ends do not."""
        while True:
            try:
                await other.pid()
            except zc.ActorUnavailable:
                await asyncio.sleep(0)
            else:
                return


@dataclass(slots=True)
class Root:
    """Memory of one array, and whether it was shared."""

    subclass: bool
    """Whether views of it are of a class of their own."""
    shared: bool = False


@dataclass(slots=True)
class Slot:
    """What a holder sees under one name: a view of a root's elements."""

    root: Root
    elements: Array
    passed: bool = False
    """This very array was passed or received, so that a write to it is refused."""


@dataclass(slots=True)
class Model:
    """What each holder has to see."""

    holders: dict[str, dict[str, Slot]] = field(default_factory=dict)

    def expected(self, holder: str) -> dict[str, int]:
        """As `Holder.look` tells it."""
        return {name: zlib.crc32(slot.elements.tobytes()) for name, slot in self.holders[holder].items()}
