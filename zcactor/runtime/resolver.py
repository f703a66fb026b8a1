"""What the regions in frames stand for: objects of this process, of the sender, and of third processes.

A region of the sender's own comes with a lease. For one of a third process a lease is asked for there, and the sender
keeps the object until it is had (`zcactor.objectstore.ref.Region.pin`); where it is not to be had, from the sender.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.errors import ObjectLost, OutOfMemory, ProtocolError, RemoteError, ZcactorError
from zcactor.future import OwnRef, RefHolder
from zcactor.handle import ActorHold
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part
from zcactor.runtime.holders import granted, reached
from zcactor.runtime.locations import LostPart, outcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Mapping

    from zcactor.objectstore.lease import Lease
    from zcactor.objectstore.store import Store
    from zcactor.rpc.session import Session
    from zcactor.runtime.connections import Connections
    from zcactor.runtime.locations import Locations
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = ["Resolver"]

_COMING = Part(0, None, 0, 0)
"""Holds the place of a part that is not here yet."""


class Resolver:
    """Makes parts of regions. On the loop's thread.

    Args:
        tasks: of the process that receives them.
        sessions: its own.
        connections: to third processes.
        requests: ask these for leases.
        store: its objects.
        exports: promises and actors of ours, by object id.
        locations: bring bytes that cannot be mapped.
    """

    def __init__(
        self, tasks: Tasks, sessions: Sessions, connections: Connections, requests: Requests, store: Store,
        exports: Mapping[int, Any], locations: Locations,
    ) -> None:  # fmt: skip
        self._tasks = tasks
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._store = store
        self._exports = exports
        self._locations = locations
        self._process = sessions.process

    def import_region(
        self, session: Session, region: Region, unread: bool, sealed: bool
    ) -> tuple[Part, asyncio.Future[Part] | None]:
        """See `zcactor.rpc.hub.Hub`: the part that a region stands for, leased from a third process if need be.

        Raises:
            ProtocolError: it is outside the memory that it names.
        """
        kind, owner, object_id, offset, nbytes, *_ = region
        if owner == self._process:
            holder: Any
            if kind <= RegionKind.MOVED:
                holder = self._store.lookup(object_id)
                if holder is not None:
                    low = offset - holder.offset
                    if low < 0 or low + nbytes > holder.nbytes:
                        raise ProtocolError(f"a reference to object {object_id} lies outside its {holder.nbytes} bytes")
            else:
                holder = self._exports.get(object_id)
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
                part = self._locations.remote(session, region)
                found = part if unread else self._locations.bring(part, sealed=sealed)
                return (found, None) if isinstance(found, Part) else (_COMING, found)
            if kind == RegionKind.MOVED and session.connection.writable_mapping is None:
                return self._later(kind, self._open_writable, session, region, granted(self._process, session, region))
            return reached(session, region, granted(self._process, session, region)), None
        known = self._locations.known(region)
        if known is not None:
            if region.pin:
                session.release(region.pin)
            return known, None
        return self._later(kind, self._adopt, session, region, unread, sealed)

    def _later(
        self, kind: int, bring: Callable[..., Coroutine[Any, Any, Part]], *args: object
    ) -> tuple[Part, asyncio.Future[Part]]:
        return _COMING, self._tasks.begin(outcome(kind, bring, *args))

    async def _open_writable(self, session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
        try:
            await session.connection.open_writable()
            return reached(session, region, holder)
        except (ZcactorError, OSError) as error:
            return Part(region.kind, LostPart(f"write access to a moved array could not be had: {error}"), 0, 0)

    async def _adopt(self, session: Session, region: Region, unread: bool, sealed: bool) -> Part:
        """Get a lease of our own from the owner, a third process, then let go of the sender's pin. The bytes are read
        as well where they cannot be mapped, unless they are to stay `unread`."""
        try:
            owner = await self._connections.connect(region.owner)
            if not await self._requests.ask(owner, "lease", region.id):
                place = self._sessions.describe(region.owner)
                raise ObjectLost(f"object {region.id:x} is no longer held by its owner, {place}")
            if region.kind <= RegionKind.MOVED and region.nbytes and not owner.connection.maps:
                part = self._locations.remote(owner, region)
                return part if unread else await self._locations.read(part, sealed=sealed)
            holder = granted(self._process, owner, region)
            if region.kind == RegionKind.MOVED:
                await owner.connection.open_writable()
            return reached(owner, region, holder)
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
            place = await self._requests.ask(session, "adopt", region.pin, region.kind, region.offset, region.nbytes)
            ours = region._replace(owner=session.peer_process, id=place[0], offset=place[1], pin=0, seal=0, rkey=0)
            if ours.kind <= RegionKind.MOVED and ours.nbytes and not session.connection.maps:
                part = self._locations.remote(session, ours)
                return part if unread else await self._locations.read(part, sealed=sealed)
            holder = granted(self._process, session, ours)
            if ours.kind == RegionKind.MOVED:
                await session.connection.open_writable()
            return reached(session, ours, holder)
        except (ZcactorError, OSError) as error:
            found = error.original if isinstance(error, RemoteError) else error
            full = found.with_traceback(None) if isinstance(found, OutOfMemory) else None
            text = f"its owner has ended ({failure}), and it is not to be had from whoever passed it on: {found}"
            return Part(region.kind, LostPart(text, full), 0, 0)
