"""The registered parts of the arena: extents, each of which is registered once and stays so.

Registration pins memory and takes about a millisecond for each 16 MiB. So it happens on a thread of its own and in
advance: with the first connection, and again when the heap grows beyond the registered part. A pull that needs an
extent sooner waits for it, without blocking the loop. Registered memory is never returned to the system, since a device
continues to use the pages that it has pinned (`zcactor.objectstore.arena.Arena.pin`).

No byte is in two regions, because pinned pages count once for each region that they are in. So never more than the
arena is registered. An object across several extents has a key for each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.verbs.driver.base import Device, MemoryRegion

__all__ = ["EXTENT_NBYTES", "ExtentTable", "PinnableArena"]

EXTENT_NBYTES: Final = 64 << 20
"""Bytes of an extent: the first one takes little time, and a full arena has few of them."""


class PinnableArena(Protocol):
    """The memory that is registered."""

    @property
    def address(self) -> int:
        """Its address in this process."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""

    def pin(self, offset: int, nbytes: int) -> None:
        """Allocate memory for these bytes, and never return it to the system.

        Raises:
            OutOfMemory: the system has no memory for them.
        """


class ExtentTable:
    """The memory regions of one process's arena. Any thread may call `find` and `registered`, all else runs on the
    loop.

    Args:
        device: the device that registers them.
        arena: the memory.
        extent_nbytes: bytes of an extent; the last one has fewer.
    """

    def __init__(self, device: Device, arena: PinnableArena, extent_nbytes: int = EXTENT_NBYTES) -> None:
        self.registrations = 0
        """Number of registrations."""
        self.nbytes = 0
        """Number of registered bytes."""
        self.refused = ""
        """The last reason for a pull through bounce buffers."""
        self.copied: Callable[[int], None] = lambda _: None
        """Called with the number of bytes that were copied from bounce buffers."""
        self.brought: Callable[[int], None] = lambda _: None
        """Called with the number of bytes that came through the socket, because their owner could not register them."""
        self._device = device
        self._arena = arena
        self.extent_nbytes = extent_nbytes
        self._regions: dict[int, MemoryRegion] = {}  # by number of the extent
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: dict[int, asyncio.Future[MemoryRegion]] = {}
        self._closed = False

    def find(self, offset: int, nbytes: int) -> MemoryRegion | None:
        """Return the region around these bytes of the arena. None where it is not registered, and across extents."""
        first, last = self._extents(offset, nbytes)
        return self._regions.get(first) if first == last else None

    def registered(self, offset: int, nbytes: int) -> bool:
        """Whether all of these bytes are registered."""
        first, last = self._extents(offset, nbytes)
        return all(number in self._regions for number in range(first, last + 1))

    def _extents(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the first and the last extent of these bytes."""
        return offset // self.extent_nbytes, (offset + max(nbytes, 1) - 1) // self.extent_nbytes

    async def get(self, offset: int, nbytes: int) -> list[MemoryRegion]:
        """Return the regions of these bytes, in order, after registering missing ones.

        Cancelling does not stop a registration, which the next call uses.

        Raises:
            OSError: the device refused (ENOMEM above RLIMIT_MEMLOCK), or the table is closed.
            OutOfMemory: the system has no memory for the rest of an extent.
        """
        first, last = self._extents(offset, nbytes)
        found = []
        for number in range(first, last + 1):
            region = self._regions.get(number)
            found.append(await self._get(number) if region is None else region)
        return found

    async def keys(self, offset: int, nbytes: int) -> list[tuple[int, MemoryRegion]]:
        """Return the regions of these bytes, each with its number of these bytes.

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
            return await asyncio.shield(future)
        finally:
            if future.done():  # maybe before its callback has run: a failure is not for the next call, too
                self._registered(number, future)
            del future  # otherwise the exception's traceback refers to itself, and holds the callers' objects

    def ahead(self, offset: int, nbytes: int) -> None:
        """Register the extents of these bytes in the background. A failure is logged, and raised by the next `get`."""
        if not self._closed and not self.registered(offset, nbytes):
            task = asyncio.ensure_future(self.get(offset, nbytes))
            task.add_done_callback(_log_failure)

    def _register(self, number: int) -> MemoryRegion:
        """Register an extent, on the thread."""
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
        """Unregister all regions. Idempotent. Blocks while a registration is under way.

        Raises:
            OSError: the device refused for one; all others are unregistered.
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
