"""What a message refers to besides its payload: bytes in an arena, references to results, handles of actors.

A `Part` on the sending side names a *holder*, the object that keeps the thing alive there; sending it to a peer grants
that peer a lease (`Holder.grant`) and gives the `Region` that travels. On the receiving side a region becomes a part
again, whose holder is the receiver's own lease.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from zcactor.objectstore.table import LeaseTable

__all__ = ["Granting", "Holder", "Part"]


class Granting(Protocol):
    """The side of a session that hands out leases to its peer."""

    peer_process: bytes
    leases: LeaseTable

    def pin(self, holder: object) -> int:
        """Keep `holder` alive until the peer has a lease of its own from the owner; returns the pin's id."""


class Holder(Protocol):
    """Keeps something alive that peers may be given a lease on."""

    def grant(self, session: Granting) -> tuple[bytes, int, int]:
        """Lease it to the session's peer: (owner's process id, object id in the owner's table, pin id or 0)."""


class Part(NamedTuple):
    """One thing that a message refers to."""

    kind: int
    """A `zcactor.objectstore.ref.RegionKind`."""
    holder: Any
    """A `Holder`."""
    offset: int
    """Bytes from the start of the owner's arena; 0 for what is not bytes."""
    nbytes: int
    """Length in bytes; 0 for what is not bytes."""
    authenticate: int = 0
    """1: a pickle refers to them; see `zcactor.objectstore.ref.Region.authenticate`."""
