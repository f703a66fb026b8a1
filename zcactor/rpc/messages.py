"""What a frame may say: its kinds, statuses and flags, and the greeting.

The numbers are the wire contract; ``schemas/zcactor.fbs`` gives the unit of every field.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from zcactor.transport.base import PROTOCOL_VERSION

__all__ = ["PROTOCOL_VERSION", "UNCREDITED", "Flags", "Hello", "Kind", "Status"]


class Kind(IntEnum):
    """What a frame is for."""

    HELLO = 0
    """Who is speaking. The first frame of each direction."""
    CALL = 1
    """Run method `code` of `actor`; `id` names the call in what follows."""
    RESPONSE = 2
    """The end of call `id`, with a `Status` in `code`."""
    ITEM = 3
    """Item number `extra` of the stream that call `id` opened."""
    STREAM_CREDIT = 4
    """The consumer of stream `id` takes `extra` items more."""
    CANCEL = 5
    """Stop call `id`. It is still answered by exactly one RESPONSE."""
    RELEASE = 6
    """Carries nothing but releases; sent when no other frame is there to carry them."""
    CREDIT = 7
    """Carries nothing but credits; sent when no other frame is there to carry them."""
    GOODBYE = 8
    """No further frame comes from this side."""
    REGIONS = 9
    """Carries regions of the message of kind `code` and that id, when they are too many for one frame. The message's
    own frame follows, and others may come between."""


UNCREDITED: Final = frozenset({Kind.CREDIT, Kind.GOODBYE})
"""Frames that take no credit: they return it, or end the need for it. The two receives that a connection posts beyond
its window are for these (see `zcactor.transport.credits`)."""


class Status(IntEnum):
    """How a call ended; the `code` of a RESPONSE."""

    OK = 0
    """The payload is the result."""
    ERROR = 1
    """The method raised; the payload is the marshalled exception."""
    CANCELLED = 2
    """The call was cancelled before or while it ran."""
    STREAM_END = 3
    """The stream gave all its items."""
    NO_SUCH_ACTOR = 4
    """The process hosts no actor of that index."""
    STOPPED = 5
    """The actor stopped before the call started."""
    KILLED = 6
    """The actor was ended while the call ran."""


class Flags(IntFlag):
    """Bits that say how to read a frame's payload."""

    KWARGS = 1
    """The last element of the argument list is the map of keyword arguments."""
    SPILLED = 2
    """The payload was too large for a frame and lies in the store, as the object ``regions[0]``. The frame's payload is
    the key and the tag (`zcactor.marshal.spilling`) that open it. It is empty where the object is the payload itself;
    a sealed connection takes no such frame."""


class Hello(NamedTuple):
    """Who is speaking."""

    version: int
    """The speaker's `PROTOCOL_VERSION` (u16)."""
    process: bytes
    """16 random bytes that name the process."""
    pid: int
    """Operating system process id (u32)."""
    host: str
    """Host name, at most 1024 bytes of UTF-8."""
    python: str
    """``"major.minor.micro"``; at most 1024 bytes. Peers of another minor version cannot read each other's pickles."""
    role: str
    """``"driver"``, ``"agent"`` or ``"worker"``; at most 1024 bytes."""
    session: int = 0
    """The speaker's number of this connection (u64), by which it speaks of it after its end; 0: none."""
