"""The bytes of objects that cannot be mapped, brought here from their owner or from whoever has a copy.

A reader asks the owner where to take them from (`zcactor.runtime.origins` decides), takes them there, and tells when it
has them: then it is a place for others itself. What a place may answer is its own affair: it gives a lease, as any
owner does, or says that the copy is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from weakref import WeakValueDictionary

from zcactor.buggify import buggify, dawdle
from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory, ZcactorError
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind, check_bounds
from zcactor.rpc.parts import Part
from zcactor.runtime.holders import granted, reached
from zcactor.transport.base import RemoteRegion

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from zcactor.objectstore.placement import Placements
    from zcactor.objectstore.store import Block, Store
    from zcactor.rpc.counters import Counters
    from zcactor.rpc.session import Session
    from zcactor.runtime.connections import Connections
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = ["LOCATED_NBYTES", "LOCATED_READ_NBYTES", "Locations", "LostPart", "outcome"]

logger = logging.getLogger("zcactor")

LOCATED_NBYTES: Final = 1 << 20
"""Bytes from which on a reader asks where to take an object from. The question costs a round trip, about 60 us; TCP at
10 Gbit/s takes 900 us for so many bytes. Smaller objects would be delayed by more than they can gain."""
LOCATED_READ_NBYTES: Final = 256 << 20
"""The same by RDMA, which at 100 Gbit/s brings 1 MiB in 90 us, and this in 20 ms: below, the question would be seen. So
an array that a loop passes at each step takes a frame each way and the READs, and nothing else."""
ATTEMPTS: Final = 4
"""How many locations a reader tries before it takes the bytes from the owner whatever that costs."""


class LostPart:
    """Stands for an object whose owner is gone; using it raises `ObjectLost`."""

    __slots__ = ("_error", "reason")

    def __init__(self, reason: str, error: ZcactorError | None = None) -> None:
        self.reason = reason
        self._error = error

    def raise_error(self) -> NoReturn:
        """Raise why it is lost: `ObjectLost`, or the error that it was given."""
        raise ObjectLost(self.reason) if self._error is None else self._error.with_traceback(None)

    @property
    def __array_interface__(self) -> Any:
        self.raise_error()

    def grant(self, _: Any) -> tuple[bytes, int, int]:
        """There is nothing to pass on."""
        self.raise_error()


async def outcome(kind: int, bring: Callable[..., Awaitable[Part]], *args: object) -> Part:
    """The part that `bring` of `args` gives. Does not raise: an error of whatever kind is a `LostPart`, so that whoever
    uses it learns of it."""
    try:
        return await bring(*args)
    except Exception as error:  # of any kind: calls wait for the part, and nobody looks at the task
        logger.exception("an object could not be brought here")
        return Part(kind, LostPart(f"it could not be brought here: {error!r}"), 0, 0)


_T = TypeVar("_T")
_Key = tuple[bytes, int, int, int, int]
"""Owner, object, offset, bytes, and how they come: 1 where they are authenticated on their way, `_SEALED` where
they are checked when they are opened, and 0 else."""
_SEALED: Final = 2


class _Near:
    """Kept by a `Lease` whose bytes are mapped from a copy: the lease on the copy, and that on the object itself."""

    __slots__ = ("copy", "lease")

    def __init__(self, lease: RemoteLease, copy: Lease) -> None:
        self.lease = lease
        self.copy = copy


def _returned(_: int) -> None:
    """What a `_Near` keeps is returned by itself."""


def _for(held: Mapping[_Key, _T], key: _Key) -> _T | None:
    """What there is for a key: what was authenticated does for an array as well."""
    found = held.get(key)
    return held.get((*key[:4], 1)) if found is None and not key[4] else found


class Locations:
    """Brings the bytes of objects that cannot be mapped, each once: who wants them while they come waits for the same
    transfer, and who wants them later is given what has come, for as long as anybody here has it. On the loop's thread.

    Where arrays are not authenticated and what belongs to a pickle is, bytes that have come for an array do for no
    pickle; the other way they do.
    Arrays that were moved to us take no part: each is somebody's to write to.

    Args:
        tasks: bring them.
        sessions: of the process.
        connections: to those who have copies.
        requests: ask owners where these are.
        store: where the bytes come to lie.
        placements: room for them.
        counters: of what was brought.
    """

    def __init__(
        self, tasks: Tasks, sessions: Sessions, connections: Connections, requests: Requests, store: Store,
        placements: Placements, counters: Counters,
    ) -> None:  # fmt: skip
        self.machine = ""
        """What names this host for those who may map our arena, see `zcactor.runtime.nodes.own_machine`; empty
        where nobody is to."""
        self._tasks = tasks
        self._sessions = sessions
        self._connections = connections
        self._requests = requests
        self._store = store
        self._placements = placements
        self._counters = counters
        self._here: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Part]] = {}

    def remote(self, session: Session, region: Region) -> Part:
        """The part for an object of the peer of `session`, which has granted us the lease: bytes to be read, or to be
        passed on as they are.

        Raises:
            ProtocolError: they do not lie in the peer's arena.
        """
        kind, owner, object_id, offset, nbytes, _, seal, rkey, authenticate = region
        lease = RemoteLease(owner, object_id, offset, nbytes, session, seal, rkey)  # first: it goes back if we raise
        check_bounds(region, session.connection.peer.arena_nbytes)
        return Part(kind, lease, offset, nbytes, authenticate)

    def known(self, region: Region) -> Part | None:
        """The part for an object whose bytes have come before and are still here."""
        kind, owner, object_id, offset, nbytes, *_, authenticate = region
        if kind != RegionKind.ARRAY or buggify("bring again"):
            return None
        holder = _for(self._here, (owner, object_id, offset, nbytes, authenticate))
        return None if holder is None else Part(kind, holder, holder.offset, nbytes, authenticate)

    def bring(self, part: Part, *, sealed: bool = False) -> Part | asyncio.Task[Part]:
        """`part` itself, unless it is a lease on bytes elsewhere: then the part that has them here, or a task that gets
        them. The task belongs to all who want them, and does not raise: what cannot be had is a `LostPart`. A lease
        ends with the last part that has it. `sealed`: see `zcactor.rpc.hub.Hub.import_region`."""
        lease = part.holder
        if type(lease) is not RemoteLease:
            return part
        if part.kind != RegionKind.ARRAY:
            return self._tasks.begin(outcome(part.kind, self._bring, part))
        if lease.session.connection.integrity != "frames" and not sealed:  # an array's bytes come as a pickle's do
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
        """The same, when it is here. Cancelling it leaves the transfer to others, and to those who come."""
        found = self.bring(part, sealed=sealed)
        del part
        if isinstance(found, Part):
            return found
        await asyncio.wait((found,))
        return found.result()

    def _arrived(self, key: _Key, task: asyncio.Task[Part]) -> None:
        del self._coming[key]
        if not task.cancelled() and task.exception() is None:
            holder = task.result().holder
            if type(holder) is not LostPart:
                self._here[key] = holder

    async def _bring(self, part: Part, sealed: bool = False) -> Part:
        kind, lease, _, nbytes, authenticate = part
        try:
            least = LOCATED_READ_NBYTES if lease.session.connection.kind == "verbs" else LOCATED_NBYTES
            if kind == RegionKind.ARRAY and nbytes >= least:
                holder = await self._from_anywhere(lease, authenticate, sealed)
            else:
                holder = await self._pull(kind, lease.owner, lease, authenticate, sealed)
        except OutOfMemory as error:
            return Part(kind, LostPart(f"there is no room for it here: {error}", error.with_traceback(None)), 0, 0)
        except (ZcactorError, OSError) as error:
            return Part(kind, LostPart(f"it could not be brought here: {error}"), 0, 0)
        return Part(kind, holder, holder.offset, nbytes, authenticate)

    async def _pull(self, kind: int, owner: bytes, lease: RemoteLease, authenticate: int, sealed: bool) -> Block:
        """An object of ours with the bytes of a lease, which is on one of the process `owner` or on a copy of it."""
        session, nbytes = lease.session, lease.nbytes
        wanted = RemoteRegion(lease.id, lease.offset, nbytes, lease.seal, lease.rkey, bool(authenticate), sealed)
        while True:
            connection = session.connection
            block = self._placements.take(owner, nbytes)
            await dawdle("pull")
            try:
                await connection.pull(wanted, block.address, block)
                break
            except ConnectionLost:
                if session.successor is None or not session.is_replaced:
                    raise
                session = session.successor  # of two connections to one process this one stays, and has the lease, too
        if connection.kind == "verbs":
            self._counters.bytes_read += nbytes
        else:
            self._counters.bytes_received += nbytes
        if (connection.integrity == "arrays" and not sealed) or (authenticate and connection.integrity == "frames"):
            self._counters.bytes_authenticated += nbytes
        block.sealed = kind != RegionKind.MOVED
        return block

    async def _from_anywhere(self, lease: RemoteLease, authenticate: int, sealed: bool) -> Block | Lease:
        """The bytes from where their owner says; from the owner itself where that leads nowhere."""
        failed = b""
        for _ in range(ATTEMPTS):
            try:
                place, object_id, offset = await self._requests.ask(
                    lease.session, "source", lease.id, lease.offset, lease.nbytes, self.machine, failed, authenticate
                )
            except ZcactorError:  # the owner is gone, or has no such object: pulling from it says so
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
        if buggify("copy lost") or not await self._requests.ask(session, "lease", region.id):
            raise ObjectLost(f"{self._sessions.describe(region.owner)} has no copy of it any more")
        connection = session.connection
        if not connection.maps:
            copied = self.remote(session, region).holder
            block = await self._pull(RegionKind.ARRAY, lease.owner, copied, region.authenticate, sealed)
            self._tell(lease, region.authenticate, block)
            return block
        ours = self._sessions.process
        copy: Any = reached(session, region, granted(ours, session, region)).holder
        # It stands for the owner's object: when the process with the copy is gone it can be passed on all the same.
        near = _Near(lease, copy)
        return Lease(lease.owner, lease.id, lease.offset, lease.nbytes, copy.address, near, _returned, False, ours)

    def _tell(self, lease: RemoteLease, authenticate: int, block: Block | None, failed: bytes = b"") -> None:
        """Tell the owner that a transfer has ended, and how."""
        copy_id, copy_offset = 0, 0
        if block is not None:
            copy_id, copy_offset = self._store.export(block), block.offset
        facts = lease.id, lease.offset, lease.nbytes, copy_id, copy_offset, self.machine, failed, authenticate
        self._tasks.start(self._told(lease.session, facts))

    async def _told(self, owner: Session, facts: tuple[Any, ...]) -> None:
        with contextlib.suppress(ZcactorError):  # it is gone, or forgets the transfer after a while
            await self._requests.ask(owner, "located", *facts)
