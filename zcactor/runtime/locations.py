"""The bytes of objects that cannot be mapped, brought here from their owner or from whoever has a copy.

A reader asks the owner where to take them from (`zcactor.runtime.origins` decides), takes them there, and tells when it
has them: then it is a place for others itself. What a place may answer is its own affair: it gives a lease, as any
owner does, or says that the copy is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakValueDictionary

from zcactor.errors import ObjectLost, OutOfMemory, ZcactorError
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind, check_bounds
from zcactor.rpc.parts import Part
from zcactor.transport.base import RemoteRegion

if TYPE_CHECKING:
    from zcactor.objectstore.store import Block
    from zcactor.rpc.session import Session
    from zcactor.runtime.process import Process

__all__ = ["LOCATED_NBYTES", "LOCATED_READ_NBYTES", "Locations", "LostPart"]

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


_Key = tuple[bytes, int, int, int]


class _Near:
    """Kept by a `Lease` whose bytes are mapped from a copy: the lease on the copy, and that on the object itself."""

    __slots__ = ("copy", "lease")

    def __init__(self, lease: RemoteLease, copy: Lease) -> None:
        self.lease = lease
        self.copy = copy


def _returned(_: int) -> None:
    """What a `_Near` keeps is returned by itself."""


class Locations:
    """Brings the bytes of objects that cannot be mapped, each once: who wants them while they come waits for the same
    transfer, and who wants them later is given what has come, for as long as anybody here has it. On the loop's thread.

    Arrays that were moved to us take no part: each is somebody's to write to.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._here: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        self._coming: dict[_Key, asyncio.Task[Part]] = {}

    def remote(self, session: Session, region: Region) -> Part:
        """The part for an object of the peer of `session`, which has granted us the lease: bytes to be read, or to be
        passed on as they are.

        Raises:
            ProtocolError: they do not lie in the peer's arena.
        """
        kind, owner, object_id, offset, nbytes, _, seal, rkey = region
        check_bounds(region, session.connection.peer.arena_nbytes)
        return Part(kind, RemoteLease(owner, object_id, offset, nbytes, session, seal, rkey), offset, nbytes)

    def known(self, region: Region) -> Part | None:
        """The part for an object whose bytes have come before and are still here."""
        kind, owner, object_id, offset, nbytes, *_ = region
        if kind != RegionKind.ARRAY:
            return None
        holder = self._here.get((owner, object_id, offset, nbytes))
        return None if holder is None else Part(kind, holder, holder.offset, nbytes)

    def bring(self, part: Part) -> Part | asyncio.Task[Part]:
        """`part` itself, unless it is a lease on bytes elsewhere: then the part that has them here, or a task that gets
        them. The task belongs to all who want them, and does not raise: what cannot be had is a `LostPart`. A lease
        ends with the last part that has it."""
        lease = part.holder
        if type(lease) is not RemoteLease:
            return part
        if part.kind != RegionKind.ARRAY:
            return self._process.begin(self._bring(part))
        key = lease.owner, lease.id, part.offset, part.nbytes
        holder = self._here.get(key)
        if holder is not None:
            return Part(part.kind, holder, holder.offset, part.nbytes)
        task = self._coming.get(key)
        if task is None:
            task = self._coming[key] = self._process.begin(self._bring(part))
            task.add_done_callback(partial(self._arrived, key))
        return task

    async def read(self, part: Part) -> Part:
        """The same, when it is here. Cancelling it leaves the transfer to others, and to those who come."""
        found = self.bring(part)
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

    async def _bring(self, part: Part) -> Part:
        kind, lease, _, nbytes = part
        try:
            least = LOCATED_READ_NBYTES if lease.session.connection.kind == "verbs" else LOCATED_NBYTES
            if kind == RegionKind.ARRAY and nbytes >= least:
                holder = await self._from_anywhere(lease)
            else:
                holder = await self._pull(kind, lease.owner, lease)
        except OutOfMemory as error:
            return Part(kind, LostPart(f"there is no room for it here: {error}", error.with_traceback(None)), 0, 0)
        except (ZcactorError, OSError) as error:
            return Part(kind, LostPart(f"it could not be brought here: {error}"), 0, 0)
        return Part(kind, holder, holder.offset, nbytes)

    async def _pull(self, kind: int, owner: bytes, lease: RemoteLease) -> Block:
        """An object of ours with the bytes of a lease, which is on one of the process `owner` or on a copy of it."""
        process, connection, nbytes = self._process, lease.session.connection, lease.nbytes
        block = process.placements.take(owner, nbytes)
        wanted = RemoteRegion(lease.id, lease.offset, nbytes, lease.seal, lease.rkey)
        await connection.pull(wanted, block.address, block)
        if connection.kind == "verbs":
            process.counters.bytes_read += nbytes
        else:
            process.counters.bytes_received += nbytes
        block.sealed = kind != RegionKind.MOVED
        return block

    async def _from_anywhere(self, lease: RemoteLease) -> Block | Lease:
        """The bytes from where their owner says; from the owner itself where that leads nowhere."""
        process, failed = self._process, b""
        for _ in range(ATTEMPTS):
            try:
                place, object_id, offset = await process.ask(
                    lease.session, "source", lease.id, lease.offset, lease.nbytes, process.machine, failed
                )
            except ZcactorError:  # the owner is gone, or has no such object: pulling from it says so
                break
            failed = b""
            if not place:
                break
            try:
                return await self._from_copy(lease, Region(RegionKind.ARRAY, place, object_id, offset, lease.nbytes, 0))
            except OutOfMemory:
                self._tell(lease, None)
                raise
            except (ZcactorError, OSError):
                failed = place
        if failed:
            self._tell(lease, None, failed)
        try:
            block = await self._pull(RegionKind.ARRAY, lease.owner, lease)
        except (ZcactorError, OSError):
            self._tell(lease, None)
            raise
        self._tell(lease, block)
        return block

    async def _from_copy(self, lease: RemoteLease, region: Region) -> Block | Lease:
        process = self._process
        session = await process.connect(region.owner)
        if not await process.ask(session, "lease", region.id):
            raise ObjectLost(f"process {region.owner.hex()[:8]} has no copy of it any more")
        connection = session.connection
        if not connection.maps:
            block = await self._pull(RegionKind.ARRAY, lease.owner, self.remote(session, region).holder)
            self._tell(lease, block)
            return block
        check_bounds(region, connection.peer.arena_nbytes)
        address = connection.map(region.offset, region.nbytes)
        copy = Lease(
            region.owner, region.id, region.offset, region.nbytes, address, connection.mapping, session.release
        )  # fmt: skip
        # It stands for the owner's object: when the process with the copy is gone it can be passed on all the same.
        return Lease(lease.owner, lease.id, lease.offset, lease.nbytes, address, _Near(lease, copy), _returned)

    def _tell(self, lease: RemoteLease, block: Block | None, failed: bytes = b"") -> None:
        """Tell the owner that a transfer has ended, and how."""
        copy_id, copy_offset = 0, 0
        if block is not None:
            copy_id, copy_offset = self._process.store.export(block), block.offset
        facts = lease.id, lease.offset, lease.nbytes, copy_id, copy_offset, self._process.machine, failed
        self._process.start_task(self._told(lease.session, facts))

    async def _told(self, owner: Session, facts: tuple[Any, ...]) -> None:
        with contextlib.suppress(ZcactorError):  # it is gone, and what it knew with it
            await self._process.ask(owner, "located", *facts)
