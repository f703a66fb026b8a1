"""Actors that the end-to-end tests talk to, in a module of their own, so that workers import little."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import zcactor as zc


class MyError(Exception):
    """An exception of the program's own."""


@zc.actor
class Keeper:
    """An actor that keeps a value."""

    def __init__(self, first: Any = None) -> None:
        self.kept: Any = first

    def ping(self) -> None:
        """Return at once: messages that were sent before the call have arrived by then."""

    def keep(self, value: Any) -> tuple[bool, int]:
        """Keep `value`; return whether it is writable, and its address."""
        self.kept = value
        return value.flags.writeable, value.ctypes.data

    def drop(self) -> None:
        """Forget the kept value."""
        self.kept = None

    def narrow(self) -> None:
        """Keep only a view of a part of the kept array."""
        self.kept = self.kept[3:5]

    def echo(self, value: Any) -> Any:
        """Give an argument back."""
        return value

    def get(self) -> Any:
        """Share the kept value."""
        return self.kept

    def give(self) -> Any:
        """Hand the kept value over."""
        value, self.kept = self.kept, None
        return zc.move(value)

    def give_twice(self) -> Any:
        """Try to hand over an array that was shared."""
        return zc.move(self.kept)

    def first(self) -> float:
        """The first element of the kept array."""
        return float(self.kept.reshape(-1)[0])

    def fill(self, value: float) -> None:
        """Write to the kept array."""
        self.kept[...] = value

    def write_to(self, array: Any) -> None:
        """Write to an argument."""
        array[...] = 1

    def make_writable(self, array: Any) -> None:
        """Try to get write access to an argument."""
        array.flags.writeable = True

    def copy_and_write(self, array: Any) -> float:
        """Write to a copy of a received array, as programs do."""
        copied = array.copy()
        copied += 1
        return float(copied[0])

    def make(self, count: int, value: float) -> Any:
        """A new array, outside the store."""
        return np.full(count, value)

    def new(self, count: int, value: float) -> Any:
        """A new array in the store, handed over."""
        return zc.move(zc.full(count, value))

    def items(self, count: int) -> Iterator[Any]:
        """New arrays, handed over one by one."""
        for index in range(count):
            yield zc.move(zc.full(10_000, float(index)))

    async def pass_on(self, other: Any, array: Any) -> Any:
        """Pass an argument to another actor."""
        return await other.keep(array)

    async def move_on(self, other: Any) -> Any:
        """Hand the kept array over to another actor."""
        value, self.kept = self.kept, None
        return await other.keep(zc.move(value))

    async def stream(self, count: int) -> AsyncIterator[Any]:
        """Yield arrays of the store, shared."""
        for index in range(count):
            yield zc.full(10_000, float(index))

    def describe(self, value: Any) -> tuple[str, Any]:
        """The type of a list of arrays, their number, and the sum of their first elements."""
        return type(value).__name__, (len(value), sum(float(array[0]) for array in value))

    def copies(self) -> dict[str, int]:
        """Bytes copied in this process, by reason."""
        return {reason: count.nbytes for reason, count in zc.stats().copies.items()}

    def fail(self) -> None:
        """Raise the program's own exception."""
        raise MyError("mine", 5)

    def huge(self, nbytes: int) -> Any:
        """A result of `nbytes` bytes."""
        return np.zeros(nbytes, np.uint8)


@zc.actor
class Doubler:
    """An actor that writes to its arguments, and may die before it answers."""

    @zc.method(idempotent=True)
    def double(self, value: Any, runs: Path, deaths: int) -> list[float]:
        """Return the sums of the arrays as they came, and double the arrays.

        Each run is noted in a file; the first `deaths` runs end the process.
        """
        first, rest = value
        arrays = [first, *rest["pickled"][0]]
        sums = [float(array.sum()) for array in arrays]
        for array in arrays:
            array *= 2
        with runs.open("ab") as file:
            file.write(b".")
        if runs.stat().st_size <= deaths:
            os._exit(1)
        return sums


@zc.actor
class Scaled:
    """An actor that writes to the arguments of its constructor."""

    def __init__(self, first: Any, rest: Any) -> None:
        arrays = [first, *rest["pickled"][0]]
        self.sums = [float(array.sum()) for array in arrays]
        for array in arrays:
            array *= 2

    def as_they_came(self) -> tuple[list[float], int]:
        """The sums of the arrays before the writes, and the number of copies that were made for the writes."""
        copied = zc.stats().copies.get("moved argument of a retried call")
        return self.sums, 0 if copied is None else copied.count

    def die(self) -> None:
        """End the process."""
        os._exit(1)
