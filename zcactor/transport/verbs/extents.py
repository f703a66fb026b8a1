"""Which bytes of the arena are registered with the device: extents, each registered once and then for good.

Registering pins memory and takes about a millisecond for each 16 MiB, so it happens on a thread of its own and ahead
of need: with the first connection, and again whenever the heap grows beyond what is registered. What was needed before
that waits for it, without holding up the loop. Registered memory is never given back to the system, since a device goes
on using the pages that it pinned (`zcactor.objectstore.arena.Arena.pin`).

Bytes are found in one region, so that one key serves an object: one that lies across extents gets a region around all
of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from zcactor.transport.verbs.base import Device, MemoryRegion

__all__ = ["EXTENT_NBYTES", "ExtentTable", "PinnableArena"]

EXTENT_NBYTES: Final = 64 << 20
"""Bytes. Small enough that the first is not felt, large enough that a full arena has few."""

logger = logging.getLogger("zcactor")


class PinnableArena(Protocol):
    """What is registered."""

    @property
    def address(self) -> int:
        """Where it lies in this process."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    def pin(self, offset: int, nbytes: int) -> None:
        """Take memory for these bytes and never give it back.

        Raises:
            OutOfMemory: the system has none.
        """


class ExtentTable:
    """The memory regions of one process's arena. Found from any thread; everything else runs on the loop's.

    Args:
        device: registers them.
        arena: the memory.
        extent_nbytes: bytes that are registered at a time, at least.
    """

    def __init__(self, device: Device, arena: PinnableArena, extent_nbytes: int = EXTENT_NBYTES) -> None:
        self.registrations = 0
        """How often memory was registered."""
        self.nbytes = 0
        """Bytes registered; those in two regions count twice."""
        self._device = device
        self._arena = arena
        self.extent_nbytes = extent_nbytes
        self._regions: list[MemoryRegion] = []  # few; the newest last
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[tuple[int, int], asyncio.Future[MemoryRegion]] = {}
        self._closed = False

    def find(self, offset: int, nbytes: int) -> MemoryRegion | None:
        """The region around these bytes of the arena; None while there is none."""
        low = self._arena.address + offset
        high = low + nbytes
        for region in reversed(self._regions):
            if region.address <= low and high <= region.address + region.nbytes:
                return region
        return None

    async def get(self, offset: int, nbytes: int) -> MemoryRegion:
        """The region around these bytes, registered if need be.

        Cancelling leaves the registration under way, for whoever needs it next.

        Raises:
            OSError: the device cannot (ENOMEM above RLIMIT_MEMLOCK), or the table is closed.
            OutOfMemory: the system has no memory for the rest of the extent.
        """
        found = self.find(offset, nbytes)
        if found is not None:
            return found
        if self._closed:
            raise OSError(errno.ESHUTDOWN, f"nothing is registered with {self._device.name} any more: it is closed")
        extent = self.extent_nbytes
        low = offset // extent * extent
        high = min(-(-(offset + nbytes) // extent) * extent, self._arena.nbytes)
        future = self._under_way.get((low, high))
        if future is None:
            loop = asyncio.get_running_loop()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "zcactor-register")
            future = self._under_way[low, high] = loop.run_in_executor(self._thread, self._register, low, high)
            future.add_done_callback(lambda done: self._registered((low, high), done))
        try:
            region = await asyncio.shield(future)
            self._registered((low, high), future)  # it may be done, and its callback may not have had its turn
            return region
        finally:
            del future  # else what is raised leads back to itself by its traceback, and holds what the callers hold

    def ahead(self, offset: int, nbytes: int) -> None:
        """Register what is around these bytes in the background. A failure is logged: whoever needs it meets it."""
        if not self._closed and self.find(offset, nbytes) is None:
            task = asyncio.ensure_future(self.get(offset, nbytes))
            task.add_done_callback(_log_failure)

    def _register(self, low: int, high: int) -> MemoryRegion:
        """On the thread."""
        self._arena.pin(low, high - low)
        return self._device.register(self._arena.address + low, high - low, remote_read=True)

    def _registered(self, key: tuple[int, int], done: asyncio.Future[MemoryRegion]) -> None:
        if self._under_way.get(key) is not done:
            return
        del self._under_way[key]
        if done.cancelled() or done.exception() is not None:
            return
        region = done.result()
        if self._closed:
            region.close()
            return
        self._regions.append(region)
        self.registrations += 1
        self.nbytes += region.nbytes
        logger.debug("registered %d MiB of the arena with %s", region.nbytes >> 20, self._device.name)

    def close(self) -> None:
        """Unregister everything. Idempotent. Blocks while a registration is under way."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()
        for region in self._regions:
            region.close()
        self._regions.clear()


def _log_failure(task: asyncio.Future[MemoryRegion]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("memory could not be registered ahead of need: %s", error)
