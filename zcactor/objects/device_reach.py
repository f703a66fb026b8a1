"""Arrays in GPU memory of other processes: their extents are imported, or their bytes come through host memory.

The modules of `zcactor.device` are imported when the first such array comes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zcactor.errors import (
    ConnectionLost,
    DeviceUnavailable,
    ObjectLost,
    OutOfMemory,
    ProtocolError,
    RemoteError,
    ZcactorError,
)
from zcactor.marshal.values import Code, unpackers
from zcactor.objects.locations import LostPart, outcome
from zcactor.objectstore.copies import THROUGH_HOST
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.device.events import Moment
    from zcactor.device.lease import DeviceLease
    from zcactor.objectstore.copies import CopyCounter
    from zcactor.objectstore.ref import Region
    from zcactor.objectstore.store import Store
    from zcactor.peers.connections import Connections
    from zcactor.peers.requests import Requests
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["DeviceReach"]

_KIND: Final = int(RegionKind.DEVICE)
_FIRST_PAUSE: Final = 0.0002
_LAST_PAUSE: Final = 0.005
"""Seconds between looks at work of a GPU that the loop waits for."""


class DeviceReach:
    """The parts that a process makes of regions of GPU memory. Used on the loop's thread.

    Args:
        process: id of this process, 16 bytes.
        tasks: the tasks of this process.
        connections: connect to third processes.
        requests: ask other processes for leases and bytes.
        store: the store of this process.
    """

    def __init__(
        self, process: bytes, tasks: Tasks, connections: Connections, requests: Requests, store: Store
    ) -> None:
        self._process = process
        self._tasks = tasks
        self._connections = connections
        self._requests = requests
        self._store = store
        self._fetching: dict[bytes, asyncio.Lock] = {}
        connections.on_left.append(self._left)
        unpackers.setdefault(Code.DEVICE_ARRAY, _unpack_first)

    def import_region(self, session: Session, region: Region) -> tuple[Part, asyncio.Future[Part] | None]:
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
        return coming, self._tasks.begin(outcome(_KIND, self._reach, session, lease))

    async def _adopt(self, session: Session, region: Region) -> Part:
        """Get a lease of our own from the owner, a third process, then release the sender's pin."""
        try:
            owner = await self._connections.connect(region.owner)
            if not await self._requests.ask(owner, "lease", region.id):
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
        """Place a lease in an imported extent; False where that is not here."""
        devices = self._store.devices_in_use
        extent = None if devices is None else devices.imports.find(lease.owner, lease.offset, max(lease.nbytes, 1))
        if extent is None:
            return False
        lease.place(extent)
        return True

    async def _reach(self, owner: Session, lease: DeviceLease) -> Part:
        """Import the extent of a lease or, where that is impossible, bring the bytes through host memory."""
        part = Part(_KIND, lease, lease.offset, lease.nbytes)
        owner = owner.in_use
        if self._place(lease):
            return part
        if owner.connection.fetch_extents is not None:
            try:
                devices = self._store.devices()
            except DeviceUnavailable:  # switched off here
                devices = None
            if devices is not None and devices.gpus:
                await self._import(owner, devices.imports, lease)
                if self._place(lease):
                    return part
        try:
            values = await self._requests.ask(owner, "device_bytes", lease.id, lease.offset, lease.nbytes)
        except (ZcactorError, OSError) as error:
            found = error.original if isinstance(error, RemoteError) else error
            full = found.with_traceback(None) if isinstance(found, OutOfMemory) else None
            return part._replace(holder=LostPart(f"an array on a GPU did not come through host memory: {found}", full))
        if not isinstance(values, np.ndarray) or values.dtype != np.uint8 or values.shape != (lease.nbytes,):
            raise ProtocolError("the owner of an array on a GPU gave other bytes than it was asked for")
        from zcactor.device.lease import HostCopy

        return part._replace(holder=HostCopy(values, lease))

    async def _import(self, owner: Session, imports: Any, lease: DeviceLease) -> None:
        """Import the extents of an owner that are missing here. Several arrays that come together wait for one
        import."""
        lock = self._fetching.setdefault(lease.owner, asyncio.Lock())
        async with lock:
            if imports.find(lease.owner, lease.offset, max(lease.nbytes, 1)) is None:
                try:
                    extents, gone = await owner.connection.fetch_extents(imports.known(lease.owner))
                except (ConnectionLost, OSError):  # the bytes may still come through host memory
                    return
                await asyncio.to_thread(imports.add, lease.owner, extents, gone)

    def _left(self, session: Session, another: Session | None) -> None:
        devices = self._store.devices_in_use
        if another is None:
            self._fetching.pop(session.peer_process, None)
            if devices is not None:
                devices.imports.forget(session.peer_process)

    async def bytes_of(self, session: Session, object_id: int, offset: int, nbytes: int, copies: CopyCounter) -> Any:
        """Copy bytes of an object in our GPU memory to the store, for a peer that cannot map them.

        Args:
            session: the session with the peer, which has a lease on the object.
            object_id: id of the object.
            offset: the place of the bytes among our extents.
            nbytes: their number.
            copies: counts the copy.

        Raises:
            ObjectLost: the peer has no lease on such an object.
            OutOfMemory: the store has no room.
            DeviceError: the driver refuses.
        """
        block = session.leases.get(object_id)
        if block is None or not hasattr(block, "gpu") or not 0 <= offset - block.offset <= block.nbytes - nbytes:
            raise ObjectLost(f"no object {object_id:x} in GPU memory with these bytes is leased to the process")
        values = self._store.empty(nbytes, np.uint8)
        gpu, address = block.gpu, block.address + offset - block.offset
        if nbytes:
            await _done(block.work.writes())
            target = values.__array_interface__["data"][0]
            gpu.driver.copy(gpu.index, target, address, 1, nbytes, (nbytes, nbytes), 0)
            moment = gpu.events.record(0)
            block.work.has_read(moment)
            await asyncio.shield(self._tasks.begin(_done_with([moment], values)))  # the GPU writes there until then
        copies.count(THROUGH_HOST, nbytes)
        return values


async def _done(moments: Iterable[Moment]) -> None:
    """Wait for work of a GPU, while the loop goes on."""
    for moment in moments:
        pause = _FIRST_PAUSE
        while not moment.done():
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)


async def _done_with(moments: Iterable[Moment], kept: object) -> None:
    """Wait for work that uses memory of `kept`."""
    await _done(moments)
    del kept


def _lease(session: Session, region: Region) -> DeviceLease:
    """The lease that the peer of `session`, the owner, has granted."""
    from zcactor.device.lease import DeviceLease

    return DeviceLease(region.owner, region.id, region.offset, region.nbytes, session.release_later)


def _unpack_first(unpacking: Any, data: memoryview) -> Any:
    """Unpack the first array on a GPU that comes, by functions that are imported for it and used from then on."""
    from zcactor.marshal import devices

    devices.pass_arrays()
    return unpackers[Code.DEVICE_ARRAY](unpacking, data)
