"""Arrays born in the store: plain ndarrays whose memory peers can map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from zcactor.context import current
from zcactor.marshal.arrays import is_shareable, packed_strides, root_of
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block

__all__ = ["asarray", "empty", "full", "in_store", "ones", "zeros"]

Array = npt.NDArray[Any]
Shape = int | Sequence[int]


def empty(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array:
    """An uninitialised array in the store: passing it copies nothing.

    Args:
        shape: elements along each axis, or an int for one axis.
        dtype: any dtype of plain bytes: numbers, structured, datetime64, fixed-width strings, ml_dtypes.
        device: only ``"cpu"`` here.

    Returns:
        A C-contiguous, writable ndarray, aligned to 64 bytes.

    Raises:
        NotInitialized: no runtime is running.
        OutOfMemory: the store cannot hold it.
        TypeError: elements of `dtype` are Python objects.
        ValueError: `device` is not ``"cpu"``, or `shape` is negative.
    """
    if device != "cpu":
        raise ValueError(f"device {device!r}: arrays in the store are on 'cpu' in this version")
    return current().store.empty(shape, dtype)


def zeros(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array:
    """`empty`, filled with zeros."""
    return full(shape, 0, dtype, device=device)


def ones(shape: Shape, dtype: npt.DTypeLike = float, *, device: str = "cpu") -> Array:
    """`empty`, filled with ones."""
    return full(shape, 1, dtype, device=device)


def full(shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = None, *, device: str = "cpu") -> Array:
    """`empty`, filled with `fill_value`; its own dtype when `dtype` is None."""
    array = empty(shape, np.asarray(fill_value).dtype if dtype is None else dtype, device=device)
    if array.dtype.kind in "mM" and isinstance(fill_value, int):
        array.view(np.int64).fill(fill_value)  # NumPy's own zeros() and ones() treat times as counts
    elif array.dtype.kind == "V" and array.dtype.type is np.void and isinstance(fill_value, int):
        array[...] = np.full((), fill_value, array.dtype)
    else:
        array[...] = fill_value
    return array


def asarray(x: Any, dtype: npt.DTypeLike | None = None) -> Array:
    """`x` as an array in the store: `x` itself when it lies there already, else a copy, which is counted.

    Args:
        x: an ndarray or anything that `numpy.asarray` takes.
        dtype: what to convert to; None keeps it.

    Raises:
        TypeError: its elements are Python objects.
        OutOfMemory: the store cannot hold the copy.
    """
    array = np.asarray(x, dtype)
    if in_store(array):
        return array
    if not is_shareable(array.dtype):
        raise TypeError(f"dtype {array.dtype} holds Python objects; the store holds plain bytes only: convert it first")
    process = current()
    strides = None if array.flags.c_contiguous else packed_strides(array)
    copied = process.store.empty(array.shape, array.dtype, strides=strides)
    process.copies.copy_into(copied, array, "zc.asarray")
    return copied


def in_store(x: Any) -> bool:
    """Whether passing array `x` needs no copy: its memory is this process's store, or was received from another's."""
    return isinstance(x, np.ndarray) and isinstance(root_of(x), Block | Lease)
