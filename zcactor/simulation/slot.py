"""The native send buffer of a simulated connection: what it has written leaves by the connection's own way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Slot"]

_NBYTES = 8 << 10


class Slot:
    """A slot of ordinary memory, as a queue pair has registered ones: the native part encodes frames into it, from any
    thread.

    Args:
        max_reserve: bytes of the largest frame with its prefix.
        take: is given what was written, in order; its view is valid during the call.
        leave: is called when what was taken is to be sent.
    """

    def __init__(self, max_reserve: int, take: Callable[[memoryview], object], leave: Callable[[], None]) -> None:
        self._nbytes = max(_NBYTES, max_reserve)
        self._lock = threading.Lock()
        self._view = memoryview(bytearray(self._nbytes))
        self._take = take
        self._leave = leave
        self.native: Any = hot.SendBuffer(max_reserve, -1, self)
        """The send buffer."""
        self.native.swap(self._view, 0)

    def full(self) -> None:
        """The next frame does not fit behind the others. Other threads write to the new memory meanwhile."""
        with self._lock:
            view, self._view = self._view, memoryview(bytearray(self._nbytes))
            end = self.native.swap(self._view, 0)
            if end:
                self._take(view[:end])

    def flush(self) -> None:
        """What is committed is to be sent."""
        self.full()
        self._leave()
