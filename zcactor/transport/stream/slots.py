"""Frames in ordinary memory, for connections whose bytes Python sends.

The native send buffer writes frames into a slot, one behind the other. A flush, or a frame that does not fit any more,
gives it another slot. As long as the receiver keeps up there are two slots, which are used in turns, so that the few
cache lines of a small frame stay in the cache.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Slots"]

NBYTES: Final = 8 << 10
"""Bytes of a slot, unless the largest frame needs more: there may be thousands of connections."""


class Slots:
    """The slots of one connection. The native send buffer calls `full` and `flush`, from any thread.

    Args:
        max_reserve: bytes of the largest frame with its prefix.
        send: takes a view of bytes, valid during the call, and returns the number of bytes taken. Raises
            `BlockingIOError` where it takes none; the next call begins with the same bytes then.
    """

    def __init__(self, max_reserve: int, send: Callable[[memoryview], int]) -> None:
        self._nbytes = max(NBYTES, max_reserve)
        self._send = send
        self._lock = threading.RLock()  # a finalizer that makes calls may run inside it
        self._flushing = False
        self._spare: memoryview | None = None
        self._waiting: deque[memoryview] = deque()  # the frames of earlier slots, which leave first
        self._closed = False
        self.buffer = hot.SendBuffer(max_reserve, -1, self)
        """The send buffer."""
        self.buffer.swap(memoryview(bytearray(self._nbytes)), 0)

    def full(self) -> None:
        """Give the send buffer another slot, as its own has no room for the next frame."""
        with self._lock:
            self._leave()

    def flush(self) -> bool:
        """Send the committed frames. True where some are left, because `send` takes no more bytes now. The call of a
        finalizer, or of a signal's handler, which runs inside of a flush, leaves its frames to that.

        Raises:
            OSError: the error of `send`. After it, and after any exception of a signal's handler, nobody knows how many
                bytes were taken: nothing more is sent, and the connection has to end.
        """
        with self._lock:
            if self._flushing:
                return False
            while True:
                self._flushing = True
                try:
                    left = self._send_all()
                except BaseException:
                    self._closed = True
                    raise
                finally:
                    self._flushing = False
                # A call may have left its frames to this flush when that had found the last of them already.
                if left or self._closed or not (self._waiting or self.buffer.pending):
                    return left

    def _send_all(self) -> bool:
        while True:
            self._leave()
            if not self._waiting or self._closed:
                return False
            while self._waiting and not self._closed:
                view = self._waiting[0]
                try:
                    sent = self._send(view)
                except BlockingIOError:
                    return True
                if sent < len(view):
                    self._waiting[0] = view[sent:]
                else:
                    self._waiting.popleft()
                    self._spare = memoryview(view.obj)

    @property
    def pending(self) -> bool:
        """Whether committed frames are left, once a flush of another thread has ended."""
        with self._lock:
            return bool(self._waiting) or self.buffer.pending > 0

    def _leave(self) -> None:
        # In an order in which an exception between two steps loses no more than a spare slot.
        slot, self._spare = self._spare or memoryview(bytearray(self._nbytes)), None
        if not self.buffer.leave(slot, self._waiting):
            self._spare = slot

    def close(self) -> None:
        """Drop what was not sent. No call of `send` is under way when this returns, and none follows."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
