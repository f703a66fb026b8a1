"""A region: how one object in some process's arena is named in a frame.

A reference is (process, object, offset), never an address: each process maps an arena wherever it likes. The idea is
iceoryx2's relocatable pointer-and-offset. A region is 56 bytes on the wire (`REGION_NBYTES`), a FlatBuffers struct, so
it is copied as a block and never parsed field by field.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from zcactor.errors import ProtocolError

__all__ = ["OWNER_NBYTES", "REGION_NBYTES", "REGION_STRUCT", "Region", "RegionKind", "check_bounds"]

OWNER_NBYTES: Final = 16
"""Bytes of a process id: 128 random bits, so ids never repeat while anybody remembers one."""

REGION_STRUCT: Final = Struct("<16sQQQQBBHI")
"""The wire layout: owner, id, offset, nbytes, pin, kind, authenticate, seal, rkey; little-endian."""

REGION_NBYTES: Final = 56
"""Bytes of one region on the wire; ``schemas/zcactor.fbs`` declares the same struct."""


class RegionKind(IntEnum):
    """What the receiver is meant to make of a region."""

    ARRAY = 0
    """Bytes to read; they do not change while a lease stands."""
    MOVED = 1
    """Bytes whose write access is handed over: the sender's own view of them is dead."""
    REF = 2
    """An object that is not resolved yet or lives elsewhere; offset and nbytes are 0."""
    ACTOR = 3
    """An actor handle; there are no bytes to map."""


class Region(NamedTuple):
    """One object of one process, as it travels in a frame.

    `kind` is a plain int that equals a `RegionKind`, because building an enum member costs more than the rest of
    decoding a region.
    """

    kind: int
    """A `RegionKind`."""
    owner: bytes
    """The 16-byte id of the process whose arena holds the object."""
    id: int
    """Key of the object in the owner's table (u64)."""
    offset: int
    """Bytes from the start of the owner's arena."""
    nbytes: int
    """Length of the object in bytes."""
    pin: int
    """0: the owner itself sent this and has granted the lease. Otherwise the id of the sender's pin, to be released at
    the sender once the receiver holds its own lease from the owner."""
    seal: int = 0
    """Entry of the owner's table of seals (u16), which a reader by RDMA checks; 0: none."""
    rkey: int = 0
    """Key (u32) of a memory region of the owner's device around all the bytes; 0: the reader has to ask for it."""
    authenticate: int = 0
    """1: the bytes belong to a pickle (u8), where wrong ones are memory errors. They are authenticated on their way,
    whatever is agreed for arrays."""


_MAX_KIND: Final = max(RegionKind)


def check_bounds(region: Region, arena_nbytes: int) -> None:
    """Check that `region` lies inside its owner's arena; call it before anything is mapped or leased.

    Each term is compared by itself (``nbytes > arena - offset``, never ``offset + nbytes > arena``), so the check is
    still right where it is redone in 64-bit arithmetic.

    Args:
        region: what the peer sent; fields may hold any u64.
        arena_nbytes: bytes of the owner's arena, from its handshake.

    Raises:
        ProtocolError: the kind is unknown, or some byte of the region is outside the arena. Names value and limit.
    """
    kind, _, object_id, offset, nbytes, *_ = region
    if not 0 <= kind <= _MAX_KIND:
        raise ProtocolError(f"region of object {object_id} has kind {kind}; known kinds are 0 to {_MAX_KIND:d}")
    if offset < 0 or nbytes < 0 or offset > arena_nbytes or nbytes > arena_nbytes - offset:
        raise ProtocolError(
            f"region of object {object_id} is {nbytes} bytes at offset {offset}, "
            f"outside its owner's arena of {arena_nbytes} bytes"
        )
