"""The vocabulary of frames: kinds, statuses, flags, and the greeting."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

from zcactor.transport.version import PROTOCOL_VERSION

__all__ = ["MAX_FORWARDS", "PROTOCOL_VERSION", "UNCREDITED", "Flags", "Hello", "Kind", "Status", "owner_word"]


class Kind(IntEnum):
    """The purpose of a frame."""

    HELLO = 0
    """The speaker's greeting: the first frame of each direction."""
    CALL = 1
    """Run method `code` of `actor`; `id` names the call in later frames."""
    RESPONSE = 2
    """The end of call `id`, with a `Status` in `code`."""
    ITEM = 3
    """Item number `extra` of the stream that call `id` opened."""
    STREAM_CREDIT = 4
    """The consumer of stream `id` accepts `extra` more items."""
    CANCEL = 5
    """Stop call `id`. Exactly one RESPONSE still answers it."""
    RELEASE = 6
    """A frame with releases only, when no other frame is there to carry them."""
    CREDIT = 7
    """A frame with credits only, when no other frame is there to carry them."""
    GOODBYE = 8
    """No further frame comes from this side."""
    REGIONS = 9
    """A frame with regions of the message of kind `code` and that id, when one frame has no room for all. The message's
    own frame follows, and frames of other messages may come between."""
    PUSH = 10
    """The outcome of a promise that was passed to this process as an argument, with a `Status` in `code`. `id` is the
    key under which it was announced (the region's `offset`), `extra` the owner's `owner_word`. With a status other than
    OK the payload is empty, and the receiver asks the owner. The value of a graph's node comes likewise: `extra` is the
    `owner_word` of the graph's key, `id` the number of the node above that of the run (`zcactor.graphs.layout`)."""
    FORWARD = 11
    """Push the result of call `id` to the process in the payload, under the key `extra`. It is number `code` of the
    call's FORWARD frames. The RESPONSE says by bit `code` of its `extra` whether that was done."""
    DIAL = 12
    """Open a data socket to this side, which cannot open one (`zcactor.transport.tcp.pull`)."""


UNCREDITED: Final = frozenset({Kind.CREDIT, Kind.GOODBYE})
"""Frames that take no credit, because they return credits, or end the need for them. The two receives that a connection
posts beyond its window are for these frames (see `zcactor.transport.credits`)."""


MAX_FORWARDS: Final = 64
"""FORWARD frames of one call, at most: the RESPONSE has a bit for each. The owner itself pushes to all others."""


def owner_word(process: bytes) -> int:
    """The word by which a PUSH names the owner of the promise, or the graph: the first 8 bytes of its id, or its key,
    little-endian."""
    return int.from_bytes(process[:8], "little")


class Status(IntEnum):
    """The end of a call, as the `code` of a RESPONSE."""

    OK = 0
    """The payload is the result."""
    ERROR = 1
    """The method raised; the payload is the marshalled exception."""
    CANCELLED = 2
    """The call was cancelled before or while it ran."""
    STREAM_END = 3
    """The stream has given all its items."""
    NO_SUCH_ACTOR = 4
    """The process hosts no actor with that index."""
    STOPPED = 5
    """The actor stopped before the call started."""
    KILLED = 6
    """The actor was ended while the call ran."""
    MOVED = 7
    """The actor moves to another node, and the call did not start: payload and regions are its arguments, with which
    the caller sends it again."""


class Flags(IntFlag):
    """Bits that tell the receiver how to read a frame's payload."""

    KWARGS = 1
    """The last element of the argument list is the map of keyword arguments."""
    SPILLED = 2
    """The payload was too large for a frame and lies in the store, as the object ``regions[0]``. The frame's payload is
    the key and the tag (`zcactor.marshal.spilling`) that open it, or empty where the object is the payload itself; an
    encrypted connection accepts no frame with an empty payload."""


class Hello(NamedTuple):
    """The greeting: the identity of the speaker."""

    version: int
    """The speaker's `PROTOCOL_VERSION` (u16)."""
    process: bytes
    """Id of the process: 16 random bytes."""
    pid: int
    """The operating system's number of the process, its pid (u32)."""
    host: str
    """Host name, at most 1024 bytes of UTF-8."""
    python: str
    """``"major.minor.micro"``; at most 1024 bytes. Peers of another minor version cannot read each other's pickles."""
    role: str
    """``"driver"``, ``"agent"`` or ``"worker"``; at most 1024 bytes."""
    session: int = 0
    """The speaker's number of this connection (u32), which names the connection after its end; 0: none."""
    twin: int = 0
    """The speaker's number (u32) of another connection to the listener, which was open when this one began; 0: none."""

    @property
    def numbers(self) -> int:
        """Both numbers in the one field that carries them: the twin's in the high half."""
        return self.session | self.twin << 32
