"""Registering memory with the network card ahead of need, as the heap grows.

The heap tells, by an eventfd, when it hands out memory beyond what is registered. Between then and the first time that
a peer wants to read it, an array is usually filled; meanwhile its memory is registered on a thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

__all__ = ["Extents", "Registrar"]


class Extents(Protocol):
    """What registers, see `zcactor.transport.verbs.extents.ExtentTable`."""

    extent_nbytes: int
    """Bytes to whose multiples it rounds."""
    registrations: int
    """How often it has."""

    def ahead(self, offset: int, nbytes: int) -> None:
        """Register what is around these bytes of the arena, in the background."""


class _Heap(Protocol):
    """What grows, see `zcactor.objectstore.heap.Heap`."""

    high: int

    def around(self, offset: int, /) -> int:
        """Where the block around `offset` begins; -1 when none is."""

    def watch_growth(self, event_fd: int, limit: int, /) -> None:
        """Make the eventfd readable, once, when a block ends above `limit`."""


class Registrar:
    """Keeps the registered part of an arena ahead of the heap. On the loop's thread.

    Args:
        heap: that of the arena.
        loop: the loop.
        extents: registers.
    """

    def __init__(self, heap: _Heap, loop: asyncio.AbstractEventLoop, extents: Extents) -> None:
        self._heap = heap
        self._loop = loop
        self._extents = extents
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._seen = 0  # what lies below is registered, or being registered
        loop.add_reader(self._fd, self._grown)
        self._register()

    @property
    def registrations(self) -> int:
        """How often memory was registered."""
        return self._extents.registrations

    def _grown(self) -> None:
        os.eventfd_read(self._fd)
        self._register()

    def _register(self) -> None:
        """Register what lies between, and look at what comes above."""
        step = self._extents.extent_nbytes
        high = max(self._heap.high, 1)
        first = self._heap.around(high - 1)
        # One region around the block that is last, so that one key serves it, and what is below it.
        low = min(self._seen, first) if first >= 0 else self._seen
        self._extents.ahead(low, high - low)
        self._seen = -(-high // step) * step
        self._heap.watch_growth(self._fd, self._seen)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._fd >= 0:
            self._heap.watch_growth(-1, 0)
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """In a forked child: close its copy of the descriptor; the loop is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
