"""Arrays born in the store: plain ndarrays whose memory peers can map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, Final, Literal, SupportsIndex, TypeVar, overload

from zcactor.api.gpus import empty_on
from zcactor.exception_pickling import hides, module_name, shown_class
from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import base_of, byte_bounds, check_unmasked, innermost, is_shareable, plain_of, root_of
from zcactor.marshal.foreign import known_over
from zcactor.marshal.move import UNUSABLE, is_moved
from zcactor.marshal.on_gpu import is_on_gpu
from zcactor.marshal.placing import place
from zcactor.marshal.sharing import CLAIMED, is_of, is_open, reason_to_copy, share, snapshot
from zcactor.native import hot
from zcactor.objectstore.heap import allocate_elsewhere, use_handler
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block
from zcactor.process.context import current, current_or_none

__tracebackhide__ = hides
__all__ = ["asarray", "empty", "freeze", "full", "in_store", "numpy_allocator", "ones", "zeros"]

if TYPE_CHECKING:
    import numpy.typing as npt

    from zcactor.device.array import DeviceArray

    Array = npt.NDArray[Any]

Shape = SupportsIndex | Sequence[SupportsIndex]
T = TypeVar("T")
_OTHERS: Final = ("pandas", "pyarrow", "torch", "jaxlib")
"""The packages of other libraries' values that `freeze` takes."""


@overload
def empty(  # type: ignore[overload-overlap] # "cpu" is a str as well, and the one that means the host
    shape: Shape, dtype: npt.DTypeLike = ..., *, device: Literal["cpu"] = ...
) -> Array: ...


@overload
def empty(shape: Shape, dtype: npt.DTypeLike = ..., *, device: str) -> DeviceArray: ...


def empty(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array | DeviceArray:
    """Make an uninitialised array in the store, or on a GPU. Passing it whole to an actor copies nothing.

    Args:
        shape: number of elements along each axis, or an int for one axis.
        dtype: any dtype of plain bytes: numbers, structured, datetime64, fixed-width strings, ml_dtypes.
        device: ``"cpu"``, or a GPU: ``"cuda"`` is the first, ``"cuda:1"`` the second, and so on.

    Returns:
        A C-contiguous, writable ndarray, aligned to 64 bytes; or a `DeviceArray`, aligned to 256 bytes.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: the store, or the GPU, cannot hold it.
        TypeError: the elements of `dtype` are not plain bytes but Python objects or strings of variable width.
        ValueError: `device` is malformed, or a length in `shape` is negative.
        DeviceUnavailable: this process sees no such GPU.
        DeviceError: the GPU's driver refuses.
    """
    return _empty(shape, dtype, device)


def _empty(shape: Shape, dtype: npt.DTypeLike, device: str) -> Array | DeviceArray:
    process = current()
    dtype = np.dtype(dtype)
    if not is_shareable(dtype):
        raise TypeError(f"dtype {dtype} is not plain bytes, which is all that the store holds; use a fixed-size dtype")
    if device != "cpu":
        axes = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
        if min(axes, default=0) < 0:
            raise ValueError(f"shape {axes} has a negative length")
        return empty_on(device, axes, dtype)
    return process.store.empty(tuple(shape) if isinstance(shape, Sequence) else shape, dtype)


@overload
def zeros(  # type: ignore[overload-overlap] # "cpu" is a str as well, and the one that means the host
    shape: Shape, dtype: npt.DTypeLike = ..., *, device: Literal["cpu"] = ...
) -> Array: ...


@overload
def zeros(shape: Shape, dtype: npt.DTypeLike = ..., *, device: str) -> DeviceArray: ...


def zeros(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array | DeviceArray:
    """Make an array in the store, or on a GPU, whose bytes are all 0. Arguments and exceptions as for `empty`.

    On a GPU the bytes are written on the stream of `zcactor.gpu.stream`, and nobody waits for that.
    """
    array = _empty(shape, dtype, device)
    if isinstance(array, np.ndarray):
        innermost(array).fill(0)
    else:
        array.view_of_bytes().fill(0)
    return array


@overload
def ones(  # type: ignore[overload-overlap] # "cpu" is a str as well, and the one that means the host
    shape: Shape, dtype: npt.DTypeLike = ..., *, device: Literal["cpu"] = ...
) -> Array: ...


@overload
def ones(shape: Shape, dtype: npt.DTypeLike = ..., *, device: str) -> DeviceArray: ...


def ones(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array | DeviceArray:
    """Make an array in the store, or on a GPU, that is filled with ones. Arguments and exceptions as for `empty`.
    As for `zeros`, nobody waits."""
    array = _empty(shape, dtype, device)
    if isinstance(array, np.ndarray):
        np.copyto(array, np.ones((), array.dtype), casting="unsafe")
    else:
        array.fill(np.ones((), array.dtype))
    return array


@overload
def full(
    shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = ..., *, device: Literal["cpu"] = ...
) -> Array: ...


@overload
def full(shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = ..., *, device: str) -> DeviceArray: ...


def full(
    shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = None, *, device: str = "cpu"
) -> Array | DeviceArray:
    """Make an array in the store, or on a GPU, that is filled with one value. Exceptions as for `empty`.

    Args:
        shape: number of elements along each axis, or an int for one axis.
        fill_value: a value or an array that broadcasts to `shape`; on a GPU one value.
        dtype: any dtype of plain bytes; None takes that of `fill_value`.
        device: ``"cpu"``, or a GPU: ``"cuda"`` is the first, ``"cuda:1"`` the second, and so on.

    Returns:
        A C-contiguous, writable ndarray, aligned to 64 bytes; or a `DeviceArray`, aligned to 256 bytes.

    Raises:
        ValueError: `fill_value` does not broadcast to `shape`, besides the causes that `empty` has.
        OverflowError: `fill_value` is an int beyond those of `dtype`.
    """
    if dtype is None:
        fill_value = np.asarray(fill_value)
        dtype = fill_value.dtype
    array = _empty(shape, dtype, device)
    if isinstance(array, np.ndarray):
        np.copyto(array, fill_value, casting="unsafe")
    else:
        array.fill(fill_value)
    return array


def asarray(x: Any, dtype: npt.DTypeLike | None = None) -> Array:
    """Return `x` as an array in the store: `x` itself when it lies there already, otherwise a copy, which is counted.

    A mapped file (`numpy.memmap`) is copied each time that it is passed, and stays writable here. The array that this
    function makes of it can be passed whole any number of times without another copy. To pass pieces of an array,
    `freeze` it.

    Args:
        x: an ndarray, or any object that `numpy.asarray` accepts.
        dtype: the dtype to convert to; None keeps the dtype of `x`.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: the elements are not plain bytes but Python objects or strings of variable width, or `x` has a mask.
        ValueError: `x` was handed over by `move`.
        OutOfMemory: the store cannot hold the copy.
    """
    process = current()
    check_unmasked(x, "zc.asarray")
    array = np.asarray(x, dtype)
    if is_moved(array):
        raise ValueError(UNUSABLE)
    if not is_shareable(array.dtype):
        raise TypeError(f"dtype {array.dtype} is not plain bytes, which is all that the store holds: convert it first")
    return array if in_store(array) else place(process.store, process.copies, array, "zc.asarray")


def freeze(x: T) -> T:
    """Return an array with the elements of `x` that nobody can write to: its parts are passed without a copy for ever.

    Write ``x = zc.freeze(x)``. The result is `x` itself, read-only from now on, where nobody else can write to its
    memory: the one name that it was called with is the only object over the memory, or it was passed or frozen before.
    Otherwise the result is one copy in the store, which is counted ("piece of an open array", or "argument outside the
    store"), and `x` stays as it is. From Python 3.14 on the name has to be a variable of the calling function: another
    name cannot be told from a view there, and leads to a copy.

    Args:
        x: an ndarray of plain bytes, also of a subclass; a pandas Series or DataFrame, an Arrow array or table, a torch
            tensor on the CPU. Of those each array is treated like an ndarray. A tensor is one over a copy-on-write
            mapping of the memory, as torch has no read-only tensors, and passing it copies: freeze its ndarray instead.

    Raises:
        NotInitialized: no runtime is running.
        TypeError: `x` is no such array, or its elements are Python objects or strings of variable width.
        ValueError: `x` was handed over by `move`, or takes the result of a group's operation that is not done.
        OutOfMemory: the store cannot hold the copy.
    """
    names = hot.references(x)
    process = current()
    if isinstance(x, np.ndarray):
        return _frozen(process, x, alone=names <= _one_name())  # type: ignore[return-value]
    if module_name(type(x)).partition(".")[0] not in _OTHERS or is_on_gpu(x):
        what = "one on a GPU" if is_on_gpu(x) else "no array"
        raise TypeError(
            f"zc.freeze takes an array in host memory, and {shown_class(type(x))} is {what}; freeze the arrays in it "
            "one by one, or pass it as it is"
        )
    return process.marshaller.unpack(*process.marshaller.pack(x))  # type: ignore[no-any-return]


def _names(x: object) -> int:
    return hot.references(x)


@cache
def _one_name() -> int:
    """The references to the argument of a function that its caller has one name for, as `freeze` counts them."""
    x = np.empty(0)
    return _names(x)


def _frozen(process: Any, array: Array, *, alone: bool) -> Array:
    if is_moved(array):
        raise ValueError(UNUSABLE)
    plain = plain_of(array)
    if not is_shareable(plain.dtype):
        raise TypeError(
            f"zc.freeze: dtype {plain.dtype} is not plain bytes, and nothing keeps Python objects from being changed; "
            "convert the array first"
        )
    if not plain.flags.writeable and hot.claimed(array):
        raise ValueError(f"zc.freeze: {CLAIMED}")
    store, reason = process.store, reason_to_copy(process.store, array)
    if type(array) is not np.ndarray and base_of(array) is not None:  # its attributes and a mask travel as in a message
        frozen: Array = process.marshaller.unpack(*process.marshaller.pack(array))
        return frozen
    if (alone or not is_open(store, array)) and (holder := share(store, array)) is not None:
        if type(holder) is Block and holder.of_numpy:
            store.take_over(holder.offset)  # its flags cannot be set back then
        return array
    if plain.nbytes >= process.marshaller.eager_limit:
        return snapshot(store, process.copies, plain, reason)[1].view(type(array))
    process.copies.count(reason, plain.nbytes)
    copied: Array = np.ndarray(plain.shape, plain.dtype, plain.tobytes())
    return copied.view(type(array))


def in_store(x: Any) -> bool:
    """Whether the memory of the array `x` is this process's store, or was received from another store.

    Passing `x` whole needs no copy then, and neither does a piece of it once it is closed: see `freeze`. The result is
    False for an array on a GPU that was passed, and that its library may have written to since.

    Args:
        x: any object; the result is False unless it is an ndarray, a `DeviceArray`, or an array on a GPU of another
            library.
    """
    process = current_or_none()
    if not isinstance(x, np.ndarray):
        devices = None if process is None else process.store.devices_in_use
        if process is None or devices is None:
            return False
        if devices.holds(x):
            return True
        known = known_over(process.store, x)
        return known is not None and devices.holds(known.array) and not known.may_have_changed()
    root = root_of(x)
    if process is None:
        return issubclass(type(root), Block | Lease)
    if issubclass(type(root), Block | Lease):
        return is_of(process.store, root)  # a runtime before this one has other blocks
    return process.store.contains(*byte_bounds(x))  # another library's view of the store is found by its address


def numpy_allocator(enabled: bool) -> AbstractContextManager[None]:
    """Set, for a block of code, whether NumPy allocates its own arrays in the store.

    By default NumPy does so in actors, and in the driver after `init`, for arrays of at least ``store_min_nbytes``
    bytes: the results of user code then lie in the store, and passing them whole copies nothing. Where the store is
    full, NumPy's usual allocator takes over. The setting belongs to the context (PEP 567): it holds for this thread or
    task and for the tasks made inside the block. Threads that the program starts begin with NumPy's usual allocator,
    and may use this function.

    Args:
        enabled: whether arrays made inside the block lie in the store.

    Raises:
        NotInitialized: `enabled`, and no runtime is running.
        TypeError: `enabled` is not a bool.

    Source: NEP 49, data allocation strategies in NumPy.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"zc.numpy_allocator takes True or False, not {enabled!r}")
    return _switched(enabled)


@contextmanager
def _switched(enabled: bool) -> Iterator[None]:
    process = current() if enabled else None
    before = allocate_elsewhere() if process is None else process.use_numpy()
    try:
        yield
    finally:
        use_handler(before)
