"""A timer that costs its loop nothing until it goes off.

While a timer of its own is pending, a loop has each wait for messages end in time for it: the loop reads the clock and
the kernel sets a timer, at either end of each call. That is 0.5 us an end of a round trip of 14 us, for a timer that
goes off every few minutes. An alarm is a descriptor that the loop waits for with all others (timerfd_create(2)).
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Calls a function on the loop's thread every so many seconds.

    Where the loop waits for no descriptors, as one of a simulation, or the process has none left, it is a timer of the
    loop.

    Args:
        loop: the loop, of this thread.
        seconds: the time from one call to the next, above 0.
        callback: called without arguments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._timer: asyncio.TimerHandle | None = None
        self._fd = _descriptor(seconds)
        if self._fd >= 0:
            try:
                loop.add_reader(self._fd, self._told)
            except NotImplementedError:  # asyncio's word for a loop that waits for no descriptors
                os.close(self._fd)
                self._fd = -1
        if self._fd < 0:
            self._timer = loop.call_later(seconds, self._later)

    def _told(self) -> None:
        os.read(self._fd, 8)  # how often it has gone off since
        self._callback()

    def _later(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._later)
        self._callback()

    def close(self) -> None:
        """Call the function no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _descriptor(seconds: float) -> int:
    """A descriptor that can be read every so many seconds; -1 where the system gives none."""
    libc = ctypes.CDLL(None)
    fd: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0:
        fraction, whole = math.modf(seconds)
        pause = (int(whole), max(int(fraction * 1e9), 0 if whole else 1))
        libc.timerfd_settime(fd, 0, ctypes.byref((ctypes.c_long * 4)(*pause, *pause)), None)
    return fd
