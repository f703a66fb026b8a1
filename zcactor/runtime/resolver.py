"""What the regions in frames stand for: objects of this process, of the sender, and of third processes.

A region of the sender's own comes with a lease. For one of a third process a lease is asked for there, and the sender
keeps the object until it is had (`zcactor.objectstore.ref.Region.pin`); where it is not to be had, from the sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.errors import ObjectLost, OutOfMemory, ProtocolError, RemoteError, ZcactorError
from zcactor.future import OwnRef, RefHolder
from zcactor.handle import ActorHold
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind, check_bounds
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part
from zcactor.runtime.locations import LostPart, outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from zcactor.rpc.session import Session
    from zcactor.runtime.process import Process

__all__ = ["Resolver"]

_COMING = Part(0, None, 0, 0)
"""Holds the place of a part that is not here yet."""


class Resolver:
    """Makes parts of regions. On the loop's thread.

    Args:
        process: that receives them.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    def import_region(
        self, session: Session, region: Region, unread: bool, sealed: bool
    ) -> tuple[Part, asyncio.Future[Part] | None]:
        """See `zcactor.rpc.hub.Hub`: the part that a region stands for, leased from a third process if need be.

        Raises:
            ProtocolError: it is outside the memory that it names.
        """
        kind, owner, object_id, offset, nbytes, *_ = region
        process = self._process
        if owner == process.process:
            holder: Any
            if kind <= RegionKind.MOVED:
                holder = process.store.lookup(object_id)
                if holder is not None:
                    low = offset - holder.offset
                    if low < 0 or low + nbytes > holder.nbytes:
                        raise ProtocolError(f"a reference to object {object_id} lies outside its {holder.nbytes} bytes")
            else:
                holder = process.exports.get(object_id)
                if holder is not None:
                    holder = OwnRef(holder) if isinstance(holder, Call) else holder
            if holder is None:
                holder = LostPart(
                    f"object {object_id:x} of this process was freed before the reference to it came back"
                )
            if session.peer_process == owner and not region.pin:  # sent to ourselves: `holder` is all that it needs
                session.release(object_id)
            return Part(kind, holder, offset, nbytes, region.authenticate), None
        if owner == session.peer_process:
            if kind <= RegionKind.MOVED and nbytes and not session.connection.maps:
                part = process.locations.remote(session, region)
                found = part if unread else process.locations.bring(part, sealed=sealed)
                return (found, None) if isinstance(found, Part) else (_COMING, found)
            if kind == RegionKind.MOVED and session.connection.writable_mapping is None:
                return self._later(kind, self._open_writable, session, region, self.granted(session, region))
            return self.reached(session, region, self.granted(session, region)), None
        known = process.locations.known(region)
        if known is not None:
            if region.pin:
                session.release(region.pin)
            return known, None
        return self._later(kind, self._adopt, session, region, unread, sealed)

    def _later(
        self, kind: int, bring: Callable[..., Coroutine[Any, Any, Part]], *args: object
    ) -> tuple[Part, asyncio.Future[Part]]:
        return _COMING, self._process.begin(outcome(kind, bring, *args))

    def granted(self, session: Session, region: Region) -> Lease | RefHolder | ActorHold:
        """The holder of the lease that the peer of `session`, its owner, has granted us. It is made before anything
        else is tried: when it is lost the lease goes back, and so it does where what follows fails. For `reached`."""
        kind, owner, object_id, offset, nbytes, *_ = region
        if kind <= RegionKind.MOVED:
            moved = kind == RegionKind.MOVED
            return Lease(owner, object_id, offset, nbytes, 0, None, session.release, moved, self._process.process)
        if kind == RegionKind.REF:
            return RefHolder(owner, object_id, session.release)
        return ActorHold(owner, object_id, session.release)

    def reached(self, session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
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

    async def _open_writable(self, session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
        try:
            await session.connection.open_writable()
            return self.reached(session, region, holder)
        except (ZcactorError, OSError) as error:
            return Part(region.kind, LostPart(f"write access to a moved array could not be had: {error}"), 0, 0)

    async def _adopt(self, session: Session, region: Region, unread: bool, sealed: bool) -> Part:
        """Get a lease of our own from the owner, a third process, then let go of the sender's pin. The bytes are read
        as well where they cannot be mapped, unless they are to stay `unread`."""
        try:
            owner = await self._process.connect(region.owner)
            if not await self._process.ask(owner, "lease", region.id):
                place = self._process.describe(region.owner)
                raise ObjectLost(f"object {region.id:x} is no longer held by its owner, {place}")
            if region.kind <= RegionKind.MOVED and region.nbytes and not owner.connection.maps:
                part = self._process.locations.remote(owner, region)
                return part if unread else await self._process.locations.read(part, sealed=sealed)
            holder = self.granted(owner, region)
            if region.kind == RegionKind.MOVED:
                await owner.connection.open_writable()
            return self.reached(owner, region, holder)
        except (ZcactorError, OSError) as error:
            if region.kind == RegionKind.ACTOR and region.pin:  # held by the passer for us, as long as it keeps the pin
                pin, region = region.pin, region._replace(pin=0)
                return Part(region.kind, ActorHold(region.owner, region.id, lambda _: session.release(pin)), 0, 0)
            return await self._from_passer(session, region, unread, sealed, error)
        finally:
            if region.pin:
                session.release(region.pin)

    async def _from_passer(
        self, session: Session, region: Region, unread: bool, sealed: bool, failure: Exception
    ) -> Part:
        """The object from whoever passed the reference on, and holds it, where its owner cannot be asked."""
        try:
            if not region.pin or region.kind > RegionKind.REF:
                raise ObjectLost("nobody else has it")
            place = await self._process.ask(session, "adopt", region.pin, region.kind, region.offset, region.nbytes)
            ours = region._replace(owner=session.peer_process, id=place[0], offset=place[1], pin=0, seal=0, rkey=0)
            if ours.kind <= RegionKind.MOVED and ours.nbytes and not session.connection.maps:
                part = self._process.locations.remote(session, ours)
                return part if unread else await self._process.locations.read(part, sealed=sealed)
            holder = self.granted(session, ours)
            if ours.kind == RegionKind.MOVED:
                await session.connection.open_writable()
            return self.reached(session, ours, holder)
        except (ZcactorError, OSError) as error:
            found = error.original if isinstance(error, RemoteError) else error
            full = found.with_traceback(None) if isinstance(found, OutOfMemory) else None
            text = f"its owner has ended ({failure}), and it is not to be had from whoever passed it on: {found}"
            return Part(region.kind, LostPart(text, full), 0, 0)
