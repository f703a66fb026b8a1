"""An actor that keeps what it gets, and writes to arrays that it has passed, for the tests of check mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import zcactor as zc

__all__ = ["COUNT", "Spoiler"]

COUNT = 100_000
"""Elements of an array of float64 that goes by reference."""


@zc.actor
class Spoiler:
    """Keep arrays, make arrays, and write to them by views that are older than their passing."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.made = np.zeros(COUNT)
        self.view = self.made[10:20]

    def keep(self, *values: Any) -> float:
        """Keep what was passed. Returns the sum of the first array."""
        self.kept += values
        return float(np.asarray(values[0]).sum())

    def drop(self) -> None:
        """Drop what was kept."""
        self.kept.clear()

    def give(self) -> Any:
        """Pass the array as a result."""
        return self.made

    def spoil(self) -> None:
        """Write to the array by the view."""
        self.view[0] += 1

    async def hand_on(self, other: Any) -> float:
        """Pass the array to another actor, by an argument."""
        return float(await other.keep(self.made))

    async def spoil_sent(self, other: Any) -> None:
        """Pass the array to another actor, and write to it before that actor can have read it."""
        await other.drop()  # connected, so that the call is sent at once
        sent = other.keep(self.made)
        self.view[0] += 1
        await sent
        await other.drop()

    def items(self) -> Iterator[Any]:
        """Three arrays, each made anew."""
        for value in range(3):
            yield np.full(COUNT, float(value))

    def fill(self, array: Any) -> Any:
        """Write to an array that was moved here, and move it back."""
        array[:] = 7
        return zc.move(array)

    def double(self, array: Any) -> Any:
        """A new array."""
        return array * 2

    async def summed(self, group: Any, rank: int) -> float:
        """Sum over a group, several times: whole arrays, results that are passed again, and one output."""
        given = np.full(COUNT, rank + 1.0)
        out = np.empty(COUNT)
        for _ in range(3):
            total = await group.allreduce(given)
            given += 1
            await group.allreduce(total, out=out)
            await group.broadcast(total if rank == 0 else None, root=0)
        return float(out[0])
