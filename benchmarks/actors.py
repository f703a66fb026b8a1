"""The actors that the benchmarks call."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc
from zcactor.rpc.codec import frame_size

__all__ = ["ADDERS", "AsyncAdder", "Caller", "InlineAdder", "Keeper", "Sleeper", "SyncAdder", "frame_nbytes"]

Array = npt.NDArray[np.float64]


@zc.actor
class SyncAdder:
    """An actor with a sync method, which runs in the actor's thread."""

    @zc.method
    def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b

    @zc.method
    def first(self, array: Array) -> float:
        """The first element: proof that the array is here, at no further cost."""
        return float(array[0])


@zc.actor
class AsyncAdder:
    """An actor with a coroutine method, which runs on the actor's loop, as a task."""

    @zc.method
    async def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b


@zc.actor
class InlineAdder:
    """An actor with an inline method, which runs on the actor's loop as soon as the call has arrived."""

    @zc.method(inline=True)
    def add(self, a: int, b: float) -> float:
        """The sum."""
        return a + b


ADDERS: dict[str, Any] = {"sync": SyncAdder, "async": AsyncAdder, "inline": InlineAdder}
"""The actors by the kind of their method."""


@zc.actor
class Caller:
    """An actor that calls others."""

    @zc.method
    async def drive(self, adders: list[Any], calls: int, in_flight: int) -> None:
        """Call ``add`` of each actor in turn, `calls` times in all, `in_flight` at a time."""
        for start in range(0, calls, in_flight):
            stop = min(start + in_flight, calls)
            await zc.get([adders[i % len(adders)].add(3, 4.5) for i in range(start, stop)])


@zc.actor
class Keeper:
    """An actor that keeps an array born in the store."""

    def __init__(self, length: int) -> None:
        self.array = zc.ones(length)

    @zc.method
    def kept(self) -> Array:
        """The array."""
        return self.array

    @zc.method
    def nothing(self) -> None:
        """Return a result of no size."""


@zc.actor
class Sleeper:
    """An actor that never answers one call, and always the other."""

    @zc.method
    async def sleep(self) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    @zc.method
    async def pid(self) -> int:
        """The pid of the process; when it returns, earlier calls have started."""
        return os.getpid()


async def frame_nbytes(adder: Any) -> int:
    """Bytes of the frame in which a call of ``add(3, 4.5)`` travels."""
    await adder.add(3, 4.5)
    before = zc.stats()
    for _ in range(8):
        await adder.add(3, 4.5)
    after = zc.stats()
    return frame_size(0, 0, (after.bytes_eager - before.bytes_eager) // (after.calls - before.calls))
