"""Other libraries' arrays as arrays of ours over the same bytes."""

from __future__ import annotations

import math
import sys
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.device.array import DeviceArray, array_over, empty_array
from zcactor.device.kinds import kind_of
from zcactor.device.memory import DeviceBlock
from zcactor.device.recognise import IMMUTABLE, read
from zcactor.device.streams import streams
from zcactor.device.work import Work, lent_others

if TYPE_CHECKING:
    from zcactor.device.memory import GpuMemory
    from zcactor.device.recognise import Foreign
    from zcactor.device.store import DeviceStore

__all__ = ["Known", "Outside", "copied_on", "known_array", "others_have"]


class Outside:
    """The holder of bytes in a GPU's memory that no store of ours has: another library allocated them.

    They are kept until the work that was queued on them here is done.

    Args:
        gpu: the GPU.
        found: the array that lies there.
    """

    def __init__(self, gpu: GpuMemory, found: Foreign) -> None:
        stream = found.stream
        self.gpu: Final = gpu
        self.kept: Final = found.kept, found.stream_kept
        self.readonly: Final = found.readonly
        self.stream: Final = stream
        self.nbytes: Final = math.prod(found.shape) * found.dtype.itemsize
        busy = stream is not None and not gpu.events.is_idle(stream)
        self.work: Final = Work([*lent_others(gpu.driver), *([gpu.events.record(stream or 0)] if busy else [])])

    def copied(self, array: DeviceArray) -> DeviceArray:
        """See `copied_on`, for an array over these bytes."""
        return copied_on(self.stream or 0, array)

    def __del__(self) -> None:
        work = getattr(self, "work", None)  # the driver may have refused to say what is queued
        if work is not None and (left := work.left):
            self.gpu.tending.when_done(left, partial(_drop, self.kept))


def _drop(kept: object) -> None:
    """Keep an object up to now."""
    del kept


def copied_on(stream: int, array: DeviceArray) -> DeviceArray:
    """Copy an array to memory of the store. The copy is queued on a library's stream, so that the library uses the
    bytes for nothing else before.

    Raises:
        OutOfMemory: the GPU has no room.
        DeviceError: the driver refuses.
    """
    token = streams.set(MappingProxyType({**streams.get(), array.holder.gpu.index: stream}))
    try:
        return array.copy()
    finally:
        streams.reset(token)


class Known(NamedTuple):
    """Another library's array."""

    array: DeviceArray
    """An array over the same bytes; its holder is a block, a lease or `Outside`."""
    library: str
    """As `zcactor.device.recognise.Foreign` has it."""
    stream: int
    """The stream on which the library works in this thread."""
    version: object
    """See `zcactor.device.recognise.Foreign`."""

    def may_have_changed(self) -> bool:
        """Whether the library may have written to the elements since the bytes were passed to another process."""
        holder = self.array.holder
        if not isinstance(holder, DeviceBlock) or not holder.sealed or self.version is IMMUTABLE:
            return False
        return self.version is None or self.version != holder.version


def others_have(value: Any) -> bool:
    """Whether other arrays of the same library may be over the bytes of its array `value`. Only CuPy tells."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(value, cupy.ndarray):
        return True
    return sys.getrefcount(value.data) > _ALONE or sys.getrefcount(value.data.mem) > _ALONE


_sample: Final = SimpleNamespace(data=object())
_ALONE: Final = sys.getrefcount(_sample.data)
"""The references to an attribute that one object has."""


def known_array(devices: DeviceStore, value: Any) -> Known | None:
    """The array over the bytes of another library's array on a GPU; None for another value, and for
    elements of no type that we know.

    Raises:
        DeviceError: the driver refuses.
    """
    kind = kind_of(value) if devices.gpus else None
    found = None if kind is None else read(kind, value, devices.gpus)
    if found is None:
        return None
    low = high = found.address
    for length, stride in zip(found.shape, found.strides, strict=True):
        if stride < 0:
            low += (length - 1) * stride
        else:
            high += (length - 1) * stride
    high += found.dtype.itemsize
    if 0 in found.shape:
        return Known(empty_array(devices.gpus[0], found.shape, found.dtype), found.library, 0, None)
    holder: Any = devices.block_at(low, high, value) or devices.imports.lease_at(low, high)
    if holder is None:
        owner = devices.driver.owner_of(low)
        if owner is None or owner[0] < 0:
            return None
        holder = Outside(devices.gpus[owner[0]], found)
    elif found.stream is not None:
        pool = holder.gpu.events
        holder.work.give(pool, found.stream, found.stream_kept or pool.keeper(found.stream), pool)
    array = array_over(holder, found.address, found.shape, found.dtype, found.strides)
    return Known(array, found.library, found.stream or 0, found.version)
