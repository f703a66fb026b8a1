"""Actors of the programs that run in a guest.

They are apart from the tests, because each actor's process imports this module, and imports take seconds there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import zcactor as zc

Array = npt.NDArray[Any]
MIB = 1 << 20
ROWS = MIB // 8
"""Elements of a MiB."""


def checksum(array: Array) -> int:
    """A checksum of every word and, for a sample of words, of their places."""
    words = array.view(np.uint64)
    sample = words[::4099]
    return (int(words.sum()) + int((sample * np.arange(1, len(sample) + 1, dtype=np.uint64)).sum())) % (1 << 64)


@dataclass
class Batch:
    """A value with arrays in it."""

    name: str
    inputs: Array
    labels: list[Array]


@zc.actor
class Shard:
    """The actor of a whole program, and a few methods more."""

    def __init__(self, rows: int = ROWS) -> None:
        self.weights = np.zeros(rows)
        self.cancelled = asyncio.Event()

    def push(self, grad: Array) -> float:
        self.weights -= 0.1 * grad
        return float(np.abs(grad).max())

    async def weights_now(self) -> Array:
        return self.weights.copy()

    async def batches(self, n: int) -> AsyncIterator[Array]:
        for i in range(n):
            yield np.full(ROWS, float(i))

    def made(self, nbytes: int, value: int) -> zc.gpu.DeviceArray:
        return zc.full(nbytes, value, "u1", device="cuda")

    def total(self, array: zc.gpu.DeviceArray) -> tuple[str, int]:
        return type(array).__name__, int(zc.gpu.to_host(array).sum(dtype="u8"))

    async def keep(self, array: Array) -> Array:
        self.weights = array
        return array

    def words(self, nbytes: int) -> Array:
        array = np.arange(nbytes // 8, dtype=np.uint64)
        array *= np.uint64(0x9E3779B97F4A7C15)
        self.sum = checksum(array)
        return array

    async def reduced(self, group: zc.Group, nbytes: int) -> float:
        """The sum of all elements after a reduction of ones over the group."""
        total = await group.allreduce(np.ones(nbytes, np.uint8))
        return float(total.sum(dtype=np.float64))

    async def sum_of(self, array: Array) -> int:
        return checksum(array)

    async def sum_of_words(self) -> int:
        return self.sum

    def scale(self, array: Array, factor: float) -> Array:
        array *= factor
        return zc.move(array)

    def batch(self, batch: Batch) -> Batch:
        return Batch(batch.name + "!", batch.inputs + 1, [label * 2 for label in batch.labels])

    async def nested(self, refs: dict[str, Any]) -> float:
        return float((await refs["x"])[0])

    def fail(self, text: str) -> None:
        raise ValueError(text)

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def was_cancelled(self) -> bool:
        return await self.cancelled.wait()

    async def pid(self) -> int:
        return os.getpid()

    async def restarts(self) -> int:
        return zc.current_actor().restarts
