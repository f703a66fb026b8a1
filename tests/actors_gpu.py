"""Actors that the tests of arrays on GPUs share, in a module that workers can import without importing a test."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import zcactor as zc
from tests.device.helpers import settle
from zcactor.process.context import current

__all__ = ["Box", "Gpus", "Shelf", "Stage", "hold_pieces"]


def hold_pieces(process: Any, gate: threading.Event) -> None:
    """Hold back the copies of pieces of a process on its first GPU until a gate is opened."""
    devices, pieces = process.store.devices(), process.resolver.devices.pieces
    devices.driver.hold(0, pieces.stream(devices.gpus[0]), gate.is_set)


@dataclass
class Box:
    """An object with an array in it."""

    name: str
    array: Any


@zc.actor
class Gpus:
    """An actor that makes, keeps and reads arrays."""

    def __init__(self) -> None:
        self._kept: Any = None

    def seen(self, x: Any) -> tuple[str, Any]:
        """The type of an array, and its values."""
        return type(x).__name__, np.array(zc.gpu.to_host(x))

    async def seen_on_loop(self, x: Any) -> tuple[str, Any]:
        """As `seen`."""
        return type(x).__name__, np.array(zc.gpu.to_host(x))

    def described(self, x: Any) -> tuple[str, Any]:
        """The type of an array with its library's name, and its values."""
        return f"{type(x).__module__}.{type(x).__name__}", np.array(zc.gpu.to_host(x))

    def cupy(self, shape: Any, value: Any) -> Any:
        """A new array of CuPy."""
        return zc.full(shape, value, "u1", device="cuda").as_cupy()

    def copied_by_cupy(self, x: Any) -> Any:
        """A copy that CuPy would queue on its stream, without asking for any order."""
        made = zc.zeros(x.shape, x.dtype, device="cuda").as_cupy()
        driver = current().store.devices().driver
        driver.copy(0, made.data.ptr, x.data.ptr, 1, x.nbytes, (x.nbytes, x.nbytes), 0)
        return made

    async def cupies(self, count: int) -> AsyncIterator[Any]:
        """Arrays of CuPy, one after the other."""
        for value in range(count):
            yield zc.full(100, value, "u1", device="cuda").as_cupy()

    def facts(self, x: Any) -> tuple[Any, ...]:
        """The facts that an array states about itself."""
        return x.shape, x.dtype, x.strides, x.device, x.uuid, x.readonly

    def full(self, shape: Any, value: Any, dtype: str = "u1", device: str = "cuda") -> Any:
        """A new array."""
        return zc.full(shape, value, dtype, device=device)

    async def many(self, count: int) -> AsyncIterator[Any]:
        """Arrays one after the other."""
        for value in range(count):
            yield zc.full(100, value, "u1", device="cuda")

    def keep(self, x: Any) -> None:
        """Keep a value."""
        self._kept = x

    def kept(self) -> Any:
        """The value that was kept."""
        return self._kept

    def kept_seen(self) -> list[Any]:
        """The values of the arrays that were kept."""
        return [np.array(zc.gpu.to_host(each)) for each in self._kept]

    async def relay_kept(self, other: Any) -> Any:
        """Pass the first array that was kept on."""
        return await other.seen(self._kept[0])

    def total(self, x: Any) -> tuple[str, int]:
        """The type of an array, and the sum of its elements."""
        return type(x).__name__, int(np.sum(zc.gpu.to_host(x), dtype="u8"))

    def fill_store(self, left: int) -> None:
        """Leave the store so many bytes in one piece."""
        self._filling = zc.empty(current().store.stats().largest_free - left, "u1")

    def filled(self, x: Any, value: Any) -> Any:
        """The values of an array that was written to here."""
        x.fill(value)
        return np.array(zc.gpu.to_host(x))

    def given(self, shape: Any, value: Any) -> Any:
        """A new array, handed over."""
        return zc.move(zc.full(shape, value, "u1", device="cuda"))

    def writes(self, x: Any) -> str:
        """The error of a write."""
        try:
            x.fill(1)
        except ValueError as error:
            return str(error)
        return ""

    def doubled(self, x: Any) -> Any:
        """A copy that was made on the GPU, not waited for."""
        made = x.copy()
        del x
        return made

    async def relay(self, other: Any, x: Any) -> Any:
        """Pass an array on."""
        return await other.seen(x)

    def hold(self) -> None:
        """Hold back the work of the default stream."""
        self._gate = threading.Event()
        driver: Any = current().store.devices().driver
        driver.hold(0, 0, self._gate.is_set)

    def settle(self) -> None:
        """Wait until the GPU has done all that waits for nothing."""
        settle(current().store.devices().driver)

    def let_go(self) -> None:
        """Let the work of the default stream go on."""
        self._gate.set()

    def arena(self) -> tuple[int, int, int]:
        """The highest byte that the store has ever used, the bytes kept for pieces, and those of them in use."""
        process: Any = current()
        pieces = process.resolver.devices.pieces
        return process.store.heap.high, pieces.nbytes, pieces.nbytes - pieces.idle_nbytes

    def hold_pieces(self) -> None:
        """Hold back the copies of pieces."""
        self._gate = threading.Event()
        hold_pieces(current(), self._gate)

    def stats(self) -> zc.Stats:
        """The figures of this process."""
        return zc.stats()

    def leave_descriptors(self, number: int) -> None:
        """Let this process open so many more descriptors."""
        highest = max(map(int, os.listdir("/proc/self/fd")))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [each for each in range(highest) if not os.path.exists(f"/proc/self/fd/{each}")]
        self._filled = [os.open("/dev/null", os.O_RDONLY) for _ in free]
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + number, hard))
        self._soft = soft

    def restore_descriptors(self) -> None:
        """Undo `leave_descriptors`."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        for each in self._filled:
            os.close(each)


@zc.actor
class Stage:
    """A stage of a pipeline, which works by CuPy on a stream of its own."""

    def copied(self, x: Any) -> Any:
        """A copy of an array, which is not waited for."""
        made = zc.empty(x.shape, x.dtype, device="cuda")
        with zc.gpu.stream() as stream:
            into, outof = made.as_cupy(), x.as_cupy()
            sizes = (x.nbytes, x.nbytes)
            current().store.devices().driver.copy(0, into.data.ptr, outof.data.ptr, 1, x.nbytes, sizes, stream.ptr)
        return made


@zc.actor
class Shelf:
    """An actor that keeps arrays by numbers."""

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}

    def keep_as(self, number: int, x: Any) -> None:
        """Keep an array."""
        self._arrays[number] = x

    def make(self, number: int, size: int, value: int) -> None:
        """Make an array, and do not wait for its elements."""
        x = self._arrays[number] = zc.empty(size, "u1", device="cuda")
        with zc.gpu.stream():
            x.fill(value)

    def get(self, number: int) -> Any:
        """Give an array."""
        return self._arrays[number]

    async def give(self, number: int, other: Any, under: int) -> None:
        """Pass an array on."""
        await other.keep_as(under, self._arrays[number])

    def look(self, number: int) -> Any:
        """The elements of an array."""
        return np.array(zc.gpu.to_host(self._arrays[number]))

    def drop(self, number: int) -> None:
        """Forget an array."""
        del self._arrays[number]

    def clear(self) -> None:
        """Forget all arrays."""
        self._arrays.clear()

    def stats(self) -> zc.Stats:
        """The figures of this process."""
        return zc.stats()
