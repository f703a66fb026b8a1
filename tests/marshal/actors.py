"""Actors that the end-to-end tests talk to; in a module of their own, so that workers import little."""

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
    """Keeps what it is given."""

    def __init__(self, first: Any = None) -> None:
        self.kept: Any = first

    def ping(self) -> None:
        """Does nothing: what was sent before has arrived when it returns."""

    def keep(self, value: Any) -> tuple[bool, int]:
        """Keep `value`; returns whether it can be written to, and its address."""
        self.kept = value
        return value.flags.writeable, value.ctypes.data

    def drop(self) -> None:
        """Forget it."""
        self.kept = None

    def narrow(self) -> None:
        """Keep a view of a part of it only."""
        self.kept = self.kept[3:5]

    def echo(self, value: Any) -> Any:
        """Give an argument back."""
        return value

    def get(self) -> Any:
        """What is kept, shared."""
        return self.kept

    def give(self) -> Any:
        """What is kept, handed over."""
        value, self.kept = self.kept, None
        return zc.move(value)

    def give_twice(self) -> Any:
        """Tries to hand over what was shared."""
        return zc.move(self.kept)

    def first(self) -> float:
        """The first element."""
        return float(self.kept.reshape(-1)[0])

    def fill(self, value: float) -> None:
        """Write to what is kept."""
        self.kept[...] = value

    def write_to(self, array: Any) -> None:
        """Write to an argument."""
        array[...] = 1

    def make_writable(self, array: Any) -> None:
        """Try to get write access to an argument."""
        array.flags.writeable = True

    def copy_and_write(self, array: Any) -> float:
        """How to write to a received array."""
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
        """Give an argument to another actor."""
        return await other.keep(array)

    async def move_on(self, other: Any) -> Any:
        """Hand what is kept over to another actor."""
        value, self.kept = self.kept, None
        return await other.keep(zc.move(value))

    async def stream(self, count: int) -> AsyncIterator[Any]:
        """Arrays of the store, shared."""
        for index in range(count):
            yield zc.full(10_000, float(index))

    def describe(self, value: Any) -> tuple[str, Any]:
        """Type and value of a list of arrays: how many, the sum of the first elements."""
        return type(value).__name__, (len(value), sum(float(array[0]) for array in value))

    def copies(self) -> dict[str, int]:
        """Bytes copied in this process, by reason."""
        return {reason: count.nbytes for reason, count in zc.stats().copies.items()}

    def fail(self) -> None:
        """Raises the program's own exception."""
        raise MyError("mine", 5)

    def huge(self, nbytes: int) -> Any:
        """A result of that size."""
        return np.zeros(nbytes, np.uint8)


@zc.actor
class Doubler:
    """Writes to what it is given, and may not live to tell."""

    @zc.method(idempotent=True)
    def double(self, value: Any, runs: Path, deaths: int) -> list[float]:
        """The sums of the arrays as they came, doubled then. Each run is noted in a file; the first `deaths` die."""
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
    """Writes to what it is constructed of."""

    def __init__(self, first: Any, rest: Any) -> None:
        arrays = [first, *rest["pickled"][0]]
        self.sums = [float(array.sum()) for array in arrays]
        for array in arrays:
            array *= 2

    def as_they_came(self) -> tuple[list[float], int]:
        """The sums of the arrays before anything was written, and how often one was copied for that."""
        copied = zc.stats().copies.get("moved argument of a retried call")
        return self.sums, 0 if copied is None else copied.count

    def die(self) -> None:
        """End the process."""
        os._exit(1)
