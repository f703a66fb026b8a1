"""Arrays on GPUs on their way to other processes, by reference.

A message carries the layout and, where the array is not computed yet, the event of the work that computes it. The bytes
lie in the GPU memory of their owner, on which the receiver has a lease. Imported when an array on a GPU is first made
or received.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec
import numpy as np

from zcactor.device.array import DeviceArray, array_over, empty_array
from zcactor.device.driver import EVENT_NBYTES, CudaCode
from zcactor.device.events import OTHERS
from zcactor.device.foreign import Outside, copied_on, known_array, others_have
from zcactor.device.interchange import to_jax
from zcactor.device.lease import DeviceCopy, DeviceLease, HostCopy
from zcactor.device.memory import DeviceBlock, wait_on_host
from zcactor.device.recognise import TORCH_ONLY
from zcactor.errors import DeviceError, DeviceUnavailable, ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code, is_shareable
from zcactor.marshal.move import NOT_OURS, OTHER_VIEWS
from zcactor.marshal.values import Code, decode_small, register
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.device.events import Moment

__all__ = [
    "LibraryArray",
    "pack_device_array",
    "pack_known_array",
    "pack_moved_array",
    "pass_arrays",
    "unpack_device_array",
]

_encode: Final = msgspec.msgpack.Encoder().encode
_OUTSIDE: Final = "argument outside the device store"
_MOVED: Final = "moved array on a GPU"
_CHANGED: Final = "array on a GPU that may have changed"
_REFERENCES_OF_LIBRARIES: Final = 1
"""The references to a holder that one library's object over its bytes has."""


def pack_device_array(packing: Any, array: DeviceArray, library: str = "", *, moved: bool = False) -> bytes:
    """Encode an array on a GPU, which is read-only from now on unless it is `moved`.

    Args:
        packing: the message.
        array: the array.
        library: the library whose type the receiver gets, as `zcactor.device.recognise.Foreign` has it.
        moved: whether the receiver may write.

    Raises:
        DeviceUnavailable: the array is of an earlier runtime, and this one has no such GPU.
        DeviceError: the driver refuses.
        ObjectLost: the owner of a received array has ended, and the array with it.
    """
    devices = packing.store.devices()
    holder: Any = array.holder
    if holder.gpu not in devices.gpus:  # of an earlier runtime, whose memory peers of this one cannot import
        gpu = next((each for each in devices.gpus if each.uuid == array.uuid), None)
        if gpu is None:
            raise DeviceUnavailable(f"{array!r} is of an earlier runtime, and this one does not see its GPU")
        values = np.empty(array.shape, array.dtype)
        array.copy_to_host(values)
        array = empty_array(gpu, array.shape, array.dtype)
        array.copy_from(values)
        packing.copies.count(_OUTSIDE, array.nbytes)
        holder = array.holder
    if isinstance(holder, Outside):
        array = holder.copied(array)
        packing.copies.count(_OUTSIDE, array.nbytes)
        holder = array.holder
    if isinstance(holder, DeviceLease) and not devices.imports.has_met(holder.owner):
        array = _adopted(packing, holder, array)
        holder = array.holder
    if isinstance(holder, DeviceBlock):
        if not holder.sealed:
            holder.open_again()  # a message that was not sent may have told an event
        if moved:
            holder.store = packing.store
        else:
            holder.share(packing.store)
        event = _event_of(devices, holder)
    else:
        event = holder.event if holder.work.writes() else None
    low, high = array.bounds()
    # The address of an empty view may lie after its block, and its part may not.
    offset = holder.offset + (low - holder.address if low < high else 0)
    part = Part(RegionKind.DEVICE, holder, offset, high - low)
    index, code = packing.add(part), dtype_code(array.dtype)
    return _encode((index, code, array.shape, array.strides, array.address - low, event, library, moved))


class LibraryArray(NamedTuple):
    """An array of this process that becomes one of a library where it is unpacked, here as well."""

    array: DeviceArray
    library: str
    """As for `pack_device_array`."""


def _pack_library_array(packing: Any, made: LibraryArray) -> bytes:
    return pack_device_array(packing, made.array, made.library)


def pack_moved_array(packing: Any, value: Any) -> bytes | None:
    """Encode an array on a GPU whose receiver may write; None for a value that is no such array. The array is handed
    over when the message is packed.

    Raises:
        ValueError: it was handed over before, is read-only, or other arrays are over the same bytes.
    """
    if not isinstance(value, DeviceArray):
        return pack_known_array(packing, value, moved=True)
    _check_movable(value, 0)
    return pack_device_array(packing, value, moved=True)


def _check_movable(array: DeviceArray, of_libraries: int) -> None:
    """Check that nobody but the mover, and a number of objects of libraries, has the bytes of an array.

    Raises:
        ValueError: it is read-only, or other arrays are over the same bytes.
    """
    if array.readonly:
        raise ValueError(NOT_OURS)
    if _references(array) > _OWN_REFERENCES + of_libraries:
        raise ValueError(OTHER_VIEWS)


def _references(array: DeviceArray) -> int:
    holder = array.holder
    return sys.getrefcount(holder)


_OWN_REFERENCES: Final = _references(DeviceArray(cast("Any", object()), 0, np.empty(0)))
"""The references to the holder of one array that `_references` sees."""


def pack_known_array(packing: Any, value: Any, *, moved: bool = False) -> bytes | None:
    """Encode another library's array on a GPU, whose elements nobody may write to from now on; None for a value
    that is no such array. Where its bytes lie outside of the store, or may have changed since they were passed, they
    are copied on the GPU, once a message.

    Raises:
        ValueError: it is `moved`, and read-only, or other arrays are over the same bytes.
        OutOfMemory: the GPU has no room for the copy.
        DeviceError: the driver refuses.
        ObjectLost: the owner of a received array has ended, and the array with it.
    """
    copied = packing.copied.get(id(value))
    if copied is not None:
        return pack_device_array(packing, copied[1].array, copied[1].library, moved=moved)
    try:
        known = known_array(packing.store.devices(), value)
    except DeviceUnavailable:  # switched off here
        return None
    if known is None or not is_shareable(known.array.dtype):
        return None
    if moved and not isinstance(known.array.holder, Outside):
        _check_movable(known.array, _REFERENCES_OF_LIBRARIES)
    holder: Any = known.array.holder
    reason = ""
    if isinstance(holder, Outside):
        reason = _OUTSIDE
    elif id(holder) not in packing.copied and known.may_have_changed():
        reason = _CHANGED
    elif moved and others_have(value):
        reason = _MOVED
    if reason:
        known = known._replace(array=copied_on(known.stream, known.array))
        packing.copied[id(value)] = value, known
        packing.copies.count(reason, known.array.nbytes)
    elif isinstance(holder, DeviceBlock):
        packing.copied[id(holder)] = holder, known  # the elements are those of this moment for all of the message
        holder.version = known.version
    return pack_device_array(packing, known.array, known.library, moved=moved)


def _adopted(packing: Any, lease: DeviceLease, array: DeviceArray) -> DeviceArray:
    """The array over a copy of our own, as its owner, which has ended, grants no more leases. One copy serves all
    arrays over the lease.

    Raises:
        ObjectLost: the array was not computed.
    """
    copied = lease.adopted
    if copied is None:
        copied = array_over(lease, lease.address, (lease.nbytes,), np.dtype(np.uint8), (1,)).copy()
        lease.adopted = copied
        packing.copies.count("owner ended", lease.nbytes)
    address = copied.address + array.address - lease.address
    return array_over(copied.holder, address, array.shape, array.dtype, array.strides)


def _event_of(devices: Any, block: DeviceBlock) -> bytes | None:
    """The exported event of the work that computes a block; None where that is done.

    Where events are not shared between processes, or too many are, the thread waits for the work.

    Raises:
        ObjectLost: the block is never computed.
        DeviceError: the driver refuses.
    """
    writes = block.work.writes()
    if not writes:
        return None
    driver = block.gpu.driver
    if driver.shared_events:
        try:
            moment = block.told or _last(devices, block, writes)
            exported = driver.export_event(moment.device, moment.event)
        except DeviceError as error:
            if error.code != CudaCode.NOT_SUPPORTED:  # the work of too many exported events is not done
                raise
        else:
            if block.told is None and moment.lane != OTHERS:  # of a promise the relay tells the outcome
                block.gpu.tending.watch(moment)
            block.told = moment  # the next reader waits for the same event
            return exported
    devices.syncs += 1
    wait_on_host(writes)
    return None


def _last(devices: Any, block: DeviceBlock, writes: list[Moment]) -> Moment:
    """One moment after all writes, which peers may wait for."""
    if any(each.lane == OTHERS for each in writes):
        relayed: Moment = devices.relay.promise(block.gpu, writes)
        return relayed
    if len(writes) == 1:
        return writes[0]
    block.work.before_reading(block.gpu.index, 0)
    return block.gpu.events.record(0)


def unpack_device_array(unpacking: Any, data: memoryview) -> Any:
    """Make the array that `pack_device_array` encoded: over the same bytes or, where they cannot be mapped here, over a
    copy. It is of the sender's library where that can be imported. A process that sees no GPU gets a NumPy array, which
    is read-only.

    Raises:
        ProtocolError: the encoded form is malformed.
        ObjectLost: the owner of the bytes has ended.
        OutOfMemory: there is no room for the copy.
    """
    known = _decoded(bytes(data))
    return _of_library(_unpacked(unpacking, known), known.library)


class _Encoded(NamedTuple):
    """The encoded form of an array, checked as far as it goes without the bytes."""

    number: int
    """The number of the part of the message."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    inner: int
    """Bytes from the beginning of the part to the first element."""
    low: int
    high: int
    """The bytes of the part in which the elements lie."""
    event: bytes | None
    library: str
    moved: bool


@functools.lru_cache(maxsize=1024)
def _decoded(data: bytes) -> _Encoded:
    """Decode an encoded form. Programs pass arrays of few layouts again and again.

    Raises:
        ProtocolError: it is malformed.
    """
    fields = decode_small(data)
    if type(fields) is not list or len(fields) != 8:
        raise ProtocolError("an array on a GPU is malformed")
    index, code, shape, strides, inner, event, library, moved = fields
    if type(library) is not str or type(moved) is not bool:
        raise ProtocolError("an array on a GPU is malformed")
    if event is not None and not (type(event) is bytes and len(event) == EVENT_NBYTES):
        raise ProtocolError("the event of an array on a GPU is malformed")
    dtype = dtype_from_code(code)
    low, high = _bounds(shape, strides, inner, dtype.itemsize)
    return _Encoded(index, dtype, tuple(shape), tuple(strides), inner, low, high, event, library, moved)


def _unpacked(unpacking: Any, known: _Encoded) -> Any:
    part, moved, event = unpacking.part(known.number), known.moved, known.event
    holder = part.holder
    if part.kind != RegionKind.DEVICE:
        raise ProtocolError(f"part {known.number} of a message is no array on a GPU")
    if not isinstance(holder, DeviceBlock | DeviceCopy | DeviceLease | HostCopy):
        _ = getattr(holder, "__array_interface__", None)  # the holder of a lost object raises here
        raise ProtocolError(f"an array on a GPU has a {type(holder).__name__} in the place of its bytes")
    if not 0 <= known.low <= known.high <= part.nbytes:
        raise ProtocolError(f"an array on a GPU takes up bytes {known.low} to {known.high} of {part.nbytes}")
    if isinstance(holder, HostCopy):
        return _from_host(unpacking, known, holder)
    if isinstance(holder, DeviceCopy):
        block = holder.block
        if moved:
            block.open_again()
        return array_over(block, block.address + known.inner, known.shape, known.dtype, known.strides)
    if isinstance(holder, DeviceBlock):
        address = holder.address + part.offset - holder.offset
    else:
        devices = unpacking.store.devices()
        if event is not None and holder.event is None:
            holder.work.comes_after(devices.imports.moment(holder.owner, event, holder.gpu))
            holder.event = event
        devices.bytes_mapped += part.nbytes
        address = holder.address
    found = array_over(holder, address + known.inner, known.shape, known.dtype, known.strides)
    return _own(unpacking, found) if moved else found


def _from_host(unpacking: Any, known: _Encoded, holder: HostCopy) -> Any:
    """The array over a copy of its bytes in host memory, as this process sees no GPU."""
    array: np.ndarray[Any, Any] = np.ndarray(known.shape, known.dtype, holder.values, known.inner, known.strides)
    if known.moved:
        own = unpacking.store.empty(array.shape, array.dtype)
        own[...] = array
        unpacking.copies.count(_MOVED, array.nbytes)
        return own
    return array


def _own(unpacking: Any, array: DeviceArray) -> DeviceArray:
    """The receiver's own copy of an array that was handed over, made on the GPU. Peers map memory without write
    access, so the bytes themselves stay the sender's."""
    made = array.copy()
    unpacking.copies.count(_MOVED, array.nbytes)
    return made


def _of_library(array: DeviceArray | np.ndarray[Any, Any], described: str) -> Any:
    """The array as one of a library, as `zcactor.device.recognise.Foreign` has it; as it is where that cannot be
    imported, or this process has no GPU.

    Raises:
        ProtocolError: the library is unknown.
    """
    library, *more = described.split(":")
    known = all(each in {"grad", "parameter"} or each.startswith(TORCH_ONLY) for each in more)
    if not known or library not in {"", "cupy", "jax", "torch"}:
        raise ProtocolError(f"an array on a GPU is to be of the library {described[:40]!r}, which is unknown")
    name = next((each for each in more if each.startswith(TORCH_ONLY)), "")
    if library and isinstance(array, DeviceArray):
        with contextlib.suppress(ImportError):
            if library == "cupy":
                return array.as_cupy()
            if library == "jax":
                return to_jax(array)
            tensor, torch = array.as_torch(), importlib.import_module("torch")
            dtype = getattr(torch, name, None) if name else None
            tensor = tensor if dtype is None else tensor.view(dtype)  # an older PyTorch has the bytes alone
            if "parameter" in more:
                return torch.nn.Parameter(tensor, requires_grad="grad" in more)
            return tensor.requires_grad_(True) if "grad" in more else tensor
    if name:
        with contextlib.suppress(ProtocolError):  # without ml_dtypes the elements are the bytes
            return array.view(dtype_from_code(f"ml:{name}"))
    return array


def _bounds(shape: Any, strides: Any, inner: Any, itemsize: int) -> tuple[int, int]:
    """The bytes in which the elements of a layout lie. The sums are Python's, which do not overflow.

    Raises:
        ProtocolError: the layout is malformed.
    """
    numbers = [shape, strides]
    wrong = not all(type(each) is list and all(type(one) is int for one in each) for each in numbers)
    if wrong or len(shape) != len(strides) or len(shape) > 64 or type(inner) is not int or min(shape, default=0) < 0:
        raise ProtocolError("the layout of an array on a GPU is malformed")
    low = high = inner
    if 0 not in shape:
        for length, stride in zip(shape, strides, strict=True):
            reach = (length - 1) * stride
            low, high = (low + reach, high) if stride < 0 else (low, high + reach)
        high += itemsize
    return low, high


def pass_arrays() -> None:
    """Let arrays on GPUs travel in messages of this process."""
    register(DeviceArray, Code.DEVICE_ARRAY, pack_device_array, unpack_device_array)
    register(LibraryArray, Code.DEVICE_ARRAY, _pack_library_array, unpack_device_array)
