"""Holders of a peer's objects: the lease that the peer has granted, and the mapped bytes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary, ref

from zcactor.api.handle import ActorHold
from zcactor.api.passing import RefHolder
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import RegionKind, check_bounds
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from zcactor.objectstore.lease import RemoteLease
    from zcactor.objectstore.ref import Region
    from zcactor.rpc.call import Call
    from zcactor.rpc.session import Session

__all__ = ["Holdings", "granted", "reached"]


class Holdings:
    """The holders of values that are not here: of promises of other processes, and of bytes that have not been read. It
    keeps none of them alive. They are noted on the loop's thread, and end on any."""

    def __init__(self) -> None:
        self._holders: dict[int, ref[RefHolder | RemoteLease]] = {}
        self.taken: WeakValueDictionary[tuple[bytes, int], Call] = WeakValueDictionary()
        """The promises of this process with the outcomes of promises whose owners have ended in order, by the owner and
        the id there."""

    def note(self, holder: RefHolder | RemoteLease) -> None:
        """Note a holder. Its entry ends with it, by a function of C, as in `zcactor.objects.promises.Exports`.
        Idempotent."""
        if self.taken and isinstance(holder, RefHolder):
            holder.taken = self.taken.get((holder.owner, holder.id))
        key = id(holder)
        self._holders[key] = ref(holder, partial(self._holders.pop, key))

    def of(self, owner: bytes) -> list[RefHolder | RemoteLease]:
        """The holders of values of a process that have not been taken over."""
        found = [each() for each in self._holders.copy().values()]
        return [each for each in found if each is not None and each.owner == owner and each.taken is None]


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
