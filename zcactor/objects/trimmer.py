"""Trimming: giving back memory that a process has taken for its store and has not used for a while.

Freed memory stays committed, so that a loop which allocates the same again has no page faults. It goes back to the
system only when more than `HIGH` times the watermark lies idle, only down to the watermark, and never below the memory
in use at any moment of the last `PERIOD` seconds: two marks and a window, so that nothing oscillates. Pinned memory
(`Heap.pin`) never goes back; when free it counts as memory that stays warm, and not as idle. The work is done on the
loop, a few milliseconds at a time; until the heap reports that much idle memory, nothing runs here at all. A heap of
anonymous memory, which each process of a simulation has, gets no eventfd: it is polled every `PERIOD`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from zcactor.objectstore.heap import Heap

__all__ = ["HIGH", "PERIOD", "STEP_NBYTES", "Trimmer"]

PERIOD: Final = 5.0
"""Seconds for which memory stays warm. A training step that allocates anew is seldom longer; memory that others need
should not wait longer."""
HIGH: Final = 2
STEP_NBYTES: Final = 16 << 20
"""Bytes given back in one step, which keeps the loop for about 2 ms."""
_PAUSE: Final = 0.005
"""Seconds between two steps, for the loop's other work."""


class Trimmer:
    """The watch over the heap of one process, which trims it.

    Args:
        heap: the heap to watch.
        loop: the loop that does the work.
        keep: bytes of free memory that stay committed: the low watermark.
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
        """Trim by one step. `peak` is the largest number of bytes in use at one time in the window."""
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
        """Close this process's descriptor, in a forked child: the loop is the parent's."""
        self._heap.watch(-1, 0)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
