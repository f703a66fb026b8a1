"""Copies of arrays in GPU memory of other processes: from a GPU that this process does not see, or in pieces through
host memory.

The owner copies each piece to host memory of its own, and leases that to the reader. The reader copies it to its GPU,
from there or, where it cannot map it, from host memory of its own. It asks for the next pieces meanwhile. So an array
that is larger than both stores passes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from zcactor.errors import ConnectionLost, NotInitialized, ObjectLost, ProtocolError, ZcactorError
from zcactor.exception_pickling import bare
from zcactor.lazy_numpy import np
from zcactor.objects.device_waiting import copied, until_done
from zcactor.objects.holders import granted, reached
from zcactor.objectstore.copies import THROUGH_HOST
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from zcactor.device.lease import DeviceLease
    from zcactor.device.memory import DeviceBlock, GpuMemory
    from zcactor.device.staging import Staging
    from zcactor.objects.locations import Locations
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.lease import Lease
    from zcactor.objectstore.store import Store
    from zcactor.peers.requests import Requests
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["DevicePieces"]

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class DevicePieces:
    """The copies that a process makes, and those that its peers make of its arrays. Used on the loop's thread.

    The modules of `zcactor.device` are imported by the first copy.

    Args:
        process: id of this process, 16 bytes.
        tasks: the tasks of this process.
        requests: ask owners for pieces.
        locations: bring pieces that cannot be mapped.
        store: the store of this process.
        copies: counts copies; transfers from other hosts are no copies.
    """

    def __init__(
        self, process: bytes, tasks: Tasks, requests: Requests, locations: Locations, store: Store,
        copies: CopyCounter,
    ) -> None:  # fmt: skip
        self._process = process
        self._tasks = tasks
        self._requests = requests
        self._locations = locations
        self._store = store
        self._copies = copies
        self._streams: dict[int, Any] = {}
        self._staging: tuple[Staging, Staging] | None = None
        self._closed = False

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the store that are kept for pieces, and that nobody uses at the moment."""
        return sum(each.idle_nbytes for each in self._staging or ())

    @property
    def nbytes(self) -> int:
        """Bytes of the store that are kept for pieces."""
        return sum(each.nbytes for each in self._staging or ())

    def _host(self) -> tuple[Staging, Staging]:
        """The host memory of pieces that leave the process, and of those that come."""
        from zcactor.device.staging import Staging

        if self._closed:
            raise NotInitialized("zcactor was shut down")
        if self._staging is None:
            driver, loop = self._store.devices().driver, self._tasks.loop
            self._staging = Staging(self._store, driver, loop), Staging(self._store, driver, loop)
        return self._staging

    def stream(self, gpu: GpuMemory) -> int:
        """The stream of all copies of a GPU: work of the program does not hold them up."""
        from zcactor.device.streams import GpuStream

        stream = self._streams.get(gpu.index)
        if stream is None:
            stream = self._streams[gpu.index] = GpuStream(gpu)
        return int(stream.ptr)

    def close(self) -> None:
        """Give up the host memory. Idempotent."""
        self._closed = True
        for each in self._staging or ():
            each.close()
        self._streams.clear()

    # ---- the owner

    @staticmethod
    def leased(session: Session, object_id: int, offset: int, nbytes: int) -> DeviceBlock:
        """The object of ours whose bytes the peer of `session`, which has a lease on it, asks for.

        Raises:
            ObjectLost: the peer has no lease on such an object.
        """
        block: Any = session.leases.get(object_id)
        low = -1 if block is None or not hasattr(block, "gpu") else offset - block.offset
        if not 0 <= low <= low + nbytes <= getattr(block, "nbytes", 0):
            raise ObjectLost(f"no object {object_id:x} in GPU memory with these bytes is leased to the process")
        return block  # type: ignore[no-any-return]

    @remote(13)
    async def computed(self, object_id: int) -> None:
        """Return when an object of ours is computed, on which the caller has a lease.

        Raises:
            ObjectLost: the caller has no lease on such an object, or it is never computed.
            DeviceError: the GPU's context is broken.
        """
        session = caller()
        block: Any = session.leases.get(object_id)
        await until_done(self.leased(session, object_id, getattr(block, "offset", 0), 0).work.writes())

    @remote(12)
    async def stage(self, object_id: int, offset: int, nbytes: int, begins: bool) -> tuple[int, int]:
        """Copy a piece of an object in our GPU memory to the store, and lease it to the caller, which cannot map that
        memory.

        Args:
            object_id: id of the object, on which the caller has a lease.
            offset: the place of the bytes among our extents.
            nbytes: their number.
            begins: whether it is the first piece that the caller asks for.

        Returns:
            The id of the piece, and its offset in our arena.

        Raises:
            ObjectLost: the caller has no lease on such an object, or it is never computed.
            ProtocolError: the caller asks for more than a piece.
            OutOfMemory: the store has no room for a piece.
            ConnectionLost: the peer has ended.
            DeviceError: the driver refuses.
        """
        from zcactor.device.staging import PIECE_NBYTES

        session = caller()
        block = self.leased(session, object_id, offset, nbytes)
        if nbytes > PIECE_NBYTES:
            raise ProtocolError(f"a piece of {nbytes} bytes is asked for, and one has at most {PIECE_NBYTES}")
        await until_done(block.work.writes())  # before it takes a piece, which others need meanwhile
        piece = await self._host()[0].take(nbytes)
        await self._copied(block.gpu, piece.address, block.address + offset - block.offset, nbytes, (block, piece))
        self._copies.count(THROUGH_HOST, nbytes, begins=begins)
        piece.sealed = True
        with session.lock:
            if session.closed is not None and not session.is_replaced:  # nobody would give the lease back
                raise ConnectionLost("the reader's connection has ended")
            _, piece_id, _ = piece.grant(session)
        return piece_id, piece.offset

    @remote(11)
    async def whole(self, object_id: int, offset: int, nbytes: int) -> Any:
        """Copy bytes of an object in our GPU memory to the store, for a caller that sees no GPU, and maps our store.

        Args:
            object_id: id of the object, on which the caller has a lease.
            offset: the place of the bytes among our extents.
            nbytes: their number.

        Returns:
            The bytes, an array of uint8.

        Raises:
            ObjectLost: the caller has no lease on such an object, or it is never computed.
            OutOfMemory: the store has no room.
            DeviceError: the driver refuses.
        """
        block = self.leased(caller(), object_id, offset, nbytes)
        values = self._store.empty(nbytes, np.uint8)
        if nbytes:
            await until_done(block.work.writes())
            target = values.__array_interface__["data"][0]
            source = block.address + offset - block.offset
            await self._copied(block.gpu, target, source, nbytes, (block, values), pinned=False)
        self._copies.count(THROUGH_HOST, nbytes)
        return values

    async def _copied(
        self, gpu: GpuMemory, destination: int, source: int, nbytes: int, kept: object, *, pinned: bool = True
    ) -> None:
        """Copy bytes by a GPU; see `zcactor.objects.device_waiting.copied`.

        Raises:
            DeviceError: the driver refuses.
        """
        await copied(self._tasks, gpu, self.stream(gpu), destination, source, nbytes, kept, pinned)

    # ---- the reader

    async def pull(self, session: Session, lease: DeviceLease, extent: Any) -> DeviceBlock:
        """Copy an array of a GPU that this process does not see, and that one of its GPUs can access, to that one.

        Args:
            session: the session with the owner.
            lease: the lease on the array.
            extent: the `zcactor.device.imports.ImportedExtent` that it lies in.

        Raises:
            OutOfMemory: the GPU has no room.
            ObjectLost: the array is never computed.
            DeviceError, ConnectionLost, RemoteError: the driver refuses, or the owner.
        """
        from zcactor.device.memory import DeviceBlock

        gpu, nbytes = extent.gpu, lease.nbytes
        await self.asked(session, DevicePieces.computed, lease.id)
        block = DeviceBlock(gpu, nbytes)
        if nbytes:
            block.work.before_writing(gpu.index, self.stream(gpu))
            source = extent.address + lease.offset - extent.offset
            await self._copied(gpu, block.address, source, nbytes, (block, extent, lease))
        block.path = "pulled"
        self._store.devices().bytes_pulled += nbytes
        return block

    async def to_gpu(self, session: Session, lease: DeviceLease, gpu: GpuMemory) -> DeviceBlock:
        """Bring an array to a GPU of ours, through host memory.

        Args:
            session: the session with the owner.
            lease: the lease on the array.
            gpu: the GPU.

        Raises:
            OutOfMemory: the GPU has no room, or no store for a piece.
            ObjectLost: the array is never computed.
            DeviceError, ConnectionLost, RemoteError: the driver refuses, or the owner.
        """
        from zcactor.device.memory import DeviceBlock

        block = DeviceBlock(gpu, lease.nbytes)
        block.work.before_writing(gpu.index, self.stream(gpu))

        async def take(piece: tuple[Session, Region], start: int) -> None:
            nbytes, target = piece[1].nbytes, block.address + start
            staged: Any = self._mapped(*piece)
            pinned = staged is None
            if pinned:
                staged = await self._host()[1].take(nbytes)
                await self._fetch(*piece, staged.address, staged)
            await self._copied(gpu, target, staged.address, nbytes, (block, staged), pinned=pinned)
            self._copies.count(THROUGH_HOST, nbytes, begins=not start)

        await self._in_pieces(session, lease, take)
        return block

    async def to_store(self, session: Session, lease: DeviceLease) -> Any:
        """Bring an array to our store, where this process sees no GPU, and the owner's store cannot be mapped or has no
        room. Returns the bytes, an array of uint8.

        Args:
            session: the session with the owner.
            lease: the lease on the array.

        Raises:
            OutOfMemory: our store has no room, or the owner's for a piece.
            ObjectLost: the array is never computed.
            ConnectionLost, RemoteError: the owner has ended, or refuses.
        """
        values = self._store.empty(lease.nbytes, np.uint8)
        address = values.__array_interface__["data"][0]

        async def take(piece: tuple[Session, Region], start: int) -> None:
            nbytes = piece[1].nbytes
            staged = self._mapped(*piece)
            if staged is None:
                await self._fetch(*piece, address + start, values)
                return
            copy = partial(np.copyto, values[start : start + nbytes], np.asarray(staged)[:nbytes])
            await self._tasks.loop.run_in_executor(None, copy)
            self._copies.count(THROUGH_HOST, nbytes, begins=not start)

        await self._in_pieces(session, lease, take)
        values.setflags(write=False)
        return values

    async def _in_pieces(
        self, session: Session, lease: DeviceLease, take: Callable[[tuple[Session, Region], int], Awaitable[None]]
    ) -> None:
        """Ask the owner for all pieces of an array, and let each be taken. The first that fails ends it, after those
        that are under way."""
        from zcactor.device.staging import PIECE_NBYTES, PIECES

        starts = deque(range(0, lease.nbytes, PIECE_NBYTES))

        async def some() -> Exception | None:
            while starts:
                start = starts.popleft()
                try:
                    nbytes = min(PIECE_NBYTES, lease.nbytes - start)
                    await take(await self._staged(session, lease, start, nbytes), start)
                except (ZcactorError, OSError) as error:
                    starts.clear()
                    # The error of a time-out refers to this task: it may not keep the frames with the memory.
                    return bare(error, None)
                except BaseException:
                    starts.clear()
                    raise
            return None

        found = await asyncio.gather(*(some() for _ in range(PIECES)), return_exceptions=True)
        errors = [each for each in found if each is not None]
        found.clear()
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # a traceback with this frame, and memory of a GPU, would keep itself

    async def asked(
        self, session: Session, method: Callable[[Any, *Ts], Coroutine[Any, Any, R]], *args: *Ts
    ) -> tuple[Session, R]:
        """Ask an owner for something that may be asked for twice, by the connection that is in use. Returns the session
        of that, and the answer.

        Raises:
            ConnectionLost, RemoteError: the owner has ended, or refuses.
        """
        while True:
            session = session.in_use
            try:
                return session, await self._requests.ask(session, method, *args)
            except ConnectionLost:
                if not session.is_replaced:
                    raise

    async def _staged(self, session: Session, lease: DeviceLease, start: int, nbytes: int) -> tuple[Session, Region]:
        """Let the owner stage a piece. Returns the session by which it has granted a lease, and its region."""
        place: Any
        session, place = await self.asked(
            session, DevicePieces.stage, lease.id, lease.offset + start, nbytes, not start
        )
        if len(place) != 2 or not all(type(each) is int and 0 <= each < 1 << 64 for each in place):
            raise ProtocolError("the owner of an array on a GPU names no place of a piece")
        return session, Region(RegionKind.ARRAY, session.peer_process, place[0], place[1], nbytes, 0)

    def _mapped(self, session: Session, region: Region) -> Lease | None:
        """The lease on a piece that is mapped here; None where it cannot be mapped."""
        if not session.connection.maps:
            return None
        return reached(session, region, granted(self._process, session, region)).holder  # type: ignore[no-any-return]

    async def _fetch(self, session: Session, region: Region, address: int, keep: object) -> None:
        """Fetch a piece that cannot be mapped."""
        lease = self._locations.remote(session, region, soon=True).holder
        await self._locations.fetch(lease, 0, region.nbytes, address, keep)
