"""Waiting awake: an event loop that looks for messages without sleeping, for a limited time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["Spinner", "check_spin"]


class Spinner:
    """The wakefulness of an event loop for a while after each message, so that the next one costs no wake-up. It takes
    a processor for that time, and nothing afterwards. Used on the loop's thread.

    Args:
        loop: the loop.
        seconds: the time after the latest message.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self.seconds = seconds
        self._until = 0.0
        self._spins = False

    def touch(self) -> None:
        """Note a message that has come or gone."""
        self._until = time.perf_counter() + self.seconds
        if not self._spins:
            self._spins = True
            self._loop.call_soon(self._spin)

    def _spin(self) -> None:
        """Be called in each turn of the loop: a loop with a callback that is due polls its sockets without waiting."""
        self._spins = time.perf_counter() < self._until
        if self._spins:
            self._loop.call_soon(self._spin)

    def close(self) -> None:
        """Let the loop sleep. Idempotent."""
        self._until = 0.0


def check_spin(spin_us: Any, what: str) -> float:
    """The option `spin_us` as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not finite.
    """
    if isinstance(spin_us, bool) or not isinstance(spin_us, int | float):
        raise TypeError(f"{what}: spin_us is {spin_us!r}, and must be a number")
    if not 0 <= spin_us < math.inf:
        raise ValueError(f"{what}: spin_us is {spin_us!r}, and must be at least 0 and finite")
    return float(spin_us)
