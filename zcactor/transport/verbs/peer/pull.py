"""A pull of one object by RDMA READ: the keys of its bytes, and its requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from zcactor.transport.bytes import RemoteRegion

__all__ = ["Keys", "Pull", "key_at", "pieces_of"]

Keys = Sequence[tuple[int, int]]
"""Keys of the bytes of an object, in order: the end of the bytes of each key, and the key."""


def key_at(keys: Keys, at: int) -> tuple[int, int]:
    """Return the entry for byte `at`."""
    return keys[0] if len(keys) == 1 else keys[bisect_right(keys, at, key=itemgetter(0))]


def pieces_of(nbytes: int, piece: int) -> int:
    """Return the number of READs for `nbytes`."""
    return -(-nbytes // piece)


@dataclass(slots=True, eq=False)
class Pull:
    """The state of a pull."""

    region: RemoteRegion
    address: int
    lkeys: Keys
    rkeys: Keys
    keep: object
    """The owner of the memory at `address`."""
    done: asyncio.Future[None]
    source: int
    """The address of the bytes at the peer."""
    posted: int = 0
    """Bytes whose READs have been posted."""
    arrived: int = 0
    """Bytes that have arrived: those of all lists before the first incomplete one."""
    seal_slot: int = -1
    lists: int = 0
    """Posted lists without a completion."""
    fault: int = 0
    """The first status other than success and flush."""
    flushed: bool = False
    """Whether a READ was flushed because of another pull's fault."""
    most: int = 2
    """Lists that may be under way: few where few bytes have arrived, so that a failure costs no more than these."""
    attempts: int = 1
    restarts: int = 0
    """Number of restarts in a row without any bytes in between."""
    began_at: int = 0
    """Bytes that had arrived at the last restart."""
    began: float = field(default_factory=monotonic)
    abandoned: bool = False
    """Whether no caller waits for it any more."""
    reads: int = field(default=0)
    """Posted requests, without those of seals."""
