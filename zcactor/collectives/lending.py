"""Inputs of operations: all ranks read the elements of the moment of the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.marshal.arrays import root_of
from zcactor.marshal.sharing import closable, is_open
from zcactor.native import hot

if TYPE_CHECKING:
    from zcactor.collectives.kinds import Array
    from zcactor.process.context import LocalProcess

__all__ = ["SNAPSHOT", "alias", "lent_or_copied", "snapshot"]

SNAPSHOT: Final = "snapshot for a group"
"""The counted reason for copies of inputs at the call."""


def snapshot(process: LocalProcess, array: Array) -> bytes:
    """The bytes of a small input, which all ranks read, its own one too. Any thread may call this."""
    process.copies.count(SNAPSHOT, array.nbytes)
    return array.tobytes()


def alias(array: Array) -> Array:
    """Another array over the same elements, whose dtype and shape nobody else can set.

    A view would hold the owner that `array` is a view of, which then has other objects over it, and is not closed by
    passing `array`: see `zcactor.marshal.sharing`.
    """
    if array.base is not None and array.flags.c_contiguous and root_of(array) is None:
        made: Array = hot.array_over((array,), hot.address(array), array)
        return made
    return array.view()


def lent_or_copied(process: LocalProcess, array: Array, out: Array | None = None) -> tuple[Array, Array | None]:
    """Choose the memory in which the ranks read an input. Any thread may call this.

    The array itself is lent where nobody else can write to it: it is read-only until `hot.give_back`. Several
    operations may borrow one array at the same time, and it becomes writable again with the end of the last loan. A
    piece of an array that is still open is copied, which is counted.

    Args:
        process: of the rank.
        array: the input.
        out: the array that takes the result, which is closed by `hot.claim` anyway.

    Returns:
        The array to read, whose dtype and shape nobody else can set; and the one to give back, None where there is
        nothing to give back.

    Raises:
        OutOfMemory: the store has no room for the copy.
    """
    if closable(array) or not is_open(process.store, array):
        return alias(array), array if array is not out and hot.lend(array) else None
    copied = process.store.empty(array.shape, array.dtype)
    process.copies.copy_into(copied, array, SNAPSHOT)
    return copied, None
