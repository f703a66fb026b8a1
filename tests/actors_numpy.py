"""An actor that computes with NumPy, for tests of the arrays that it and its driver allocate and share."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.marshal.arrays import root_of

__all__ = ["COUNT", "MIB", "Computer", "computer", "copied", "library"]

COUNT = 50_000
"""Elements of an array of float64 that is large enough for the store."""
MIB = 1 << 20


def library(name: str) -> ModuleType:
    """Import the module, or skip the test with the name of the missing package."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}")  # type: ignore[no-any-return]


@zc.actor
class Computer:
    """Add arrays in every kind of method. Each result comes with whether it lies in this process's store."""

    def __init__(self) -> None:
        self.first = np.arange(COUNT) * 2.0
        self.kept: list[Any] = []

    def sync(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Add in the actor's thread."""
        result = a + b
        return zc.in_store(result), result

    async def awaiting(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Add on the loop, after an await."""
        await asyncio.sleep(0)
        result = a + b
        return zc.in_store(result), result

    @zc.method(inline=True)
    def inline(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Add on the loop."""
        result = a + b
        return zc.in_store(result), result

    def items(self, a: Any, b: Any) -> Iterator[tuple[bool, Any]]:
        """Yield three sums from the actor's thread."""
        for _ in range(3):
            result = a + b
            yield zc.in_store(result), result

    async def aitems(self, a: Any, b: Any) -> AsyncIterator[tuple[bool, Any]]:
        """Yield three sums from the loop."""
        for _ in range(3):
            await asyncio.sleep(0)
            result = a + b
            yield zc.in_store(result), result

    async def in_a_task(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Add in a task that the method starts."""
        return await asyncio.create_task(self.awaiting(a, b))

    def in_a_thread(self, a: Any, b: Any) -> tuple[bool, bool]:
        """Whether sums of a thread that the method starts lie in the store, without and with `zc.numpy_allocator`."""
        found: list[bool] = []

        def work() -> None:
            found.append(zc.in_store(a + b))
            with zc.numpy_allocator(True):
                found.append(zc.in_store(a + b))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found[0], found[1]

    def switched_off(self, a: Any, b: Any) -> tuple[bool, Any]:
        """Add while NumPy allocates outside the store."""
        with zc.numpy_allocator(False):
            result = a + b
        return zc.in_store(result), result

    def initial(self) -> tuple[bool, Any]:
        """The array that the constructor made."""
        return zc.in_store(self.first), self.first

    def keep(self, value: Any) -> tuple[bool, int, Any]:
        """Keep a value; return whether it is writable, its address, and the object id of its block."""
        self.kept.append(value)
        return value.flags.writeable, value.ctypes.data, getattr(root_of(value), "object_id", None)

    def drop(self) -> None:
        """Forget all kept values."""
        self.kept.clear()

    def last(self) -> Any:
        """The value that was kept last."""
        return self.kept[-1]

    def give(self) -> Any:
        """Hand over the value that was kept last."""
        value = self.kept.pop()
        return zc.move(value)

    def fill(self, number: float) -> None:
        """Overwrite the value that was kept last."""
        self.kept[-1][...] = number

    def make(self, nbytes: int) -> Any:
        """An array of `nbytes` bytes."""
        array = np.empty(nbytes // 8)
        array.fill(7)
        return array

    async def pass_on(self, array: Any, others: list[Any]) -> Any:
        """Send `array` through all of the others in turn, and return the array that comes back."""
        return await others[0].pass_on(array, others[1:]) if others else array

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def fill_up(self, count: int) -> tuple[int, float, bool, bool]:
        """Allocate more than the store holds.

        Returns the number of arrays in the store, a sum over all arrays, whether the store was full for further arrays,
        and whether it takes an array again once those are dropped.
        """
        arrays = [np.full(MIB // 8, float(index)) for index in range(count)]
        grown = np.arange(MIB // 8)
        grown.resize(MIB // 4, refcheck=False)
        total = float(sum(array.sum() for array in arrays)) / (MIB // 8)
        inside = sum(map(zc.in_store, arrays))
        full = not zc.in_store(np.zeros(MIB // 8)) and not zc.in_store(np.ones(MIB // 8) + 1)
        arrays.clear()
        return inside, total, full, zc.in_store(np.ones(MIB // 8))

    def frame(self, frame: Any) -> tuple[Any, int]:
        """Twice the frame, and bytes copied in this process."""
        return frame * 2, zc.stats().bytes_copied

    def fitted(self, x: Any, y: Any) -> tuple[Any, Any, Any, int]:
        """A model, its predictions, scaled data, and bytes copied in this process."""
        linear = library("sklearn.linear_model")
        scaled = library("sklearn.preprocessing").StandardScaler().fit_transform(x)
        model = linear.LinearRegression().fit(x, y)
        return model, model.predict(x), scaled, zc.stats().bytes_copied


async def computer() -> Any:
    """Spawn the actor; its handle is untyped."""
    return await zc.spawn(Computer)


async def copied(*actors: Any) -> list[int]:
    """Bytes copied in this process and in the process of each actor."""
    return [zc.stats().bytes_copied, *[(await zc.stats(actor)).bytes_copied for actor in actors]]
