"""Locations: bringing the bytes of objects that cannot be mapped, from their owner or from a process with a copy.

A reader asks the owner for a place (`zcactor.objects.broadcast` decides), takes the bytes there, and reports when it
has them: then it is a place for other readers itself. A place decides by itself how to answer: it grants a lease, like
any owner, or says that it has no copy any more.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar
from weakref import WeakValueDictionary

from zcactor.buggify import buggify, dawdle
from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory, ZcactorError
from zcactor.exception_pickling import bare
from zcactor.logs import logger
from zcactor.objects.broadcast_directory import BroadcastService
from zcactor.objects.holders import Holdings, granted, reached
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind, check_bounds
from zcactor.peers.leases import Leases
from zcactor.rpc.parts import Part
from zcactor.transport.bytes import RemoteRegion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from zcactor.native import hot
    from zcactor.objectstore.placement import Placements
    from zcactor.objectstore.store import Block, Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session
    from zcactor.transport.bytes import Commit, Flow

__all__ = ["LOCATED_NBYTES", "LOCATED_READ_NBYTES", "Locations", "LostPart", "as_arrived", "outcome"]

LOCATED_NBYTES: Final = 2 << 20
"""Bytes from which a reader asks for a place to take an object from. The question and the report afterwards cost both
ends 0.4 ms of processor time, as much as half a transfer of 1 MiB over TCP, and a quarter of one of 2 MiB. Smaller
objects would be delayed by more than they can gain."""
LOCATED_READ_NBYTES: Final = 256 << 20
"""Bytes from which a reader asks where RDMA brings them: at 100 Gbit/s it brings 1 MiB in 90 us, and this size in 20
ms; below this size the question would be noticeable. So an array that a loop passes at each step takes a frame each way
and the READs, and nothing else."""
ATTEMPTS: Final = 4
"""Number of places that a reader tries before it takes the bytes from the owner, at any cost."""


class LostPart:
    """The holder of an object whose bytes cannot be had; every use of it raises `ObjectLost`, or the error that it was
    given.

    Args:
        reason: of the loss.
        error: an error to raise in place of `ObjectLost`.
        unread: the part as it arrived, where its bytes only had no room here.
    """

    __slots__ = ("_error", "reason", "unread")

    def __init__(self, reason: str, error: ZcactorError | None = None, unread: Part | None = None) -> None:
        self.reason = reason
        self._error = error
        self.unread = unread

    def of(self, part: Part) -> LostPart:
        """The holder for one of several parts with the same bytes."""
        return LostPart(self.reason, self._error, part if type(self._error) is OutOfMemory else None)

    def raise_error(self) -> NoReturn:
        """Raise the reason of the loss: `ObjectLost`, or the error that the part was given."""
        raise ObjectLost(self.reason) if self._error is None else bare(self._error, None)

    @property
    def __array_interface__(self) -> Any:
        self.raise_error()

    def grant(self, _: Any) -> tuple[bytes, int, int]:
        """Raise, because nothing can be passed on."""
        self.raise_error()


def as_arrived(part: Part) -> Part:
    """The part whose bytes can be read once more, for one whose bytes had no room; any other part itself."""
    unread = part.holder.unread if type(part.holder) is LostPart else None
    return part if unread is None else unread


async def outcome(kind: int, bring: Callable[..., Awaitable[Part]], *args: object) -> Part:
    """Return the part that `bring` of `args` gives. An error is not raised, but becomes a `LostPart`, which tells it to
    every user of the part."""
    try:
        return await bring(*args)
    except Exception as error:  # any error: calls wait for the part, and nobody retrieves the task's exception
        logger.exception("an object could not be brought here")
        return Part(kind, LostPart(f"it could not be brought here: {error!r}"), 0, 0)


_T = TypeVar("_T")
_Key = tuple[bytes, int, int, int, int]
"""Key of some bytes: owner, object, offset, number of bytes, and protection: 1 where they are authenticated on their
way, `_SEALED` where decryption checks them, otherwise 0."""
_SEALED: Final = 2


class _Near:
    """Kept by a `Lease` whose bytes are mapped from a copy: the lease on the copy, and the lease on the object
    itself."""

    __slots__ = ("copy", "lease")

    def __init__(self, lease: RemoteLease, copy: Lease) -> None:
        self.lease = lease
        self.copy = copy


class _Destination(NamedTuple):
    """The destination of a pull; see `zcactor.transport.base.Connection.pull`."""

    address: int
    keep: Any
    commit: Commit | None


def _returned(_: int) -> None:
    """Do nothing: the leases in a `_Near` return themselves."""


def _for(held: Mapping[_Key, _T], key: _Key) -> _T | None:
    """The entry for a key. Authenticated bytes also serve a request for an array."""
    found = held.get(key)
    return held.get((*key[:4], 1)) if found is None and not key[4] else found


class Locations:
    """The bytes of objects that cannot be mapped, each brought once. A request while they come waits for the same
    transfer; a later request gets the bytes that have come, as long as this process holds them. Used on the loop's
    thread.

    Where only the data of pickles is authenticated, bytes that came for an array do not serve a pickle, but bytes that
    came for a pickle serve an array. Arrays that were moved here are not shared between requests: their receiver may
    write to them.

    Args:
        tasks: run the transfers.
        sessions: the sessions of the process.
        connections: connect to processes with copies.
        requests: ask owners for places.
        store: the store, whose blocks are offered as copies.
        placements: give the destinations.
        counters: count the bytes brought.
    """

    def __init__(
        self, tasks: Tasks, sessions: Sessions, connections: Connections, requests: Requests, store: Store,
        placements: Placements, counters: hot.Counters,
    ) -> None:  # fmt: skip
        self.machine = ""
        """Name of this host for processes that may map our arena, see `zcactor.control.node_table.own_machine`; empty
        where no process may."""
        self.held = Holdings()
        """The holders of values that are not here."""
        self.bring_device: Callable[[Part], Part | asyncio.Task[Part]] = lambda part: part
        """Does the same as `bring` for an array on a GPU, see `zcactor.objects.device_reach.DeviceReach.bring`."""
        self._tasks = tasks
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._store = store
        self._placements = placements
        self._counters = counters
        self._here: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Part]] = {}

    def remote(self, session: Session, region: Region, *, soon: bool = False) -> Part:
        """Make the part for an object on which the peer of `session` has granted us a lease. Its bytes can be read, or
        the part passed on unread.

        Args:
            session: the session with the owner.
            region: the object.
            soon: whether the owner waits for the end of the lease.

        Raises:
            ProtocolError: the bytes do not lie in the peer's arena.
        """
        lease = RemoteLease(session, region, soon)  # gives it back if we raise
        check_bounds(region, session.connection.peer.arena_nbytes)
        self.held.note(lease)
        return Part(region.kind, lease, region.offset, region.nbytes, region.authenticate)

    def known(self, region: Region) -> Part | None:
        """The part for an object whose bytes came before and are still here, or None."""
        kind, owner, object_id, offset, nbytes, *_, authenticate = region
        if kind != RegionKind.ARRAY or buggify("bring again"):
            return None
        holder = _for(self._here, (owner, object_id, offset, nbytes, authenticate))
        return None if holder is None else Part(kind, holder, holder.offset, nbytes, authenticate)

    def bring(self, part: Part, *, sealed: bool = False) -> Part | asyncio.Task[Part]:
        """Return `part` itself, unless it is a lease on bytes elsewhere: then the part with the bytes here, or a task
        that gets it.

        The task is shared by all requests, and does not raise: a part that cannot be had is a `LostPart`. A lease ends
        with the last part that has it.

        Args:
            part: the part.
            sealed: see `zcactor.rpc.hub.Hub.import_region`.
        """
        lease = part.holder
        if type(lease) is not RemoteLease:
            return self.bring_device(part) if part.kind == RegionKind.DEVICE else part
        if lease.taken is not None:
            taken: Part = lease.taken
            return taken._replace(kind=part.kind)
        if part.kind != RegionKind.ARRAY:
            return self._tasks.begin(outcome(part.kind, self._bring, part))
        if lease.session.connection.integrity != "frames" and not sealed:  # an array comes like a pickle
            part = part._replace(authenticate=1)
        key = lease.owner, lease.id, part.offset, part.nbytes, _SEALED if sealed else part.authenticate
        holder = _for(self._here, key)
        if holder is not None:
            return Part(part.kind, holder, holder.offset, part.nbytes, part.authenticate)
        task = _for(self._coming, key)
        if task is None:
            task = self._coming[key] = self._tasks.begin(outcome(part.kind, self._bring, part, sealed))
            task.add_done_callback(partial(self._arrived, key))
        return task

    async def read(self, part: Part, *, sealed: bool = False) -> Part:
        """Return the part of `bring` when its bytes are here. Cancelling leaves the transfer to other and later
        requests."""
        found = self.bring(part, sealed=sealed)
        del part
        if isinstance(found, Part):
            return found
        await asyncio.wait((found,))
        return found.result()

    async def settled(self, owner: bytes) -> None:
        """Return when the transfers of objects of `owner` have ended that are under way."""
        if coming := [task for key, task in self._coming.items() if key[0] == owner]:
            await asyncio.wait(coming)

    def _arrived(self, key: _Key, task: asyncio.Task[Part]) -> None:
        del self._coming[key]
        if not task.cancelled() and task.exception() is None:
            holder = task.result().holder
            if type(holder) is not LostPart:
                self._here[key] = holder

    async def _bring(self, part: Part, sealed: bool = False) -> Part:
        kind, lease, _, nbytes, authenticate = part
        try:
            least = LOCATED_READ_NBYTES if lease.session.connection.one_sided else LOCATED_NBYTES
            if kind == RegionKind.ARRAY and nbytes >= least:
                holder = await self._from_anywhere(lease, authenticate, sealed)
            else:
                holder = await self._pull(kind, lease.owner, lease, authenticate, sealed)
        except OutOfMemory as error:
            return Part(kind, LostPart(f"there is no room for it here: {error}", bare(error, None), part), 0, 0)
        except (ZcactorError, OSError) as error:
            return Part(kind, LostPart(f"it could not be brought here: {error}"), 0, 0)
        return Part(kind, holder, holder.offset, nbytes, authenticate)

    async def _pull(self, kind: int, owner: bytes, lease: RemoteLease, authenticate: int, sealed: bool) -> Block:
        """Pull the bytes of a lease into an object of ours. The lease is on an object of the process `owner`, or on a
        copy of it."""
        wanted = RemoteRegion(
            lease.id, lease.offset, lease.nbytes, lease.seal, lease.rkey, bool(authenticate), sealed
        )  # fmt: skip
        block: Block = await self._pulled(lease.session, wanted, lambda: self._destination(owner, lease.nbytes))
        block.sealed = kind != RegionKind.MOVED
        return block

    def _destination(self, source: bytes, nbytes: int) -> _Destination:
        """Return a block of the store for bytes of the process `source`, as the destination of a pull. Its memory is
        taken from the system by the thread that receives the bytes.

        Raises:
            OutOfMemory: the store is full.
        """
        block = self._placements.take(source, nbytes, commit=False)
        return _Destination(block.address, block, partial(self._store.commit, block.offset))

    async def fetch(
        self, lease: RemoteLease, start: int, nbytes: int, address: int, keep: object, commit: Commit | None = None
    ) -> None:
        """Pull a part of the bytes of a lease to memory of the caller's. Nothing is kept for other requests, so the
        bytes may be others later.

        Args:
            lease: on the bytes.
            start: offset of the part in them.
            nbytes: bytes of the part.
            address: of the memory in this process; for RDMA it lies in the store.
            keep: holds the memory.
            commit: takes the memory from the system, as of `zcactor.transport.base.Connection.pull`.

        Raises:
            ConnectionLost, ObjectLost, OutOfMemory, ProtocolError: as `zcactor.transport.base.Connection.pull`.
        """
        wanted = RemoteRegion(lease.id, lease.offset + start, nbytes, lease.seal, lease.rkey)
        await self._pulled(lease.session, wanted, lambda: _Destination(address, keep, commit))

    async def flows(self, leases: Sequence[RemoteLease], start: int, nbytes: int) -> list[Flow] | None:
        """Prepare to take a part of the bytes of several leases side by side as they arrive. The caller takes them all,
        by `zcactor.transport.tcp.flow.take_flows`, and counts them by `flowed`.

        Args:
            leases: on bytes of any processes.
            start: offset of the part in each.
            nbytes: bytes of the part.

        Returns:
            A flow for each lease; None where `fetch` has to be used for them.

        Raises:
            ProtocolError: a range does not lie inside its owner's arena.

        Cancelling leaves none.
        """
        flows: list[Flow] = []
        whole = False
        try:
            for lease in leases:
                wanted = RemoteRegion(lease.id, lease.offset + start, nbytes, lease.seal, lease.rkey)
                flow: Flow | None = await lease.session.in_use.connection.flow(wanted)
                if flow is None:
                    return None
                flows.append(flow)
            whole = True
            return flows
        finally:
            if not whole:
                for each in flows:
                    each.end()
                    each.left()

    def flowed(self, nbytes: int) -> None:
        """Count bytes that were taken as they arrived."""
        self._counters.bytes_received += nbytes

    async def _pulled(self, session: Session, wanted: RemoteRegion, destination: Callable[[], _Destination]) -> Any:
        """Pull a region to ``destination()``, and count the bytes. Returns what keeps the memory."""
        while True:
            session = session.in_use  # twins share their leases
            connection = session.connection
            address, keep, commit = destination()
            await dawdle("pull")
            try:
                await connection.pull(wanted, address, keep, commit)
                break
            except (ConnectionLost, ObjectLost):  # the owner finds no lease by a connection that it has closed
                if not session.is_replaced:
                    raise
        nbytes, integrity = wanted.nbytes, connection.integrity
        if connection.one_sided:
            self._counters.bytes_read += nbytes
        else:
            self._counters.bytes_received += nbytes
        if (integrity == "arrays" and not wanted.sealed) or (wanted.authenticate and integrity == "frames"):
            self._counters.bytes_authenticated += nbytes
        return keep

    async def _from_anywhere(self, lease: RemoteLease, authenticate: int, sealed: bool) -> Block | Lease:
        """Take the bytes from the place that their owner names, or from the owner itself where that fails."""
        failed = b""
        for _ in range(ATTEMPTS):
            owner = lease.session.in_use
            try:
                place, object_id, offset = await self._requests.ask(
                    owner,
                    BroadcastService.source,
                    lease.id,
                    lease.offset,
                    lease.nbytes,
                    self.machine,
                    failed,
                    authenticate,
                )
            except ZcactorError:  # the owner has ended, or has no such object: pulling from it raises the error
                break
            failed = b""
            if not place:
                break
            try:
                region = Region(RegionKind.ARRAY, place, object_id, offset, lease.nbytes, 0, 0, 0, authenticate)
                return await self._from_copy(lease, region, sealed)
            except OutOfMemory:
                self._tell(lease, authenticate, None)
                raise
            except (ZcactorError, OSError):
                failed = place
        if failed:
            self._tell(lease, authenticate, None, failed)
        try:
            block = await self._pull(RegionKind.ARRAY, lease.owner, lease, authenticate, sealed)
        except (ZcactorError, OSError):
            self._tell(lease, authenticate, None)
            raise
        self._tell(lease, authenticate, block)
        return block

    async def _from_copy(self, lease: RemoteLease, region: Region, sealed: bool) -> Block | Lease:
        session = await self._connections.connect(region.owner)
        if buggify("copy lost") or not await self._requests.ask(session, Leases.lease, region.id):
            raise ObjectLost(f"{self._sessions.describe(region.owner)} has no copy of it any more")
        connection = session.connection
        if not connection.maps:
            copied = self.remote(session, region).holder
            block = await self._pull(RegionKind.ARRAY, lease.owner, copied, region.authenticate, sealed)
            self._tell(lease, region.authenticate, block)
            return block
        ours = self._sessions.process
        copy: Any = reached(session, region, granted(ours, session, region)).holder
        # The lease names the owner's object: it can be passed on even when the process with the copy has ended.
        near = _Near(lease, copy)
        return Lease(lease.owner, lease.id, lease.offset, lease.nbytes, copy.address, near, _returned, False, ours)

    def _tell(self, lease: RemoteLease, authenticate: int, block: Block | None, failed: bytes = b"") -> None:
        """Report the end and the result of a transfer to the owner."""
        copy_id, copy_offset = 0, 0
        if block is not None:
            copy_id, copy_offset = self._store.export(block), block.offset
        facts = lease.id, lease.offset, lease.nbytes, copy_id, copy_offset, self.machine, failed, authenticate

        async def told(owner: Session) -> None:
            with contextlib.suppress(ZcactorError):  # the owner has ended, or forgets the transfer after a while
                await self._requests.ask(owner, BroadcastService.located, *facts)

        self._tasks.start(told(lease.session.in_use))
