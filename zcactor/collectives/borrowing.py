"""Inputs that are borrowed: read-only while members of a group read them, and as before afterwards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from zcactor.collectives.kinds import Array

__all__ = ["Borrowing"]

_lock: Final = threading.Lock()
_lent: Final[dict[int, tuple[Array, int]]] = {}
"""Arrays that were writable when they were lent first, by id, each with the number of its borrowings."""


class Borrowing:
    """One borrowing of an array. Several operations may borrow one array at the same time: it becomes writable again
    with the end of the last loan. Any thread may call any method.

    Only the array itself becomes read-only. Views that were made of it before are not found.
    """

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array: Array | None = array
        key = id(array)
        with _lock:
            entry = _lent.get(key)
            if entry is not None:
                _lent[key] = array, entry[1] + 1
            elif array.flags.writeable:
                array.flags.writeable = False
                _lent[key] = array, 1
            else:
                self._array = None  # it is read-only anyway

    def end(self) -> None:
        """Give the array back. Idempotent."""
        array, self._array = self._array, None
        if array is None:
            return
        key = id(array)
        with _lock:
            _, count = _lent[key]
            if count > 1:
                _lent[key] = array, count - 1
                return
            del _lent[key]
            try:
                array.flags.writeable = True
            except ValueError:  # NumPy refuses where the memory was sealed meanwhile: it was passed to an actor as well
                return
