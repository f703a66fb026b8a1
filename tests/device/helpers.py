"""Device stores for tests, without a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.memory import GpuMemory
from zcactor.device.store import DeviceStore, open_store

__all__ = ["array_on", "opened", "seen"]


@contextmanager
def opened(options: str = "", capacity: int | None = None, keep: int = 0) -> Iterator[DeviceStore]:
    """A device store on a loop that does not run by itself."""
    loop = asyncio.new_event_loop()
    try:
        yield open_store("fake", options, None, capacity, keep, loop)
    finally:
        loop.close()


def array_on(gpu: GpuMemory, values: npt.NDArray[Any]) -> DeviceArray:
    """An array on a GPU with the values of a NumPy array."""
    made = empty_array(gpu, values.shape, values.dtype)
    made.copy_from(values)
    return made


def seen(array: DeviceArray) -> npt.NDArray[Any]:
    """The values of an array on a GPU."""
    target = np.empty(array.shape, array.dtype)
    array.copy_to_host(target)
    return target
