"""Placing: copies of arrays from outside the store in it, each counted, laid out so that nothing is expanded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zcactor.marshal.arrays import array_address, byte_bounds, packed_strides

if TYPE_CHECKING:
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store

__all__ = ["place", "placed"]

Array = npt.NDArray[Any]


class _Span:
    """The bytes between the first and the last that an array's elements touch, as the base of another array."""

    __slots__ = ("__array_interface__", "_keep")

    def __init__(self, array: Array, low: int, nbytes: int) -> None:
        self._keep = array
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (low, True), "version": 3}


def _layout(array: Array) -> tuple[int, int, tuple[int, ...] | None]:
    """Bytes of a copy of `array`, where its first element begins, and its strides, None when it is C-contiguous.

    Elements that overlap in memory (a broadcast array, a sliding window) overlap in the copy as well: written out, they
    could take any amount of memory.
    """
    if array.flags.c_contiguous:
        return array.nbytes, 0, None
    low, high = byte_bounds(array)
    if high - low < array.nbytes:
        return high - low, array_address(array) - low, array.strides
    return array.nbytes, 0, packed_strides(array)


def place(store: Store, copies: CopyCounter, array: Array, reason: str) -> Array:
    """A copy of `array` in the store, counted under `reason`. It has no gaps, and its axes are ordered alike in memory.

    Raises:
        OutOfMemory: the store cannot hold it.
    """
    nbytes, inner, strides = _layout(array)
    if nbytes == array.nbytes:
        copied = store.empty(array.shape, array.dtype, strides=strides)
        copies.copy_into(copied, array, reason)
        return copied
    root = store.empty(nbytes, np.uint8)
    copies.copy_into(root, np.asarray(_Span(array, array_address(array) - inner, nbytes)), reason)
    return np.ndarray(array.shape, array.dtype, root, inner, strides)


def placed(array: Array, root: npt.NDArray[np.uint8]) -> Array:
    """The copy that `place` made of `array` earlier, given its bytes."""
    _, inner, strides = _layout(array)
    return np.ndarray(array.shape, array.dtype, root, inner, strides)
