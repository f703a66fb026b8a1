"""The native send buffer of a simulated connection: its bytes leave by the connection's own way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SimSlot"]

_NBYTES = 8 << 10


class SimSlot:
    """A slot of ordinary memory, in place of the registered slots of a queue pair: the native part encodes frames into
    it, from any thread.

    Args:
        max_reserve: bytes of the largest frame with its prefix.
        take: called with the written bytes, in order; its view is valid during the call.
        leave: called when the taken bytes are to be sent.
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
        """Take the written bytes, because the next frame does not fit behind them. Other threads write to the new
        memory meanwhile."""
        with self._lock:
            view, self._view = self._view, memoryview(bytearray(self._nbytes))
            end = self.native.swap(self._view, 0)
            if end:
                self._take(view[:end])

    def flush(self) -> None:
        """Send the committed frames."""
        self.full()
        self._leave()
