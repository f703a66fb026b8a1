"""Arrays that network cards carry from GPU to GPU between hosts (GPUDirect), without host memory.

Each end registers the extent around an array with its card, by dma-buf, and proves first that the card reaches the GPU:
cards and GPUs that were passed through to a virtual machine have delivered other bytes. The owner answers when the
array is computed, and the reader READs when the last work on its destination is done. Before later work of the GPU, the
driver is asked to show it what the card has written. A failure of any step leaves the array to the way through host
memory, with the reason, and so are further arrays of that peer for some time.

**Unverified on hardware**: it is tested with fake cards and fake GPUs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zcactor.errors import ConnectionLost, DeviceError, ObjectLost, OutOfMemory, ProtocolError
from zcactor.exception_pickling import bare
from zcactor.objects.device_card import Momentary, prove, registered
from zcactor.objects.device_pieces import DevicePieces
from zcactor.objects.device_waiting import until_done
from zcactor.rpc.services import caller, remote
from zcactor.transport.bytes import RemoteRegion

if TYPE_CHECKING:
    from zcactor.device.lease import DeviceLease
    from zcactor.device.memory import DeviceBlock, GpuMemory
    from zcactor.objectstore.store import Store
    from zcactor.peers.requests import Requests
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session
    from zcactor.transport.base import Connection
    from zcactor.transport.verbs.peer.connection import GpuReading

__all__ = ["DirectReads", "Rejections"]

_MAX_KEY: Final = (1 << 32) - 1
_MAX_SEAL: Final = (1 << 16) - 1
_END: Final = 1 << 64
FIRST_PAUSE: Final = 1.0
LAST_PAUSE: Final = 60.0
"""First and longest time in seconds for which a way that was refused is not tried again."""


class _Rejection(NamedTuple):
    """The refusal of a way for arrays of one peer."""

    reason: str
    until: float
    """The loop's time at which the way is tried again."""
    pause: float
    """Seconds from the refusal until then."""


class Rejections(dict[Any, _Rejection]):
    """The last refusals of a way, by peer or by another key. Used on the loop's thread."""

    def note(self, key: object, reason: str) -> None:
        """Take other ways for a second. Each time that this was too short, the time doubles, up to a minute: a refusal
        of a driver may last for a moment, and an attempt is cheap beside an array."""
        last = self.get(key)
        pause = FIRST_PAUSE if last is None else min(2 * last.pause, LAST_PAUSE)
        self[key] = _Rejection(reason, asyncio.get_running_loop().time() + pause, pause)

    def holds(self, key: object) -> bool:
        """Whether the way is not to be tried for now."""
        last = self.get(key)
        return last is not None and asyncio.get_running_loop().time() < last.until


def reading_of(connection: Connection) -> GpuReading | None:
    """The READs from GPU to GPU, see `zcactor.transport.verbs.peer.connection.VerbsConnection`; None where no network
    card leads to the peer."""
    return getattr(connection, "gpu_reading", None)


class DirectReads:
    """The arrays that come by network card, and those of ours that peers read so. Used on the loop's thread.

    Args:
        tasks: the tasks of this process.
        requests: ask owners for keys.
        pieces: has the streams for copies.
        store: the store of this process.
    """

    def __init__(self, tasks: Tasks, requests: Requests, pieces: DevicePieces, store: Store) -> None:
        self._tasks = tasks
        self._requests = requests
        self._pieces = pieces
        self._store = store
        self.rejected: Final = Rejections()
        """The last refusal for each peer whose arrays do not come this way for now."""

    def forget(self, peer: bytes) -> None:
        """Forget the refusal for a peer that has ended."""
        self.rejected.pop(peer, None)

    # ---- the owner

    @remote(14)
    async def keys(self, object_id: int, offset: int, nbytes: int) -> tuple[int, ...] | str:
        """Let the caller's card read bytes of an object in our GPU memory, once they are computed.

        Args:
            object_id: id of the object, on which the caller has a lease.
            offset: the place of the bytes among our extents.
            nbytes: their number.

        Returns:
            Place and bytes of the extent, the number by which its region names its first byte, its rkey, and the
            object's seal; or the reason why the caller cannot read it.

        Raises:
            ObjectLost: the caller has no lease on such an object, or it is never computed.
        """
        session = caller()
        block = DevicePieces.leased(session, object_id, offset, nbytes)
        await until_done(block.work.writes())
        reading = reading_of(session.connection)
        if reading is None:
            return "the owner has no connection by RDMA to the reader"
        try:
            reason = await self.against(reading, block.gpu)
            if reason:
                return f"at the owner: {reason}"
            region, at = await registered(reading.memory, block)
        except (DeviceError, OutOfMemory, OSError) as error:
            return f"at the owner: {error}"
        return block.offset - at, region.nbytes, region.address, region.rkey, reading.seal(block.id, block)

    # ---- both

    def reason(self, session: Session) -> str:
        """The reason why arrays do not go by network card between the peer of a session and this process, as far as it
        is known; empty where none is."""
        rejection = self.rejected.get(session.peer_process)
        return self._against_connection(session.connection) or ("" if rejection is None else rejection.reason)

    @staticmethod
    def _against_connection(connection: Connection) -> str:
        if reading_of(connection) is None:
            return f"frames and arrays go by {connection.kind}, and network cards take part in RDMA only"
        if connection.integrity == "arrays":
            return "arrays are authenticated on their way, which takes them through host memory"
        return ""

    async def against(self, reading: GpuReading, gpu: GpuMemory) -> str:
        """The reason why the card does not reach a GPU; empty where it was proven. It is found out once in a process,
        unless that could not be tried.

        Raises:
            OutOfMemory: there is no room for that now.
        """
        proofs, key = reading.memory.proofs, gpu.uuid
        if key not in proofs:
            proofs[key] = self._tasks.begin(self._proof(reading.memory, gpu))
        found = await asyncio.shield(proofs[key])
        if isinstance(found, OutOfMemory | Momentary):
            proofs.pop(key, None)
        if isinstance(found, OutOfMemory):
            raise OutOfMemory(*found.args)
        return str(found)

    async def _proof(self, memory: Any, gpu: GpuMemory) -> str | OutOfMemory:
        try:
            return await prove(self._tasks, memory, gpu, self._pieces.stream(gpu))
        except OutOfMemory as error:
            return bare(error, None)
        except DeviceError as error:  # there is no stream
            return Momentary(error)

    # ---- the reader

    async def read(self, session: Session, lease: DeviceLease, gpu: GpuMemory) -> DeviceBlock | None:
        """READ an array into GPU memory of this process.

        Args:
            session: the session with the owner.
            lease: the lease on the array.
            gpu: the GPU.

        Returns:
            The copy; None where it has to come on another way.

        Raises:
            OutOfMemory: the GPU has no room.
            ProtocolError: the owner names other memory than that of the array. Nothing was read.
            RemoteError: the owner has no such array, or it is never computed.
        """
        reading = reading_of(session.connection)
        if reading is None or self._against_connection(session.connection) or self.rejected.holds(lease.owner):
            return None
        try:
            reason = await self.against(reading, gpu)
            if not reason:
                found = await self._read(session, reading, lease, gpu)
                if not isinstance(found, str):
                    self.forget(lease.owner)
                    return found
                reason = found
        except ConnectionLost:  # the other way finds out whether there is another connection
            return None
        except (DeviceError, OSError) as error:
            reason = str(error)
        self.rejected.note(lease.owner, reason)
        return None

    async def _read(
        self, session: Session, reading: GpuReading, lease: DeviceLease, gpu: GpuMemory
    ) -> DeviceBlock | str:
        from zcactor.device.memory import DeviceBlock

        nbytes = lease.nbytes
        answer = await self._requests.ask(session, DirectReads.keys, lease.id, lease.offset, nbytes)
        if isinstance(answer, str):
            return answer
        source, rkey, seal = _checked(answer, lease)
        block = DeviceBlock(gpu, nbytes)
        if nbytes:
            region, at = await registered(reading.memory, block)
            await until_done(block.work.writes())  # of those who had these bytes before; the card waits for no stream
            wanted = RemoteRegion(lease.id, lease.offset, nbytes, seal, rkey)
            try:
                await reading.pull(wanted, source, region.address + at, region.lkey, (block, lease))
            except ObjectLost as error:  # to READs: the lease is ours, so another way may lead to the bytes
                return str(error)
            gpu.driver.flush(gpu.index)
        block.path = "gpudirect"
        self._store.devices().bytes_pulled += nbytes
        return block


def _checked(answer: object, lease: DeviceLease) -> tuple[int, int, int]:
    """The number by which the owner's region names the first byte of an array, its rkey, and the array's seal.

    Raises:
        ProtocolError: the owner does not name memory around the array.
    """
    if isinstance(answer, list | tuple) and len(answer) == 5 and all(type(each) is int for each in answer):
        place, size, first, rkey, seal = answer
        around = 0 <= place <= lease.offset and lease.offset + lease.nbytes <= place + size
        in_space = first >= 0 and max(first, place) + size <= _END
        if around and in_space and 0 <= rkey <= _MAX_KEY and 0 <= seal <= _MAX_SEAL:
            return first + lease.offset - place, rkey, seal
    raise ProtocolError(
        f"the owner was asked for the memory of {lease.nbytes} bytes at {lease.offset} on a GPU, and named {answer!r}: "
        "the array does not lie there"
    )
