"""Placing: counted copies of arrays from outside the store into it, laid out so that nothing is expanded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import array_address, byte_bounds, packed_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store

    Array = npt.NDArray[Any]

__all__ = ["is_as_placed", "place", "placed", "room_for"]


_CACHE_LINE: Final = 64
"""Alignment in bytes, as Arrow aligns its buffers."""

_compare: Final = ctypes.CDLL(None).memcmp
"""memcmp(3), which releases the interpreter lock."""
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Span:
    """The bytes from the first to the last that an array's elements touch, as the base of another array."""

    __slots__ = ("__array_interface__", "_keep")

    def __init__(self, keep: object, low: int, nbytes: int) -> None:
        self._keep = keep
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (low, True), "version": 3}


def _layout(array: Array) -> tuple[int, int, tuple[int, ...] | None]:
    """Describe a copy of `array`: its bytes, the offset of its first element, and its strides, None when it is
    C-contiguous.

    Elements that overlap in memory (a broadcast array, a sliding window) overlap in the copy as well: expanded, they
    could take any amount of memory.
    """
    if array.flags.c_contiguous:
        return array.nbytes, 0, None
    low, high = byte_bounds(array)
    if high - low < array.nbytes:
        return high - low, array_address(array) - low, array.strides
    return array.nbytes, 0, packed_strides(array)


def place(store: Store, copies: CopyCounter, array: Array, reason: str) -> Array:
    """Copy `array` into the store, and count the copy under `reason`. The copy has no gaps, and its axes have the same
    order in memory.

    Raises:
        OutOfMemory: the store cannot hold the copy.
    """
    nbytes, inner, strides = _layout(array)
    if nbytes == array.nbytes:
        copied = store.empty(array.shape, array.dtype, strides=strides)
        copies.copy_into(copied, array, reason)
        return copied
    root = store.empty(nbytes, np.uint8)
    copies.copy_into(root, np.asarray(_Span(array, array_address(array) - inner, nbytes)), reason)
    return np.ndarray(array.shape, array.dtype, root, inner, strides)


def room_for(store: Store, arrays: Sequence[Array]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Allocate room in the store for the memory of `arrays`, from the lowest byte to the highest. The arrays are
    contiguous, and their memory is one piece. Addresses keep their alignment, up to a cache line.

    Returns:
        The room, and the bytes of `arrays`.

    Raises:
        OutOfMemory: the store cannot hold the bytes.
    """
    low = min(map(array_address, arrays))
    nbytes = max(array_address(array) + array.nbytes for array in arrays) - low
    lead = low % _CACHE_LINE
    return store.empty(lead + nbytes, np.uint8)[lead:], np.asarray(_Span(arrays, low, nbytes))


def placed(array: Array, root: npt.NDArray[np.uint8]) -> Array:
    """The copy that `place` made of `array` before, whose bytes are `root`."""
    _, inner, strides = _layout(array)
    return np.ndarray(array.shape, array.dtype, root, inner, strides)


def is_as_placed(array: Array, copied: Array) -> bool:
    """Whether `array` still has the bytes of `copied`, which `place` made of it. A view, or a flag that was set for a
    while, may have allowed a write since. Comparing 40 KB takes 6 us; for large arrays it takes as long as a copy, and
    no memory.

    The result is also False for arrays with gaps or negative strides, whose copy has another layout.
    """
    low, high = byte_bounds(array)
    if high - low != array.nbytes or min(array.strides, default=0) < 0:
        return False
    return not _compare(low, byte_bounds(copied)[0], array.nbytes)
