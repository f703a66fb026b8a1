"""Registration of memory with the network card ahead of need, as the heap grows.

The heap signals by an eventfd when it hands out memory beyond the registered part. An array is usually filled between
then and the first time that a peer wants to read it; meanwhile a thread registers its memory.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio

    from zcactor.objectstore.copies import CopyCounter
    from zcactor.transport.bytes import Extents

__all__ = ["Registrar"]


class _Heap(Protocol):
    """The heap that grows, see `zcactor.objectstore.heap.Heap`."""

    high: int

    def around(self, offset: int, /) -> int:
        """The beginning of the block around `offset`; -1 without such a block."""

    def watch_growth(self, event_fd: int, limit: int, /) -> None:
        """Make the eventfd readable, once, when the end of a block lies above `limit`."""


class Registrar:
    """The growth of the registered part of an arena, ahead of the heap. Used on the loop's thread.

    Args:
        heap: the heap of the arena.
        loop: the loop of the process.
        extents: registers the memory, and counts its copies by `copies`.
        copies: counts the copies of the process.
    """

    def __init__(self, heap: _Heap, loop: asyncio.AbstractEventLoop, extents: Extents, copies: CopyCounter) -> None:
        self._heap = heap
        self._loop = loop
        self._extents = extents
        extents.copied = partial(copies.count, "destination cannot be registered")
        extents.brought = partial(copies.count, "owner cannot register its memory")
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._seen = 0  # memory below is registered, or being registered
        loop.add_reader(self._fd, self._grown)
        self._register()

    @property
    def registrations(self) -> int:
        """Number of times that memory was registered."""
        return self._extents.registrations

    def _grown(self) -> None:
        os.eventfd_read(self._fd)
        self._register()

    def _register(self) -> None:
        """Register the memory up to the heap's end, and watch for memory above."""
        step = self._extents.extent_nbytes
        high = max(self._heap.high, 1)
        first = self._heap.around(high - 1)
        # One region around the last block, so that one key serves the block, and the memory below it.
        low = min(self._seen, first) if first >= 0 else self._seen
        self._extents.ahead(low, high - low)
        self._seen = -(-high // step) * step
        self._heap.watch_growth(self._fd, self._seen)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            self._heap.watch_growth(-1, 0)
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Close this process's copy of the descriptor, in a forked child: the loop is the parent's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
