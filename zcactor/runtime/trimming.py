"""Giving memory back: what a process has taken for its store and does not use for a while.

Freed memory stays committed, so that a loop which allocates the same again takes no page fault. It goes back to the
system only when more than `HIGH` times the watermark lies idle, only down to the watermark, and never below what was in
use at any moment of the last `PERIOD` seconds: two marks and a window, so that nothing swings. Memory that is pinned
(`Heap.pin`) never goes back; free, it counts as memory that stays warm, and not as idle. It is done on the loop,
a few milliseconds at a time; until the heap reports that much idle memory, nothing runs here at all. A heap of
anonymous memory, of which a process of a simulation has one, has no descriptors at hand: it is asked every `PERIOD`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from zcactor.objectstore.heap import Heap

__all__ = ["HIGH", "PERIOD", "STEP_NBYTES", "Trimmer"]

PERIOD: Final = 5.0
"""Seconds for which memory stays warm. A training step that allocates anew is seldom longer; memory that is missing
elsewhere should not wait longer."""
HIGH: Final = 2
STEP_NBYTES: Final = 64 << 20
"""Bytes given back at a time: 64 MiB keep the loop for about 5 ms."""
_PAUSE: Final = 0.005
"""Seconds between two steps, for the loop's other work."""


class Trimmer:
    """Watches one process's heap.

    Args:
        heap: what is watched.
        loop: where the work is done.
        keep: bytes of free memory that stay committed, the low watermark.
    """

    def __init__(self, heap: Heap, loop: asyncio.AbstractEventLoop, keep: int) -> None:
        self._heap = heap
        self._loop = loop
        self._keep = keep
        self._timer: asyncio.TimerHandle | None = None
        self._fd = -1
        if heap.fd >= 0:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.add_reader(self._fd, self._told)
        self._watch()

    def _watch(self) -> None:
        if self._fd < 0:
            self._timer = self._loop.call_later(PERIOD, self._poll)
        else:
            self._heap.watch(self._fd, HIGH * self._keep)

    def _poll(self) -> None:
        peak = self._heap.watch(-1, 0)
        if self._heap.idle > HIGH * self._keep:
            self._trim(peak)
        else:
            self._watch()

    def _told(self) -> None:
        os.eventfd_read(self._fd)
        self._heap.watch(-1, 0)  # the window begins
        self._timer = self._loop.call_later(PERIOD, self._end_of_window)

    def _end_of_window(self) -> None:
        self._trim(self._heap.watch(-1, 0))

    def _trim(self, peak: int) -> None:
        """One step; `peak` is the most that was used at a time in the window, bytes."""
        heap = self._heap
        keep = max(peak, heap.used + self._keep)
        if heap.committed > keep and heap.trim(keep, STEP_NBYTES):
            self._timer = self._loop.call_later(_PAUSE, self._trim, peak)
        elif heap.idle > HIGH * self._keep:
            self._timer = self._loop.call_later(PERIOD, self._end_of_window)
        else:
            self._timer = None
            self._watch()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self.abandon()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def abandon(self) -> None:
        """In a forked child, whose loop is the parent's: only close what is ours."""
        self._heap.watch(-1, 0)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
