"""Inputs that are borrowed: read-only while members of a group read them, and as before afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.native import hot

if TYPE_CHECKING:
    from zcactor.collectives.kinds import Array

__all__ = ["Borrowing"]


class Borrowing:
    """One borrowing of an array. Several operations may borrow one array at the same time: it becomes writable again
    with the end of the last loan. Any thread may call any method.

    Only the array itself becomes read-only. Views that were made of it before are not found.
    """

    __slots__ = ("_array",)

    def __init__(self, array: Array) -> None:
        self._array: Array | None = array if hot.lend(array) else None  # else it is read-only anyway

    def end(self) -> None:
        """Give the array back. Idempotent."""
        array, self._array = self._array, None
        if array is not None:
            hot.give_back(array)
