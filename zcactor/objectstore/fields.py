"""The fields by which NumPy's arrays own memory, changed from outside: NumPy lets no array part with its memory without
freeing it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from zcactor.lazy_numpy import np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

__all__ = ["disown", "exchange", "layout_is_known"]


_HEAD: Final = object.__basicsize__
_FIELDS: Final = 56
"""Bytes of data, nd, dimensions, strides, base, descr and flags in ``PyArrayObject_fields`` (numpy/ndarraytypes.h)."""
_BASE: Final = _HEAD + 32
_FLAGS: Final = _HEAD + 48
_HANDLER: Final = _HEAD + _FIELDS + 16
"""Offset of ``mem_handler``, behind the weak references and the buffer's description, which stay where they are."""
_OWNDATA: Final = 0x4
_WRITEABLE: Final = 0x400
_NULL: Final = bytes(8)


@cache
def layout_is_known() -> bool:
    """Whether CPython and NumPy lay arrays out as said here. In a build with another layout, no other function here may
    be called."""
    return (_HEAD, type(np.empty(0)).__basicsize__) == (16, _HANDLER + 8)


def _bytes_of(array: Array, offset: int, nbytes: int) -> Any:
    return (ctypes.c_char * nbytes).from_address(id(array) + offset)


def exchange(array: Array, other: Array) -> None:
    """Swap the fields of two arrays that define the memory that they own; both stay valid."""
    ours, ours_handler = _bytes_of(array, _HEAD, _FIELDS), _bytes_of(array, _HANDLER, 8)
    theirs, theirs_handler = _bytes_of(other, _HEAD, _FIELDS), _bytes_of(other, _HANDLER, 8)
    fields, handler = ours.raw, ours_handler.raw
    # No function is called and no container is made from here on, so no other thread, signal handler or finalizer runs
    # in between: either all fields change, or none.
    ours.raw = theirs.raw
    theirs.raw = fields
    ours_handler.raw = theirs_handler.raw
    theirs_handler.raw = handler


def disown(array: Array, holder: object) -> None:
    """Make `array` a read-only view of `holder` that cannot be made writable again.

    Elements, shape, strides and dtype stay where they are, also for a thread that is reading them and for views whose
    base is the array. The array gives its ownership of the memory back; `holder` keeps the memory from being used
    again. Idempotent.

    Args:
        array: an array that owns its memory, or owned it until another thread called this.
        holder: an object that exports no buffer, and whose ``__array_interface__`` is all of that memory, as bytes,
            read-only.
    """
    owner = np.asarray(holder)[:]  # its base, which becomes the array's base, is the root
    base, owner_base = _bytes_of(array, _BASE, 8), _bytes_of(owner, _BASE, 8)
    handler, owner_handler = _bytes_of(array, _HANDLER, 8), _bytes_of(owner, _HANDLER, 8)
    flags, owner_flags = (ctypes.c_int.from_address(id(each) + _FLAGS) for each in (array, owner))
    # As in `exchange`, nothing runs in between from this look at the flags on: only one of two threads finds an owner.
    if flags.value & _OWNDATA:
        flags.value &= ~(_OWNDATA | _WRITEABLE)
        owner_flags.value |= _OWNDATA
        base.raw = owner_base.raw
        owner_base.raw = _NULL
        owner_handler.raw = handler.raw
        handler.raw = _NULL
