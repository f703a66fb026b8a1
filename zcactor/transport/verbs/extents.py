"""Which bytes of the arena are registered with the device: extents, each registered once and then for good.

Registering pins memory and takes about a millisecond for each 16 MiB, so it happens on a thread of its own and ahead
of need: with the first connection, and again whenever the heap grows beyond what is registered. What was needed before
that waits for it, without holding up the loop. Registered memory is never given back to the system, since a device goes
on using the pages that it pinned (`zcactor.objectstore.arena.Arena.pin`).

No byte is in two regions, so that what is registered is never more than the arena, whatever lies where: pinned pages
count once for each region that they are in. An object that lies across extents has a key for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

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
        extent_nbytes: bytes that are registered at a time; less at the arena's end.
    """

    def __init__(self, device: Device, arena: PinnableArena, extent_nbytes: int = EXTENT_NBYTES) -> None:
        self.registrations = 0
        """How often memory was registered."""
        self.nbytes = 0
        """Bytes registered."""
        self.refused = ""
        """Why bytes had to come by way of other memory, the last time that this was so."""
        self.copied: Callable[[int], None] = lambda _: None
        """Called with the bytes that were."""
        self.brought: Callable[[int], None] = lambda _: None
        """Called with bytes that came by the socket, as their owner could not register them."""
        self._device = device
        self._arena = arena
        self.extent_nbytes = extent_nbytes
        self._regions: dict[int, MemoryRegion] = {}  # by number of the extent
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[int, asyncio.Future[MemoryRegion]] = {}
        self._closed = False

    def find(self, offset: int, nbytes: int) -> MemoryRegion | None:
        """The region around these bytes of the arena; None while there is none, and where they lie across extents."""
        first, last = self._extents(offset, nbytes)
        return self._regions.get(first) if first == last else None

    def registered(self, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are."""
        first, last = self._extents(offset, nbytes)
        return all(number in self._regions for number in range(first, last + 1))

    def _extents(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The first and the last extent that these bytes are in."""
        return offset // self.extent_nbytes, (offset + max(nbytes, 1) - 1) // self.extent_nbytes

    async def get(self, offset: int, nbytes: int) -> list[MemoryRegion]:
        """The regions that these bytes are in, in order, registered if need be.

        Cancelling leaves the registration under way, for whoever needs it next.

        Raises:
            OSError: the device cannot (ENOMEM above RLIMIT_MEMLOCK), or the table is closed.
            OutOfMemory: the system has no memory for the rest of an extent.
        """
        first, last = self._extents(offset, nbytes)
        found = []
        for number in range(first, last + 1):
            region = self._regions.get(number)
            found.append(await self._get(number) if region is None else region)
        return found

    async def keys(self, offset: int, nbytes: int) -> list[tuple[int, MemoryRegion]]:
        """The same, each region with the bytes that it has of these.

        Raises:
            OSError, OutOfMemory: as `get`.
        """
        end = self._arena.address + offset + nbytes
        at, found = self._arena.address + offset, []
        for region in await self.get(offset, nbytes):
            stop = min(region.address + region.nbytes, end)
            found.append((stop - at, region))
            at = stop
        return found

    async def _get(self, number: int) -> MemoryRegion:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, f"nothing is registered with {self._device.name} any more: it is closed")
        future = self._under_way.get(number)
        if future is None:
            loop = asyncio.get_running_loop()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "zcactor-register")
            future = self._under_way[number] = loop.run_in_executor(self._thread, self._register, number)
            future.add_done_callback(lambda done: self._registered(number, done))
        try:
            region = await asyncio.shield(future)
            self._registered(number, future)  # it may be done, and its callback may not have had its turn
            return region
        finally:
            del future  # else what is raised leads back to itself by its traceback, and holds what the callers hold

    def ahead(self, offset: int, nbytes: int) -> None:
        """Register what is around these bytes in the background. A failure is logged: whoever needs it meets it."""
        if not self._closed and not self.registered(offset, nbytes):
            task = asyncio.ensure_future(self.get(offset, nbytes))
            task.add_done_callback(_log_failure)

    def _register(self, number: int) -> MemoryRegion:
        """On the thread."""
        low = number * self.extent_nbytes
        high = min(low + self.extent_nbytes, self._arena.nbytes)
        self._arena.pin(low, high - low)
        return self._device.register(self._arena.address + low, high - low, remote_read=True)

    def _registered(self, number: int, done: asyncio.Future[MemoryRegion]) -> None:
        if self._under_way.get(number) is not done:
            return
        del self._under_way[number]
        if done.cancelled() or done.exception() is not None:
            return
        region = done.result()
        if self._closed:
            region.close()
            return
        self._regions[number] = region
        self.registrations += 1
        self.nbytes += region.nbytes
        logger.debug("registered %d MiB of the arena with %s", region.nbytes >> 20, self._device.name)

    def close(self) -> None:
        """Unregister everything. Idempotent. Blocks while a registration is under way.

        Raises:
            OSError: the device refused one; all others are unregistered all the same.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()
        with contextlib.ExitStack() as whatever_fails:
            for region in self._regions.values():
                whatever_fails.callback(region.close)
            self._regions.clear()


def _log_failure(task: asyncio.Future[list[MemoryRegion]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("memory could not be registered ahead of need: %s", error)
