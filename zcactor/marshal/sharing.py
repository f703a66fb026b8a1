"""Sharing: from then on nobody may write to an array of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.marshal.arrays import byte_bounds, innermost, root_of
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    import numpy.typing as npt

    from zcactor.objectstore.store import Store

    Array = npt.NDArray[Any]

__all__ = ["is_of", "protect", "share"]


def is_of(store: Store, root: object) -> bool:
    """Whether `root`, from `root_of`, is an object of `store` or was granted to its process. Objects of an earlier
    runtime are ordinary memory: no peer could reach them under this process's id."""
    return root.store is store if type(root) is Block else type(root) is Lease and root.reader == store.process


def protect(array: Array) -> None:
    """Make `array` and the array that it is a view of read-only, so that views made from now on are too.

    NumPy cannot prevent two things: views made before keep their flags, and an array that owns its memory (NumPy
    allocated it) can be made writable again by its ``flags``. Arrays of `zcactor.empty` cannot.
    """
    owner = innermost(array)
    if owner.flags.writeable:
        owner.setflags(write=False)
    if array.flags.writeable:
        array.setflags(write=False)


def share(store: Store, array: Array, *, seal: bool = True) -> Block | None:
    """Seal and return the block of `store` that `array` lies in; None when `array` lies outside the store.

    The block is found by the array's base, or by its address: NumPy itself allocates in the store, and other libraries
    make objects of their own over its memory.

    Args:
        store: the store of this process.
        array: an array of any dtype of plain bytes, with any shape and strides.
        seal: whether to make `array` read-only too; False for a temporary view of this package.
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
