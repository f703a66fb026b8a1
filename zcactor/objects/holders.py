"""Holders of a peer's objects: the lease that the peer has granted, and the mapped bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.api.handle import ActorHold
from zcactor.api.passing import RefHolder
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind, check_bounds
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.objectstore.ref import Region
    from zcactor.rpc.session import Session

__all__ = ["granted", "reached"]


def granted(process: bytes, session: Session, region: Region) -> Lease | RefHolder | ActorHold:
    """Make the holder of a lease that the peer of `session`, the owner, has granted this process, for `reached`. It is
    made before any step that may fail: dropping it gives the lease back.

    Args:
        process: id of this process, 16 bytes.
        session: the session with the owner.
        region: the region that it has granted.
    """
    kind, owner, object_id, offset, nbytes, *_ = region
    if kind <= RegionKind.MOVED:
        return Lease(owner, object_id, offset, nbytes, 0, None, session.release, kind == RegionKind.MOVED, process)
    if kind == RegionKind.REF:
        return RefHolder(owner, object_id, session.release)
    return ActorHold(owner, object_id, session.release)


def reached(session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
    """Make the part for an object of the peer of `session`, from the result of `granted`, and map its bytes.

    Raises:
        ConnectionLost: the connection has ended.
        OutOfMemory: this process has no address space left for them.
        ProtocolError: the bytes do not lie in the peer's arena.
    """
    if isinstance(holder, Lease):
        connection = session.connection
        check_bounds(region, connection.peer.arena_nbytes)
        mapped = connection.map(region.offset, region.nbytes, writable=holder.writable)
        holder.place(mapped.address, mapped.owner)
    return Part(region.kind, holder, region.offset, region.nbytes, region.authenticate)
