"""The resolver, which makes parts of the regions in frames: objects of this process, of the sender, and of third
processes.

A region of the sender's own object comes with a lease. For an object of a third process the lease is requested from
that process, and the sender keeps the object meanwhile (`zcactor.objectstore.ref.Region.pin`). If the third process
cannot grant it, the sender is asked for the object.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from zcactor.api.handle import ActorHold
from zcactor.api.passing import OwnRef, RefHolder
from zcactor.errors import ObjectLost, OutOfMemory, ProtocolError, ZcactorError, original_of
from zcactor.exception_pickling import bare, text_of
from zcactor.objects.adoption import Adoptions
from zcactor.objects.device_reach import DeviceReach
from zcactor.objects.holders import granted, reached
from zcactor.objects.locations import LostPart, outcome
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.peers.leases import Leases
from zcactor.rpc.call import Call
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from zcactor.objects.expectations import Expectations
    from zcactor.objects.locations import Locations
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.lease import Lease
    from zcactor.objectstore.store import Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.head_link import HeadLink
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["Resolver"]

_UNTIL_THEN = LostPart("zcactor was shut down before it had come")
"""The place of a part that comes later; it stays there where the process closes meanwhile."""


def _coming(kind: int) -> Part:
    return Part(kind, _UNTIL_THEN, 0, 0)


def _nothing() -> None:
    """Do nothing: no pin has to be released."""


class Resolver:
    """The parts that a process makes of regions. Used on the loop's thread.

    Args:
        tasks: the tasks of this process, which receives the regions.
        sessions: the sessions of this process.
        connections: connect to third processes.
        requests: ask third processes for leases.
        head: the link to the head, which leases actors.
        store: the store of this process.
        exports: the promises and actors of this process that peers hold, by object id.
        locations: bring bytes that cannot be mapped.
        expectations: the outcomes that will be pushed here.
        copies: counts copies.
    """

    def __init__(
        self, tasks: Tasks, sessions: Sessions, connections: Connections, requests: Requests, head: HeadLink,
        store: Store, exports: Mapping[int, Any], locations: Locations, expectations: Expectations,
        copies: CopyCounter,
    ) -> None:  # fmt: skip
        self._tasks = tasks
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._head = head
        self._store = store
        self._exports = exports
        self._locations = locations
        self._expectations = expectations
        self._process = sessions.process
        self._coming: dict[asyncio.Task[Part], tuple[bytes, bytes]] = {}
        """The tasks that get objects which are passed on here: the owner of each, and the process that passes it on."""
        self.devices = DeviceReach(sessions, tasks, connections, requests, store, locations, copies)

    def import_region(
        self, session: Session, region: Region, unread: bool, sealed: bool
    ) -> tuple[Part, asyncio.Future[Part] | None]:
        """Make the part for a region, leased from a third process if necessary; see `zcactor.rpc.hub.Hub`.

        Raises:
            ProtocolError: the region lies outside of the memory that it names.
        """
        kind, owner, object_id, offset, nbytes, *_ = region
        if kind == RegionKind.DEVICE:
            return self.devices.import_region(session, region, unread)
        if kind == RegionKind.REF and offset:
            return self._announced(session, region), None
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
            if session.peer_process == owner and not region.pin:  # sent to ourselves: `holder` keeps the object
                session.release(object_id)
            return Part(kind, holder, offset, nbytes, region.authenticate), None
        if owner == session.peer_process:
            if kind <= RegionKind.MOVED and nbytes and not session.connection.maps:
                part = self._locations.remote(session, region)
                found = part if unread else self._locations.bring(part, sealed=sealed)
                if isinstance(found, Part):
                    return found, None
                if kind == RegionKind.MOVED:  # another request for it would bring it twice
                    self._note(found, session, region)
                return _coming(kind), found
            if kind == RegionKind.MOVED and session.connection.writable_mapping is None:
                return self._later(kind, self._open_writable, session, region, self._granted(session, region))
            return reached(session, region, self._granted(session, region)), None
        known = self._locations.known(region)
        if known is not None:
            if region.pin:
                session.release(region.pin)
            return known, None
        if kind == RegionKind.ACTOR and owner == self._sessions.head:
            return self._later(kind, self._hold_actor, session, region)
        return self._later(kind, self._adopt, session, region, unread, sealed)

    def _announced(self, session: Session, region: Region) -> Part:
        """Make the part of a promise whose outcome the peer, its owner, will have pushed here."""
        if region.owner != session.peer_process or region.owner == self._process:
            raise ProtocolError(f"a reference to promise {region.id:x} has a key, and is not from the promise's owner")
        holder = RefHolder(region.owner, region.id, session.release_later)
        holder.expected = self._expectations.expect(region.owner, region.offset)
        return Part(region.kind, holder, 0, 0)

    def _granted(self, session: Session, region: Region) -> Lease | RefHolder | ActorHold:
        holder = granted(self._process, session, region)
        if isinstance(holder, RefHolder):
            self._locations.held.note(holder)
        return holder

    def _later(
        self, kind: int, bring: Callable[..., Coroutine[Any, Any, Part]], session: Session, region: Region,
        *args: object,
    ) -> tuple[Part, asyncio.Future[Part]]:  # fmt: skip
        task = self._tasks.begin(outcome(kind, bring, session, region, *args))
        self._note(task, session, region)
        return _coming(kind), task

    def _note(self, task: asyncio.Task[Part], session: Session, region: Region) -> None:
        self._coming[task] = region.owner, session.peer_process
        task.add_done_callback(self._coming.pop)

    async def settled(self, process: bytes) -> None:
        """Return when all objects have come, or are lost, that a process has or passes on and that are under way."""
        if coming := [task for task, between in self._coming.items() if process in between]:
            await asyncio.wait(coming)

    async def _open_writable(self, session: Session, region: Region, holder: Lease | RefHolder | ActorHold) -> Part:
        try:
            await session.connection.open_writable()
            return reached(session, region, holder)
        except (ZcactorError, OSError) as error:
            return Part(region.kind, LostPart(f"write access to a moved array could not be had: {error}"), 0, 0)

    async def _hold_actor(self, session: Session, region: Region) -> Part:
        """Lease an actor for this process. If that fails, the sender holds the actor for us, as long as it keeps the
        pin."""
        pin = partial(session.release, region.pin) if region.pin else _nothing
        try:
            release = await self._head.hold_actor(region.id)
        except ZcactorError:
            release = None
        if release is None:
            release = pin
        else:
            pin()
        return Part(region.kind, ActorHold(region.owner, region.id, lambda _: release()), 0, 0)

    async def _adopt(self, session: Session, region: Region, unread: bool, sealed: bool) -> Part:
        """Get a lease of our own from the owner, a third process, then release the sender's pin. Bytes that cannot be
        mapped are read as well, except with `unread`."""
        try:
            owner = await self._connections.connect(region.owner)
            if not await self._requests.ask(owner, Leases.lease, region.id):
                place = self._sessions.describe(region.owner)
                raise ObjectLost(f"object {region.id:x} is no longer held by its owner, {place}")
            if region.kind <= RegionKind.MOVED and region.nbytes and not owner.connection.maps:
                part = self._locations.remote(owner, region)
                return part if unread else await self._locations.read(part, sealed=sealed)
            holder = self._granted(owner, region)
            if region.kind == RegionKind.MOVED:
                await owner.connection.open_writable()
            return reached(owner, region, holder)
        except (ZcactorError, OSError) as error:
            return await self._from_passer(session, region, unread, sealed, error)
        finally:
            if region.pin:
                session.release(region.pin)

    async def _from_passer(
        self, session: Session, region: Region, unread: bool, sealed: bool, failure: Exception
    ) -> Part:
        """Get the object from the process that passed the reference on and holds the object, when its owner cannot
        grant a lease."""
        try:
            if not region.pin or region.kind > RegionKind.REF:
                raise ObjectLost("nobody else has it")
            session = session.in_use
            place = await self._requests.ask(
                session, Adoptions.lend, region.pin, region.kind, region.offset, region.nbytes
            )
            ours = region._replace(owner=session.peer_process, id=place[0], offset=place[1], pin=0, seal=0, rkey=0)
            if ours.kind <= RegionKind.MOVED and ours.nbytes and not session.connection.maps:
                part = self._locations.remote(session, ours)
                return part if unread else await self._locations.read(part, sealed=sealed)
            holder = self._granted(session, ours)
            if ours.kind == RegionKind.MOVED:
                await session.connection.open_writable()
            return reached(session, ours, holder)
        except (ZcactorError, OSError) as error:
            found = original_of(error)
            full = bare(found, None) if issubclass(type(found), OutOfMemory) else None
            text = (
                f"its owner has ended ({failure}), and it is not to be had from whoever passed it on: {text_of(found)}"
            )
            return Part(region.kind, LostPart(text, full), 0, 0)
