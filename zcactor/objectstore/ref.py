"""A region: the name of one object in some process's arena, as frames carry it.

A reference is (process, object, offset), never an address, because each process maps an arena at an address of its own.
The idea is iceoryx2's relocatable pointer-and-offset. A region is 56 bytes on the wire (`REGION_NBYTES`), a FlatBuffers
struct, so it is copied as a block and never parsed field by field.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from zcactor.errors import ProtocolError

__all__ = ["OWNER_NBYTES", "REGION_NBYTES", "REGION_STRUCT", "Region", "RegionKind", "check_bounds"]

OWNER_NBYTES: Final = 16
"""Bytes of a process id: 128 random bits, so an id never repeats while a process remembers it."""

REGION_STRUCT: Final = Struct("<16sQQQQBBHI")
"""The wire layout: owner, id, offset, nbytes, pin, kind, authenticate, seal, rkey; little-endian."""

REGION_NBYTES: Final = 56
"""Bytes of one region on the wire; ``schemas/zcactor.fbs`` declares the same struct."""


class RegionKind(IntEnum):
    """The use that the receiver is to make of a region."""

    ARRAY = 0
    """Bytes to read; they do not change while a lease exists."""
    MOVED = 1
    """Bytes whose write access is handed over; the sender's own view of them is dead."""
    REF = 2
    """An object that is not resolved yet or lives in another process; nbytes is 0."""
    ACTOR = 3
    """An actor handle; there are no bytes to map."""
    DEVICE = 4
    """Bytes in GPU memory, which do not change while a lease exists. The offset is that among all extents of the
    owner's GPU memory, and not in its arena."""


class Region(NamedTuple):
    """The reference to one object of one process, as it travels in a frame.

    `kind` is a plain int that equals a `RegionKind`, because building an enum member costs more than the rest of
    decoding a region.
    """

    kind: int
    """Value of a `RegionKind`."""
    owner: bytes
    """The 16-byte id of the process whose arena holds the object."""
    id: int
    """Key of the object in the owner's table (u64)."""
    offset: int
    """Offset in bytes from the start of the owner's arena. Of a reference: the key under which its outcome will be
    pushed, or 0 where it has to be asked for."""
    nbytes: int
    """Length of the object in bytes."""
    pin: int
    """0: the owner itself sent this and has granted the lease. Otherwise the id of the sender's pin; the receiver
    releases it at the sender once it holds its own lease from the owner."""
    seal: int = 0
    """Entry of the owner's table of seals (u16), which a reader by RDMA checks; 0: none."""
    rkey: int = 0
    """The rkey (u32) of a memory region of the owner's device around all the bytes; 0: the reader has to ask for it."""
    authenticate: int = 0
    """1: the bytes belong to a pickle (u8), where wrong bytes are memory errors. They are authenticated on their way,
    independently of the agreement about arrays."""


_MAX_KIND: Final = max(RegionKind)


def check_bounds(region: Region, arena_nbytes: int) -> None:
    """Check that `region` lies inside its owner's arena; call it before anything is mapped or leased.

    Each term is compared by itself (``nbytes > arena - offset``, never ``offset + nbytes > arena``), so the check is
    still right where it is redone in 64-bit arithmetic.

    Args:
        region: the region as the peer sent it; its fields may hold any u64.
        arena_nbytes: bytes of the owner's arena, from its handshake.

    Raises:
        ProtocolError: the kind is unknown, or a byte of the region is outside the arena. The message gives value and
            limit.
    """
    kind, _, object_id, offset, nbytes, *_ = region
    if not 0 <= kind <= _MAX_KIND:
        raise ProtocolError(f"region of object {object_id} has kind {kind}; known kinds are 0 to {_MAX_KIND:d}")
    if offset < 0 or nbytes < 0 or offset > arena_nbytes or nbytes > arena_nbytes - offset:
        raise ProtocolError(
            f"region of object {object_id} is {nbytes} bytes at offset {offset}, "
            f"outside its owner's arena of {arena_nbytes} bytes"
        )
