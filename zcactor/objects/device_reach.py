"""Arrays in GPU memory of other processes: their extents are imported, or their bytes are copied.

The modules of `zcactor.device` are imported when the first such array comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from zcactor.errors import (
    ConnectionLost,
    DeviceError,
    DeviceUnavailable,
    ObjectLost,
    OutOfMemory,
    ProtocolError,
    RemoteError,
    ZcactorError,
    original_of,
)
from zcactor.exception_pickling import bare, text_of
from zcactor.lazy_numpy import np
from zcactor.marshal.values import Code, unpackers
from zcactor.objects.device_direct import DirectReads, Rejections
from zcactor.objects.device_pieces import DevicePieces
from zcactor.objects.device_proof import fetcher_of
from zcactor.objects.locations import LostPart, outcome
from zcactor.objectstore.ref import RegionKind
from zcactor.peers.leases import Leases
from zcactor.rpc.parts import Part, is_unread
from zcactor.rpc.services import remote
from zcactor.transport.local.extents import MOST_EXTENTS

if TYPE_CHECKING:
    from zcactor.device.lease import DeviceLease
    from zcactor.objects.locations import Locations
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["DeviceReach"]

_KIND: Final = int(RegionKind.DEVICE)
_Key = tuple[bytes, int, int, int]
"""Key of some bytes: owner, object, offset and number of bytes."""


class DeviceReach:
    """The parts that a process makes of regions of GPU memory. Used on the loop's thread.

    Args:
        sessions: the sessions of this process.
        tasks: the tasks of this process.
        connections: connect to third processes.
        requests: ask other processes for leases and bytes.
        store: the store of this process.
        locations: bring bytes that cannot be mapped.
        copies: counts copies.
    """

    def __init__(
        self, sessions: Sessions, tasks: Tasks, connections: Connections, requests: Requests, store: Store,
        locations: Locations, copies: CopyCounter,
    ) -> None:  # fmt: skip
        self._sessions = sessions
        self._process = process = sessions.process
        self._tasks = tasks
        self._connections = connections
        self._requests = requests
        self._store = store
        self.pieces = DevicePieces(process, tasks, requests, locations, store, copies)
        """The copies of arrays that cannot be mapped."""
        self.direct = DirectReads(tasks, requests, self.pieces, store)
        """The arrays that network cards carry from GPU to GPU."""
        self.rejected: Final = Rejections()
        """The reasons why the memory of a peer's GPU cannot be mapped here for now, by the peer and its number of the
        GPU."""
        self._fetching: dict[bytes, asyncio.Lock] = {}
        self._wanted: dict[bytes, set[int]] = {}
        """The places around which extents are to be fetched, by their owners."""
        self._here: WeakValueDictionary[_Key, Any] = WeakValueDictionary()
        """Copies that are here: blocks in our GPU memory, or arrays of NumPy."""
        self._coming: dict[_Key, asyncio.Task[Any]] = {}
        connections.on_left.append(self._left)
        locations.bring_device = self.bring
        unpackers.setdefault(Code.DEVICE_ARRAY, _unpack_first)

    def import_region(self, session: Session, region: Region, unread: bool) -> tuple[Part, asyncio.Future[Part] | None]:
        """Make the part for a region of GPU memory; see `zcactor.rpc.hub.Hub`.

        Raises:
            ProtocolError: the region lies outside of the object of ours that it names.
        """
        _, owner, object_id, offset, nbytes, pin, *_ = region
        if owner == self._process:
            block: Any = self._store.lookup(object_id)
            if block is None:
                block = LostPart(f"object {object_id:x} of this process was freed before the reference to it came back")
            elif not hasattr(block, "gpu") or not 0 <= offset - block.offset <= block.nbytes - nbytes:
                raise ProtocolError(f"a reference to object {object_id} lies outside its {block.nbytes} bytes")
            if session.peer_process == owner and not pin:  # sent to ourselves: `block` keeps the object
                session.release(object_id)
            return Part(_KIND, block, offset, nbytes), None
        coming = Part(_KIND, LostPart("zcactor was shut down before it had come"), 0, 0)
        if owner != session.peer_process:
            return coming, self._tasks.begin(outcome(_KIND, self._adopt, session, region))
        lease = _lease(session, region)
        if self._place(lease):
            return Part(_KIND, lease, offset, nbytes), None
        copy = self._copy_here(lease)
        if copy is not None:
            return copy, None
        if unread and not self._may_map(session, lease):
            return Part(_KIND, lease, offset, nbytes), None
        return coming, self._tasks.begin(outcome(_KIND, self._reach, session, lease))

    def bring(self, part: Part) -> Part | asyncio.Task[Part]:
        """Return `part` itself, unless its bytes have not been read: then a task that gets the part with the bytes
        here. The task does not raise: a part that cannot be had is a `LostPart`."""
        return self._tasks.begin(outcome(_KIND, self._read, part.holder)) if is_unread(part) else part

    async def _read(self, lease: DeviceLease) -> Part:
        try:
            owner = await self._connections.connect(lease.owner)
        except (ZcactorError, OSError) as error:
            return Part(_KIND, LostPart(f"an array on a GPU is lost, as its owner has ended: {error}"), 0, 0)
        return await self._reach(owner, lease)

    async def _adopt(self, session: Session, region: Region) -> Part:
        """Get a lease of our own from the owner, a third process, then release the sender's pin."""
        try:
            owner = await self._connections.connect(region.owner)
            owner, leased = await self.pieces.asked(owner, Leases.lease, region.id)
            if not leased:
                raise ObjectLost(f"object {region.id:x} is no longer held by its owner")
            lease = _lease(owner, region)
            return await self._reach(owner, lease)
        except (ZcactorError, OSError) as error:
            text = f"an array on a GPU is lost, as its owner cannot be reached any more: {error}"
            return Part(_KIND, LostPart(text), 0, 0)
        finally:
            if region.pin:
                session.release(region.pin)

    def _place(self, lease: DeviceLease) -> bool:
        """Place a lease in an imported extent of a GPU that this process sees; False where that is not here."""
        extent = self._extent(lease)
        if extent is None or extent.is_hidden:
            return False
        lease.place(extent)
        return True

    def _extent(self, lease: DeviceLease) -> Any:
        """The imported extent in which the bytes of a lease lie, or None."""
        devices = self._store.devices_in_use
        return None if devices is None else devices.imports.find(lease.owner, lease.offset, max(lease.nbytes, 1))

    def _may_map(self, owner: Session, lease: DeviceLease) -> bool:
        """Whether the bytes of a lease may be had without a copy."""
        may_come = fetcher_of(owner.connection) is not None and not self.rejected.holds(_gpu_of(lease))
        return may_come and bool(self._gpus())

    def _gpus(self) -> list[Any]:
        """The memory of this process on the GPUs that it sees."""
        try:
            return self._store.devices().gpus  # type: ignore[no-any-return]
        except DeviceUnavailable:  # switched off here
            return []

    async def _reach(self, owner: Session, lease: DeviceLease) -> Part:
        """Import the extent of a lease or, where that is impossible, copy the bytes. Requests that come at once share
        one copy, and later ones get it as long as somebody has it."""
        if self._place(lease):
            return Part(_KIND, lease, lease.offset, lease.nbytes)
        owner = owner.in_use
        if self._may_map(owner, lease):
            await self._import(owner, lease)
            if self._place(lease):
                return Part(_KIND, lease, lease.offset, lease.nbytes)
        copy = self._copy_here(lease)
        if copy is not None:
            return copy
        key = _key(lease)
        task = self._coming.get(key)
        if task is None:
            task = self._coming[key] = self._tasks.begin(self._copied(owner, lease))
            task.add_done_callback(partial(self._arrived, key))
        try:
            return self._part_of(await asyncio.shield(task), lease)
        finally:
            del task  # an error has this frame in its traceback, and the task has the error

    def _arrived(self, key: _Key, task: asyncio.Task[Any]) -> None:
        del self._coming[key]
        if not task.cancelled() and task.exception() is None:
            holder = task.result()
            if type(holder) is not LostPart:
                self._here[key] = holder

    def _copy_here(self, lease: DeviceLease) -> Part | None:
        """The part for a copy that has come before; None where nobody has it any more."""
        holder = self._here.get(_key(lease))
        # The receiver of a moved array writes to its copy.
        return None if holder is None or not getattr(holder, "sealed", True) else self._part_of(holder, lease)

    def _part_of(self, copy: Any, lease: DeviceLease) -> Part:
        from zcactor.device.lease import DeviceCopy, HostCopy

        if type(copy) is LostPart:
            return Part(_KIND, copy.of(Part(_KIND, lease, lease.offset, lease.nbytes)), 0, 0)
        if isinstance(copy, np.ndarray):
            return Part(_KIND, HostCopy(copy, lease), lease.offset, lease.nbytes)
        return Part(_KIND, DeviceCopy(copy), copy.offset, lease.nbytes)

    async def _copied(self, owner: Session, lease: DeviceLease) -> Any:
        """Copy the bytes of a lease: a block of our GPU memory, an array of NumPy where this process sees no GPU, or a
        `LostPart`."""
        gpus, extent = self._gpus(), self._extent(lease)
        try:
            block: Any = None
            if extent is not None:
                with contextlib.suppress(DeviceError):
                    block = await self.pieces.pull(owner, lease, extent)
            if block is None and gpus and fetcher_of(owner.connection) is None:
                block = await self.direct.read(owner, lease, gpus[0])
            if block is None and gpus:
                block = await self.pieces.to_gpu(owner, lease, gpus[0])
            if block is None:
                return await self._to_host(owner, lease)
            block.share(self._store)
            return block
        except (ZcactorError, OSError) as error:
            return _lost(error)

    async def _to_host(self, owner: Session, lease: DeviceLease) -> Any:
        """Bring the bytes of a lease to host memory: the owner's, as far as that is mapped here and has room."""
        if owner.connection.maps:
            try:
                _, values = await self.pieces.asked(owner, DevicePieces.whole, lease.id, lease.offset, lease.nbytes)
            except RemoteError as error:
                if not issubclass(type(original_of(error)), OutOfMemory):
                    raise
            else:
                if isinstance(values, np.ndarray) and values.dtype == np.uint8 and values.shape == (lease.nbytes,):
                    return values
                raise ProtocolError("the owner of an array on a GPU gave other bytes than it was asked for")
        return await self.pieces.to_store(owner, lease)

    async def _import(self, owner: Session, lease: DeviceLease) -> None:
        """Import the extent around a lease. Those of arrays that come together are fetched together."""
        imports = self._store.devices().imports
        wanted = self._wanted.setdefault(lease.owner, set())
        wanted.add(lease.offset)
        async with self._fetching.setdefault(lease.owner, asyncio.Lock()):
            if self._extent(lease) is None:
                missing = [each for each in wanted if imports.find(lease.owner, each, 1) is None]
                places = [lease.offset, *missing][:MOST_EXTENTS]
                wanted.clear()
                fetch = fetcher_of(owner.connection)
                if fetch is None:
                    return
                try:
                    answer = await fetch(places)
                except (ConnectionLost, OSError):  # the bytes may still come through host memory
                    return
                reason = await asyncio.to_thread(imports.add, lease.owner, answer)
                if self._extent(lease) is not None:
                    self.rejected.pop(_gpu_of(lease), None)
                else:
                    self.rejected.note(_gpu_of(lease), reason or "the owner does not export its memory")

    def tell_gone(self, readers: set[bytes], place: int) -> None:
        """Let the processes that may have an extent of ours mapped unmap it."""
        for reader in readers:
            session = self._sessions.used.get(reader)
            if session is not None:
                self._requests.send(session, DeviceReach.gone, (self._process, place))

    @remote(128)
    def gone(self, owner: bytes, place: int) -> None:
        """Unmap an extent of another process's GPU memory that is no more."""
        if self._store.devices_in_use is not None:
            self._store.devices_in_use.imports.drop(owner, place)

    def _left(self, session: Session, another: Session | None) -> None:
        devices = self._store.devices_in_use
        if another is None:
            self._fetching.pop(session.peer_process, None)
            self._wanted.pop(session.peer_process, None)
            self.direct.forget(session.peer_process)
            for key in [key for key in self.rejected if key[0] == session.peer_process]:
                del self.rejected[key]
            if devices is not None:
                devices.imports.forget(session.peer_process)

    def close(self) -> None:
        """Give up what is kept for copies, and what is made ahead. Idempotent."""
        self.pieces.close()
        if self._store.devices_in_use is not None:
            self._store.devices_in_use.close()


def _lost(error: Exception) -> LostPart:
    """The part of an array that could not be copied. The error loses its traceback, which refers to memory: others may
    keep the error, as a session keeps that of its end."""
    error = bare(error, None)
    found = original_of(error)
    full = bare(found, None) if issubclass(type(found), OutOfMemory) else None
    return LostPart(f"an array on a GPU could not be copied here: {text_of(found)}", full)


def _key(lease: DeviceLease) -> _Key:
    return lease.owner, lease.id, lease.offset, lease.nbytes


def _gpu_of(lease: DeviceLease) -> tuple[bytes, int]:
    """The owner of a lease, and its number of the GPU."""
    from zcactor.device.memory import gpu_number

    return lease.owner, gpu_number(lease.offset)


def _lease(session: Session, region: Region) -> DeviceLease:
    """The lease that the peer of `session`, the owner, has granted."""
    from zcactor.device.lease import DeviceLease

    return DeviceLease(region.owner, region.id, region.offset, region.nbytes, session.release_later)


def _unpack_first(unpacking: Any, data: memoryview) -> Any:
    """Unpack the first array on a GPU that comes, by functions that are imported for it and used from then on."""
    from zcactor.marshal import devices

    devices.pass_arrays()
    return unpackers[Code.DEVICE_ARRAY](unpacking, data)
