"""Arrays on GPUs that callers give to their groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zcactor.device.array import DeviceArray
from zcactor.device.foreign import known_array
from zcactor.device.memory import DeviceBlock
from zcactor.errors import DeviceUnavailable
from zcactor.marshal.arrays import is_shareable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.device.events import Moment
    from zcactor.device.memory import GpuMemory
    from zcactor.process.context import LocalProcess

__all__ = ["Borrowed", "GpuInput", "taken"]


class GpuInput(NamedTuple):
    """An array of a caller, which lies on a GPU."""

    array: DeviceArray
    """A contiguous array of its elements."""
    library: str
    """The library of the caller's array, as `zcactor.device.recognise.Foreign` has it."""
    after: Sequence[Moment]
    """The work after which its elements are computed."""
    given: DeviceArray
    """An array over the bytes of the caller's array, which may have gaps."""

    @property
    def gpu(self) -> GpuMemory:
        """The GPU."""
        return self.array.holder.gpu


def taken(process: LocalProcess, x: Any, what: str) -> GpuInput:
    """Take an array of a caller, in the caller's thread: later work of its stream is not waited for.

    Args:
        process: this process.
        x: the array, of ours or of another library.
        what: the caller, for messages.

    Raises:
        TypeError: the elements are of no type that is known here.
        DeviceUnavailable: the array is of an earlier runtime, or GPUs are switched off.
        ObjectLost: the array is never computed.
        OutOfMemory: the GPU has no room for a contiguous copy.
        DeviceError: the driver refuses.
    """
    devices, library, known = process.store.devices(), "", None
    given = x
    if not isinstance(x, DeviceArray):
        known = known_array(devices, x)
        if known is None or not is_shareable(known.array.dtype):
            raise TypeError(
                f"{what}: the elements of this {type(x).__name__} on a GPU have no dtype of plain bytes, or its memory "
                "is on no GPU that this process sees; pass zc.gpu.to_host(x)"
            )
        given, library = known.array, known.library
    if given.holder.gpu not in devices.gpus:
        raise DeviceUnavailable(f"{what}: {given!r} is of an earlier runtime; make the array anew")
    after = given.holder.work.writes()
    if known is not None and given.readonly and not (events := given.holder.gpu.events).is_idle(known.stream):
        after.append(events.record(known.stream))  # the library may write to it all the same
    array = given
    if not _is_packed(given):
        array = given.copy()
        after = array.holder.work.writes()
    return GpuInput(array, library, after, given)


def _is_packed(array: DeviceArray) -> bool:
    """Whether the elements lie one behind the other in C order."""
    nbytes = array.itemsize
    for length, stride in zip(reversed(array.shape), reversed(array.strides), strict=True):
        if length > 1 and stride != nbytes:
            return not array.size
        nbytes *= length
    return True


class Borrowed:
    """The loan of an array's bytes: they are read-only until all work that reads them is queued."""

    def __init__(self, array: DeviceArray) -> None:
        holder = array.holder
        self._block = holder if isinstance(holder, DeviceBlock) else None
        if self._block is not None:
            self._block.lend(self)

    def end(self) -> None:
        """Give the array back. Idempotent."""
        block, self._block = self._block, None
        if block is not None:
            block.take_back(self)
