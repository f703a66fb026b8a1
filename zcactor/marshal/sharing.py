"""Sharing: from when on an array of the store is nobody's to write to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from zcactor.marshal.arrays import byte_bounds, innermost, root_of
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from zcactor.objectstore.store import Store

__all__ = ["is_of", "protect", "share"]

Array = npt.NDArray[Any]


def is_of(store: Store, root: object) -> bool:
    """Whether `root`, from `root_of`, is an object of `store` or was granted to its process. Those of a runtime before
    this one are memory like any other: nobody could get at it under our name."""
    return root.store is store if type(root) is Block else type(root) is Lease and root.reader == store.process


def protect(array: Array) -> None:
    """Make `array` and the array that it is a view of read-only, so that views made from now on are too.

    What NumPy cannot stop: views made before stay as they are, and an array that owns its memory (NumPy allocated it
    itself) can be made writable again by its ``flags``. Arrays of `zcactor.empty` cannot.
    """
    owner = innermost(array)
    if owner.flags.writeable:
        owner.setflags(write=False)
    if array.flags.writeable:
        array.setflags(write=False)


def share(store: Store, array: Array, *, seal: bool = True) -> Block | None:
    """The block of `store` that `array` lies in, sealed; None when it lies in none.

    Found by the array's base, or by its address: NumPy itself allocates in the store, and other libraries make objects
    of their own over memory of it.

    Args:
        store: this process's.
        array: any dtype of plain bytes, shape and strides.
        seal: make `array` read-only too; False for a temporary view made by us.
    """
    root = root_of(array)
    if type(root) is Block and root.store is store:
        if not root.sealed:
            store.seal(root, innermost(array))
        block = root
    else:
        found = None if type(root) is Lease else store.block_at(*byte_bounds(array))
        if found is None:
            return None
        if not found.sealed:
            store.seal(found)
            store.keep(found, innermost(array))
        block = found
    if seal:
        protect(array)
    return block
