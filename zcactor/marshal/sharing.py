"""Sharing: from then on nobody may write to an array of the store."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from zcactor.later import np
from zcactor.marshal.arrays import byte_bounds, innermost, root_of
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    import numpy.typing as npt

    from zcactor.objectstore.store import Store

    Array = npt.NDArray[Any]

__all__ = ["CLAIMED", "closable", "is_of", "protect", "share"]

CLAIMED: Final = (
    "this array takes the result of a group's operation that is not done (out=), and its elements change then: await "
    "that operation first"
)
"""The text of the error where such an array is used."""


def is_of(store: Store, root: object) -> bool:
    """Whether `root`, from `root_of`, is an object of `store` or was granted to its process. Objects of an earlier
    runtime are ordinary memory: no peer could reach them under this process's id."""
    return root.store is store if type(root) is Block else type(root) is Lease and root.reader == store.process


def protect(array: Array) -> None:
    """Make `array` and the array that it is a view of read-only, so that views made from now on are too.

    Where a group borrows one of them at the moment, it stays read-only behind that. NumPy cannot prevent two things:
    views made before keep their flags, and an array that owns its memory (NumPy allocated it) can be made writable
    again by its ``flags``. Arrays of `zcactor.empty` cannot.
    """
    owner = innermost(array)
    hot.keep(owner)
    if array is not owner:
        hot.keep(array)


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


# MERGE: the minimal version of the coordinator's function; take theirs.
def closable(array: Array) -> bool:
    """Whether nobody can write to the memory of `array` once its own flag is off: it is the owner of its memory, or the
    root of a block; or it is read-only, as all that it is a view of; or it is the only object over its owner.

    Args:
        array: exactly an ndarray.
    """
    base: Any = array.base
    if base is None or type(base) is Block or type(base) is Lease:
        return True
    if not array.flags.writeable:
        each: Any = array
        while isinstance(each, np.ndarray) and not each.flags.writeable and not hot.lent(each):
            each = each.base
        if each is None or type(each) in (Block, Lease, bytes):
            return True
    root: Any = base.base if isinstance(base, np.ndarray) else base
    is_root = root is None or type(root) in (Block, Lease)
    del base  # a reference to the owner
    return is_root and _references(array) == _alone()


def _references(array: Array) -> int:
    """The number of references to the array that `array` is a view of, with those that counting makes."""
    return sys.getrefcount(array.base)


@cache
def _alone() -> int:
    """The number of references to an array that has one view and no name: interpreters differ."""
    return _references(np.empty(2)[:1])
