"""What stands for an object of a peer: the lease that it has granted, and the bytes in their place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.future import RefHolder
from zcactor.handle import ActorHold
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind, check_bounds
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.objectstore.ref import Region
    from zcactor.rpc.session import Session

__all__ = ["granted", "reached"]


def granted(process: bytes, session: Session, region: Region) -> Lease | RefHolder | ActorHold:
    """The holder of the lease that the peer of `session`, its owner, has granted us. It is made before anything else
    is tried: when it is lost the lease goes back, and so it does where what follows fails. For `reached`.

    Args:
        process: 16 bytes that name ours.
        session: with the owner.
        region: what it has granted.
    """
    kind, owner, object_id, offset, nbytes, *_ = region
    if kind <= RegionKind.MOVED:
        return Lease(owner, object_id, offset, nbytes, 0, None, session.release, kind == RegionKind.MOVED, process)
    if kind == RegionKind.REF:
        return RefHolder(owner, object_id, session.release)
    return ActorHold(owner, object_id, session.release)


def reached(session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
    """The part for an object of the peer of `session`: what `granted` gave, with its bytes in place.

    Raises:
        ProtocolError: they do not lie in the peer's arena.
    """
    if isinstance(holder, Lease):
        connection = session.connection
        check_bounds(region, connection.peer.arena_nbytes)
        address = connection.map(region.offset, region.nbytes, writable=holder.writable)
        holder.place(address, connection.writable_mapping if holder.writable else connection.mapping)
    return Part(region.kind, holder, region.offset, region.nbytes, region.authenticate)
