"""Sharing: whether an array travels by reference, and the closing of its memory.

An id stands for bytes that cannot change while anybody knows the id. NumPy's write flag belongs to an array object, and
memory may have many of those. So an array goes by reference when nobody can write to its memory any more:

1. it is the owner of its memory, or the only object over the owner: it is closed, and the owner with it;
2. its memory was closed before.

Any other array is a piece of memory that is still open, which a copy has to be made of.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from zcactor.lazy_numpy import np
from zcactor.marshal.arrays import base_of, byte_bounds, innermost, plain_of, root_of
from zcactor.marshal.placing import place
from zcactor.native import hot
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.store import Store

    Array = npt.NDArray[Any]

__all__ = [
    "CLAIMED",
    "OUTSIDE",
    "PIECE",
    "closable",
    "close_outside",
    "is_of",
    "is_open",
    "reason_to_copy",
    "reopen",
    "seal_copy",
    "share",
    "share_at",
    "snapshot",
]

CLAIMED: Final = (
    "this array takes the result of a group's operation that is not done (out=), and its elements change then: await "
    "that operation first"
)
"""The text of the error where such an array is used."""
OUTSIDE: Final = "argument outside the store"
"""The counted reason for copies of arguments and results whose memory peers cannot reach."""
PIECE: Final = "piece of an open array"
"""The counted reason for copies of arrays whose memory somebody may still write to."""


class _Outside:
    """The state of an array outside the store that is closed for a message, as `Block` and `Lease` have it."""

    __slots__ = ("__weakref__", "closer")

    def __init__(self, closer: object) -> None:
        self.closer = closer


_outside: Final[WeakValueDictionary[int, _Outside]] = WeakValueDictionary()
"""The states by the ids of their arrays. The list that `share` fills keeps both, and so the id."""
_closing = threading.RLock()
"""Held while memory is closed or opened, as several threads may pass one array. A finalizer may pass another one."""


def _forked() -> None:
    global _closing  # a thread that is not in the child may have had it
    _closing = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def is_of(store: Store, root: object) -> bool:
    """Whether `root`, from `root_of`, is an object of `store` or was granted to its process. Objects of an earlier
    runtime are ordinary memory: no peer could reach them under this process's id. So is memory that a fork has made
    private to this process, unless it was closed before, and is as it was."""
    if type(root) is Block:
        return root.store is store and root.is_seen
    return type(root) is Lease and root.reader == store.process and not (root.forked and root.writable)


def closable(array: Array) -> bool:
    """Whether closing `array` closes its memory: it owns the memory, or no other object holds the owner, or it is
    read-only with all that it is a view of, and not just lent.

    Views of an ndarray hold the owner, and those of a subclass hold the array that they were taken of, which names do,
    too: a view of a subclass is never closed. Buffers of `array` itself are not found either.
    """
    root = root_of(array)
    if type(array) is not np.ndarray and base_of(array) is not None:
        return False
    if issubclass(type(root), Block | Lease):
        if root.array is not None and root.array() is array:
            return True
    elif root is not None and type(root) is not bytes:
        return False
    return bool(hot.sole(array)) or not any(_is_writable(each) or hot.lent(each) for each in _chain(array))


def _is_writable(array: Array) -> bool:
    return plain_of(array).flags.writeable


def _holder(store: Store, array: Array) -> Block | Lease | None:
    """The holder of the memory of `array` in `store`, or received from another one; None for other memory."""
    root = root_of(array)
    if issubclass(type(root), Block | Lease):
        return root if is_of(store, root) else None
    return store.block_at(*byte_bounds(array))


def _is_open(holder: Block | Lease) -> bool:
    return holder.writable if type(holder) is Lease else not holder.sealed  # type: ignore[union-attr]


def is_open(store: Store, array: Array) -> bool:
    """Whether the memory of `array` was not closed before."""
    holder = _holder(store, array)
    return holder is None or _is_open(holder)


def share(store: Store, array: Array, closed: list[Any] | None = None) -> Block | Lease | None:
    """Close `array`, and return the holder of its memory, under which it goes by reference.

    The memory is found by the array's base, or by its address: NumPy itself allocates in the store, and other libraries
    make objects of their own over its memory.

    Args:
        store: the store of this process.
        array: an array of any dtype of plain bytes, with any shape and strides; subclasses too.
        closed: a list that receives what is closed by this call, for `reopen`. An array that a group borrows at the
            moment stays closed behind the loan.

    Returns:
        The block, or the lease of a received array; None where a copy has to be made: see `reason_to_copy`.
    """
    holder = _holder(store, array)
    if holder is None:
        return None
    with _closing:
        if _is_open(holder):
            if not closable(array):
                return None
            if closed is not None:
                holder.closer = token = object()
                whole = None if holder.array is None else holder.array()
                writable = [each for each in (*_chain(array), whole) if each is not None and _is_writable(each)]
                closed.append((holder, token, writable))
            if type(holder) is Block:
                store.seal(holder)
                store.keep(holder, innermost(array))
            else:
                holder.seal()  # type: ignore[union-attr]
            for each in _chain(array):
                hot.keep(each)
        else:
            _rely(holder, closed or ())
            hot.keep(array)
    return holder


def close_outside(array: Array, closed: list[Any]) -> None:
    """Close an array outside the store, a copy of which is sent. `closed` is as for `share`."""
    with _closing:
        if _is_writable(array):
            holder = _outside[id(array)] = _Outside(object())
            closed.append((holder, holder.closer, [array]))
        elif (found := _outside.get(id(array))) is not None:
            _rely(found, closed)
        hot.keep(array)


def _rely(holder: Any, closed: Sequence[Any]) -> None:
    """Keep memory closed that another message has closed, as this one relies on it, too."""
    if holder.closer is not None and all(holder.closer is not token for _, token, _ in closed):
        holder.closer = None


def _chain(array: Array) -> Iterator[Array]:
    """An array, and the arrays that it is a view of."""
    base: Any = array
    while issubclass(type(base), np.ndarray):
        yield base
        base = base_of(base)


def share_at(store: Store, low: int, high: int) -> Block | None:
    """The block of `store` under which the addresses ``[low, high)`` go by reference: their memory is closed, or
    this package's own; None where a copy has to be made."""
    found = store.block_at(low, high)
    with _closing:
        if found is None or not (found.sealed or found.private):
            return None
        found.closer = None
        if not found.sealed:
            store.seal(found)
    return found


def reason_to_copy(store: Store, array: Array) -> str:
    """The counted reason for the copy of an array for which `share` has found no holder."""
    inside = is_of(store, root_of(array)) or store.contains(*byte_bounds(array))
    return PIECE if inside else OUTSIDE


def snapshot(store: Store, copies: CopyCounter, array: Array, reason: str) -> tuple[Block, Array]:
    """Copy `array` into the store, and count the copy under `reason`. Nobody can write to the copy.

    Returns:
        The block of the copy, and the copy.

    Raises:
        OutOfMemory: the store cannot hold the copy.
    """
    copied = place(store, copies, array, reason)
    block: Block = root_of(copied)
    seal_copy(block, copied)
    return block, copied


def seal_copy(block: Block, copied: Array) -> None:
    """Let nobody write to `copied`, which lies in `block` and which this package alone has written to."""
    block.private = True
    block.store.seal(block, innermost(copied))
    copied.setflags(write=False)


def reopen(closed: list[Any]) -> None:
    """Undo the closing of arrays for a message that was never sent: those can be written to again that could be before,
    and were not lent. Memory stays closed that another message relies on meanwhile, or that a peer knows."""
    for holder, token, arrays in closed:
        with _closing:
            if holder.closer is not token or getattr(holder, "exported", False):
                continue
            holder.closer = None
            if type(holder) is Block:
                holder.sealed = False
            elif type(holder) is Lease:
                holder.writable = True
            for each in arrays:
                hot.open(each)
    closed.clear()
