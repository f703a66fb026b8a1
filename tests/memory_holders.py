"""Holders of arrays, in programs and in actors, and a model of the arrays that each of them has to see."""

from __future__ import annotations

import asyncio
import os
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from zcactor.process import context

__all__ = ["ASYNC", "Holder", "Model", "Root", "Slot", "pattern"]

Array = npt.NDArray[np.int64]
ASYNC = ("send", "fetch", "move", "pid", "cut", "reach")
"""Methods of `Holder` that are awaited."""


def pattern(value: int, length: int) -> Array:
    """An array in which arrays of different values differ at each place."""
    made: Array = np.arange(value, value + 7 * length, 7, dtype=np.int64)
    return made


class Tagged(np.ndarray[Any, Any]):
    """A subclass of NumPy's array, which travels inside a pickle."""


class Holder:
    """Arrays by name; a plain object in a program, elsewhere an actor."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def make(self, name: str, value: int, length: int, how: str) -> None:
        """Make an array of `pattern` in one of several ways, and keep it."""
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
        """Keep an array that was passed."""
        self.arrays[name] = array

    def same(self, array: Array) -> Array:
        """Return an array that was passed."""
        return array

    def give(self, name: str) -> Array:
        """Share an array as a result."""
        return self.arrays[name]

    def hand(self, name: str) -> Array:
        """Hand an array over as a result."""
        return zc.move(self.arrays.pop(name))

    async def send(self, name: str, other: Any, new: str) -> None:
        """Share an array with another holder."""
        await other.take(new, self.arrays[name])

    async def fetch(self, name: str, other: Any, new: str) -> None:
        """Keep an array that another holder shares."""
        self.arrays[new] = await other.give(name)

    async def move(self, name: str, other: Any, new: str) -> bool:
        """Hand an array over to another holder; where that is refused, keep it and return False."""
        array = self.arrays.pop(name)
        try:
            await other.take(new, zc.move(array))
        except ValueError:
            self.arrays[name] = array
            return False
        return True

    def part(self, name: str, new: str, start: int, step: int) -> None:
        """Keep a view of an array as well."""
        self.arrays[new] = self.arrays[name][..., start::step]

    def write(self, name: str, value: int) -> bool:
        """Add to every element; False where NumPy refuses that."""
        try:
            self.arrays[name] += value
        except ValueError:
            return False
        return True

    def drop(self, name: str) -> None:
        """Let go of an array."""
        del self.arrays[name]

    def fill(self, length: int, count: int) -> None:
        """Allocate and free memory that other arrays may have had."""
        made = [np.full(length, -0x2222222222222223, dtype=np.int64) for _ in range(count)]
        del made

    def look(self) -> dict[str, int]:
        """A checksum of each array."""
        return {name: zlib.crc32(array.tobytes()) for name, array in self.arrays.items()}

    async def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def cut(self, other: Any) -> None:
        """End the connections to another holder's process, and open the next."""
        pid = await other.pid()
        sessions = [one for one in context.current().sessions.all() if one.peer_hello and one.peer_hello.pid == pid]
        for session in sessions:
            session.connection.abort()
        await self.reach(other)

    async def reach(self, other: Any) -> None:
        """Return once a call arrives there: calls in the loop's turn in which a connection ends do not."""
        while True:
            try:
                await other.pid()
            except zc.ActorUnavailable:
                await asyncio.sleep(0)
            else:
                return


@dataclass(slots=True)
class Root:
    """The memory of one array, and whether it was shared."""

    subclass: bool
    """Whether the array is of the subclass, and so are its views."""
    shared: bool = False


@dataclass(slots=True)
class Slot:
    """The array that a holder sees under one name: a view of a root's elements."""

    root: Root
    elements: Array
    passed: bool = False
    """Whether this very array was passed or received, so that a write to it is refused."""


@dataclass(slots=True)
class Model:
    """The arrays that each holder has to see."""

    holders: dict[str, dict[str, Slot]] = field(default_factory=dict)

    def expected(self, holder: str) -> dict[str, int]:
        """The checksums that `Holder.look` has to return."""
        return {name: zlib.crc32(slot.elements.tobytes()) for name, slot in self.holders[holder].items()}
