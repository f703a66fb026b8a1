"""The system actor: what every process does for its peers."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from zcactor.errors import ObjectLost
from zcactor.future import BorrowedRef, OwnRef, packed_result
from zcactor.interface import MARK, Interface
from zcactor.marshal.sealed import Sealed
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.store import Block
from zcactor.rpc.call import Call
from zcactor.runtime.host import current_call
from zcactor.runtime.origins import Copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.objectstore.store import Store
    from zcactor.observe.stats import Stats
    from zcactor.runtime.adoption import Adoptions
    from zcactor.runtime.origins import Origins
    from zcactor.runtime.parting import Parting
    from zcactor.runtime.promises import Promises
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.twins import Twins

__all__ = ["SystemActor", "system_interface"]


def inline(function: Any) -> Any:
    """Mark a system method as short."""
    setattr(function, MARK, {"inline": True})
    return function


def _settle(done: asyncio.Future[None], _: Call) -> None:
    if not done.done():
        done.set_result(None)


class SystemActor:
    """Hosted at index 0 of every process. Its callers are authenticated peers.

    Args:
        pid: of the process.
        store: its objects.
        sessions: to its peers.
        promises: that these may hold.
        adoptions: what it has made its own.
        origins: where copies of its objects are.
        twins, parting: agree that connections are closed; the latter gives None where none are when idle.
        stats: gives its figures.
    """

    def __init__(
        self, pid: int, store: Store, sessions: Sessions, promises: Promises, adoptions: Adoptions, origins: Origins,
        twins: Twins, parting: Callable[[], Parting | None], stats: Callable[[], Stats],
    ) -> None:  # fmt: skip
        self._pid = pid
        self._store = store
        self._sessions = sessions
        self._promises = promises
        self._adoptions = adoptions
        self._origins = origins
        self._twins = twins
        self._parting = parting
        self._stats = stats
        self.revive: Callable[[int], Any] = lambda _: None
        """The agent's way to find an actor that nobody holds at the moment."""
        self.worker: Any = None
        """The `zcactor.runtime.worker.Worker` in a worker process."""
        self.print_log: Any = None
        """Where a driver shows what actors print."""

    async def lease(self, object_id: int) -> bool:
        """Give the caller a lease on an object of ours that a third process told it of; False when it is gone."""
        holder: Any = self._store.lookup(object_id)
        if holder is None:
            holder = self._promises.exports.get(object_id) or self.revive(object_id)
        if holder is None:
            return False
        session = current_call.get().session
        with session.lock:
            if isinstance(holder, Block):
                holder.grant(session)
            else:
                session.leases.grant(object_id, holder)
        return True

    async def hold(self, ended: list[int], held: list[int]) -> None:
        """The caller holds these objects of ours, and no others, of all that we have leased to it by connections that
        have ended at its side.

        Args:
            ended: its numbers of them.
            held: ids of objects.
        """
        session = current_call.get().session
        for other in list(self._sessions.all()):
            hello = other.peer_hello
            if other.peer_process == session.peer_process and hello is not None and hello.session in ended:
                other.connection.abort()  # we have not heard of its end yet; what it has leased is parked then
                await other.connection.aclose()
        reader = session.connection.reader
        if reader is not None:
            self._store.parking.hold(reader, [(session.peer_process, number) for number in ended], set(held))

    async def adopt(self, pin: int, kind: int, offset: int, nbytes: int) -> tuple[int, int]:
        """Make an object ours that we passed on to the caller, who cannot lease it from its owner, and lease it to the
        caller: its id here, and where in our arena the bytes are.

        Args:
            pin: by which we keep it for the caller.
            kind: a `RegionKind`.
            offset: of the bytes in the owner's arena.
            nbytes: that are wanted.

        Raises:
            ObjectLost: we have no more of it than its name, or the caller has not been given it.
            OutOfMemory: there is no room for it here.
        """
        session = current_call.get().session
        holder = session.leases.get(pin) if pin >> 63 else None
        own: OwnRef | Block
        if isinstance(holder, BorrowedRef) and kind == RegionKind.REF and holder.call.known:
            own, place = OwnRef(holder.call), 0
        elif isinstance(holder, Lease | RemoteLease) and kind <= RegionKind.MOVED:
            low = offset - holder.offset
            if low < 0 or low + nbytes > holder.nbytes:
                raise ObjectLost(f"bytes {low} to {low + nbytes} of an object of {holder.nbytes} bytes")
            own, first = await self._adoptions.adopt(holder, kind)
            place = first + low
        else:
            raise ObjectLost(f"pid {self._pid} has no value under that name")
        with session.lock:
            _, object_id, _ = own.grant(session)
        return object_id, place

    async def source(
        self, object_id: int, offset: int, nbytes: int, machine: str, failed: bytes, authenticate: int
    ) -> tuple[bytes, int, int]:
        """Where the caller, who holds a lease on an object of ours, is to take its bytes from: a process, and the id
        and the offset of the copy there; no process stands for this one. See `zcactor.runtime.origins.Origins`.

        Raises:
            ObjectLost: there is no such object.
        """
        block = self._store.lookup(object_id)
        if block is None:
            raise ObjectLost(f"object {object_id:x} is no longer held by its owner, pid {self._pid}")
        reader = current_call.get().session.peer_process
        return (await self._origins.source(reader, block, offset, nbytes, machine, failed, authenticate))[:3]

    async def located(
        self, object_id: int, offset: int, nbytes: int, copy_id: int, copy_offset: int, machine: str, failed: bytes,
        authenticate: int,
    ) -> None:  # fmt: skip
        """The caller's transfer of an object of ours is over, and it has a copy of that id, or with 0 none."""
        block = self._store.lookup(object_id)
        if block is not None:
            reader = current_call.get().session.peer_process
            copy = Copy(reader, copy_id, copy_offset, machine) if copy_id else None
            self._origins.ended(reader, block, offset, nbytes, copy, failed, authenticate)

    async def part(self) -> bool:
        """Whether the caller may close its connection to us, which we do not need either."""
        parting = self._parting()
        return parting is not None and parting.agree(current_call.get().session)

    async def retire(self) -> bool:
        """Whether the caller may close this connection, beside which there is another one."""
        return self._twins.agree(current_call.get().session)

    async def fetch(self, object_id: int) -> Sealed:
        """The outcome of a promise of ours, when it is known, without opening it."""
        call = self._promises.exports.get(object_id)
        if not isinstance(call, Call):
            raise ObjectLost(f"promise {object_id:x} is no longer held by its owner, pid {self._pid}")
        if not call.known:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call.when_known(functools.partial(_settle, done))
            await done
        call.retrieved = True
        if call.error is not None:
            raise call.error.with_traceback(None)
        return Sealed(*packed_result(call), call.status)

    async def stats(self) -> Any:
        """This process's `zcactor.observe.stats.Stats`, as a plain mapping."""
        return self._stats().plain()

    async def create(
        self, index: int, actor_id: bytes, object_id: int, restarts: int, options: dict[str, Any], recipe: Sealed
    ) -> None:
        """In a worker: make an actor; see `zcactor.runtime.worker.Worker.create`."""
        await self.worker.create(index, actor_id, object_id, restarts, options, recipe)

    async def stop(self, index: int) -> None:
        """In a worker: end an actor after what it has queued."""
        await self.worker.stop(index)

    async def discard(self, index: int) -> None:
        """In a worker: end an actor at once."""
        await self.worker.discard(index)

    async def leave(self, grace: float) -> None:
        """In a worker: end the process; see `zcactor.runtime.worker.Worker.leave`."""
        await self.worker.leave(grace)

    @inline
    def actor_changed(self, actor_id: bytes, state: str, process: bytes, index: int, cause: str) -> None:
        """From the head, to whoever holds a handle of an actor: its node was lost, or it lives elsewhere now.

        Args:
            actor_id: which one.
            state: ``"dead"``, ``"restarting"`` or ``"alive"``.
            process: where it is, or was.
            index: in that process.
            cause: why it is not there any more.
        """
        remote = self._sessions.remotes.get(actor_id)
        if remote is not None:
            remote.changed(state, (process, index), cause)

    @inline
    def log(self, stream: str, text: str) -> None:
        """In a driver: show what an actor has printed."""
        if self.print_log is not None:
            self.print_log(stream, text)

    @inline
    def ping(self) -> int:
        """The process id; answers on the loop."""
        return self._pid


@functools.cache
def system_interface() -> Interface:
    """The methods of `SystemActor`."""
    return Interface.of(SystemActor)
