"""Parts: the things that a message refers to besides its payload. These are bytes in an arena, references to results,
and handles of actors.

A `Part` on the sending side names a *holder*, the object that keeps the thing alive there. Sending the part to a peer
grants that peer a lease (`Holder.grant`) and gives the `Region` that travels. On the receiving side a region becomes a
part again, whose holder is the receiver's own lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from zcactor.objectstore.table import LeaseTable

__all__ = ["Announced", "Granting", "Holder", "Part", "is_unread"]


class Granting(Protocol):
    """The side of a session that grants leases to its peer."""

    peer_process: bytes
    leases: LeaseTable
    connection: Any

    def pin(self, holder: object) -> int:
        """Keep `holder` alive until the peer has a lease of its own from the owner; returns the pin's id."""


class Holder(Protocol):
    """An object that keeps something alive on which peers may be granted leases."""

    def grant(self, session: Granting) -> tuple[bytes, int, int]:
        """Grant the session's peer a lease: (owner's process id, object id in the owner's table, pin id or 0)."""


class Announced:
    """An argument whose outcome will be pushed to the callee, as the native part writes it."""

    __slots__ = ("id", "key", "label")

    def __init__(self, object_id: int, key: int, label: str) -> None:
        self.id = object_id
        """Id of the promise, on which the callee has a lease."""
        self.key = key
        self.label = label


class Part(NamedTuple):
    """One thing that a message refers to."""

    kind: int
    """Value of a `zcactor.objectstore.ref.RegionKind`."""
    holder: Any
    """The `Holder` that keeps it alive."""
    offset: int
    """Offset in bytes from the start of the owner's arena; 0 for references and handles."""
    nbytes: int
    """Length in bytes; 0 for references and handles."""
    authenticate: int = 0
    """1: a pickle refers to the bytes; see `zcactor.objectstore.ref.Region.authenticate`."""


def is_unread(part: Part) -> bool:
    """Whether the holder is a lease on bytes that cannot be mapped and have not been read. Such a part can be passed
    on, and its bytes are read where its value is needed."""
    return bool(getattr(part.holder, "unread", False))
