"""The rate of this processor's time stamp counter, which the emulator's guests read as their own."""

from __future__ import annotations

import ctypes
import mmap
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["counter_khz"]

READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")
"""Machine code of x86-64: ``rdtsc; shl rdx, 32; or rax, rdx; ret``."""

APART = 0.1
"""Seconds between two readings: an error of 10 us in each makes one of 0.02 %, and kernels mend up to 1 %."""

TRIES = 20
"""Readings of which the one that took least counts: a process may lose its processor in the middle of one."""


def counter_khz() -> int:
    """Measure the rate against the monotonic clock, for a tenth of a second.

    Raises:
        OSError: the system allows no memory that holds code, which the emulator needs as well.
    """
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as memory:
        memory.write(READ_COUNTER)
        place = ctypes.c_char.from_buffer(memory)
        counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(place))
        ticks, started = _reading(counter)
        time.sleep(APART)  # the time over which the counter is measured
        later, ended = _reading(counter)
        del counter, place  # memory cannot be unmapped while an object refers to it
    return round((later - ticks) * 1_000_000 / (ended - started))


def _reading(counter: Callable[[], int]) -> tuple[int, float]:
    """The counter, and the nanoseconds of the clock in the middle of reading it."""
    readings = []
    for _ in range(TRIES):
        before, ticks, after = time.monotonic_ns(), counter(), time.monotonic_ns()
        readings.append((after - before, ticks, (before + after) / 2))
    _, ticks, middle = min(readings)
    return ticks, middle
