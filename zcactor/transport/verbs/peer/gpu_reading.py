"""READs of a peer's GPU memory into GPU memory of this process, past the memory of both hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from zcactor.transport.base import RemoteRegion
    from zcactor.transport.verbs.device.engine import Engine
    from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
    from zcactor.transport.verbs.peer.pulling import Puller

__all__ = ["GpuReading"]


class GpuReading:
    """The way between the GPUs of two processes through their cards. Used on the loop's thread.

    Args:
        engine: the engine of this process.
        puller: posts the READs.
    """

    def __init__(self, engine: Engine, puller: Puller) -> None:
        self._engine: Final = engine
        self._puller: Final = puller

    @property
    def memory(self) -> RegisteredGpuMemory:
        """The memory of this process's GPUs that is registered with its card."""
        return self._engine.gpu_memory

    def seal(self, object_id: int, holder: Any) -> int:
        """The entry of an object of ours in the table of seals; 0 where the table is full. The seal is zeroed with
        `holder`, which has `offset` and `nbytes`."""
        return self._engine.seals.seal(object_id, holder.offset, holder.nbytes, holder)

    async def pull(self, region: RemoteRegion, source: int, address: int, lkey: int, keep: object) -> None:
        """READ bytes of the peer's GPU memory.

        Args:
            region: the bytes, with the rkey and the seal that the peer has named. The offset is that in the seal.
            source: the number by which the peer's region names the first byte.
            address: the number by which our region names the first byte of the destination.
            lkey: key of that region.
            keep: the owner of the destination, which is held until nothing can write there any more.

        Raises:
            ConnectionLost: the connection is lost before or meanwhile.
            ObjectLost: the peer has no such memory under that rkey, or another object is there by now.
            OSError: the destination cannot be written to.
            ProtocolError: the peer's numbers leave the address space.
        """
        nbytes = region.nbytes
        await self._puller.pull(region, address, ((nbytes, lkey),), keep, ((nbytes, region.rkey),), source)
