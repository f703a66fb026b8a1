"""The bytes that are committed to a connection and that the system has not taken yet.

Frames are encoded straight into the buffer, one behind the other, and sent by one call. The buffer is a queue of chunks
of fixed size. As long as the receiver keeps up there is one chunk, which is used from its start again after each
complete send, so that the few cache lines of a small frame stay in the cache.

Two parties use it. The *writer* reserves, commits and flushes under its own lock, from any thread. The *resumer* is the
event loop, which continues to send when the socket takes bytes again. A lock of the buffer orders the two. Only the
writer resets the writing position, because only the writer knows that no reservation is open.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SendBuffer"]

CHUNK_NBYTES: Final = 256 << 10
"""Bytes of a chunk: more than the 208 KiB that Linux buffers for a unix socket by default, so one send can fill it."""


class SendBuffer:
    """A queue of committed bytes, which `send` takes in order.

    Args:
        max_reserve: bytes of the largest reservation.
        send: takes a view of bytes and returns the number of bytes taken. Raises `BlockingIOError` where it takes none.
        chunk_nbytes: bytes of a chunk, unless `max_reserve` is more.
    """

    __slots__ = (
        "_blocked",
        "_buffer",
        "_closed",
        "_head",
        "_lock",
        "_older",
        "_refused",
        "_room",
        "_send",
        "_spare",
        "_tail",
        "_view",
        "max_reserve",
    )

    def __init__(self, max_reserve: int, send: Callable[[memoryview], int], chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self.max_reserve = max_reserve
        self._send = send
        self._lock = threading.Lock()
        self._buffer = bytearray(max(chunk_nbytes, max_reserve))
        self._view = memoryview(self._buffer)
        self._spare: tuple[bytearray, memoryview] | None = None
        self._older: deque[tuple[bytearray, memoryview, int]] = deque()  # full chunks, their ends; sent first
        self._head = 0  # start of the unsent bytes in the first chunk: that is _older[0], or the current one
        self._tail = 0  # end of the committed bytes in the current chunk
        self._room = len(self._buffer)  # -1 once nothing is accepted any more: then `reserve` takes its slow path
        self._blocked = False  # the resumer is sending, and the writer must not overtake it
        self._refused = ""
        self._closed = False

    def reserve(self, nbytes: int) -> tuple[bytearray, int]:
        """Reserve room for `nbytes`. A reservation that is never committed costs nothing.

        Returns:
            A buffer, and the offset of the room in it.

        Raises:
            ValueError: `nbytes` is more than `max_reserve`.
            ConnectionLost: `refuse` or `close` was called.
        """
        tail = self._tail
        if nbytes <= self.max_reserve and tail + nbytes <= self._room:
            return self._buffer, tail
        return self._reserve_slowly(nbytes)

    def _reserve_slowly(self, nbytes: int) -> tuple[bytearray, int]:
        if nbytes > self.max_reserve:
            raise ValueError(
                f"a frame of {nbytes} bytes with its prefix is too large: the limit is {self.max_reserve}; pass large "
                "values by reference"
            )
        with self._lock:
            if self._refused:
                raise ConnectionLost(self._refused)
            if self._older or self._head != self._tail:
                self._older.append((self._buffer, self._view, self._tail))
                if self._spare is None:
                    self._buffer = bytearray(len(self._buffer))
                    self._view = memoryview(self._buffer)
                else:
                    self._buffer, self._view = self._spare
                    self._spare = None
            else:
                self._head = 0
            self._tail = 0
            return self._buffer, 0

    def commit(self, nbytes: int) -> None:
        """Commit the first `nbytes` of the last reservation, which are sent then.

        Raises:
            ConnectionLost: `close` was called meanwhile.
        """
        if self._closed:
            raise ConnectionLost(self._refused)
        self._tail += nbytes

    def flush(self) -> bool:
        """Send committed bytes, as many as the system takes at once.

        Returns:
            True when the socket has become full. The caller has `resume` called when it takes bytes again.

        Raises:
            OSError: the error of `send`, unless it is a `BlockingIOError`.
        """
        with self._lock:
            if self._blocked:
                return False
            if not self._older:
                head, tail = self._head, self._tail
                if head == tail:
                    return False
                try:
                    sent = self._send(self._view[head:tail])
                except BlockingIOError:
                    sent = 0
                if head + sent == tail:
                    self._head = self._tail = 0
                    return False
                self._head = head + sent
                self._blocked = True
                return True
            self._blocked = not self._send_chunks()
            return self._blocked

    def resume(self) -> bool:
        """Continue to send, after the socket has become writable.

        Returns:
            True when nothing is left. The caller stops watching the socket.

        Raises:
            OSError: the error of `send`, unless it is a `BlockingIOError`.
        """
        with self._lock:
            self._blocked = not self._send_chunks()
            return not self._blocked

    def _send_chunks(self) -> bool:
        while True:
            buffer, view, end = self._older[0] if self._older else (self._buffer, self._view, self._tail)
            head = self._head
            if head < end:
                try:
                    sent = self._send(view[head:end])
                except BlockingIOError:
                    return False
                self._head = head + sent
                if self._head < end:
                    return False
            if not self._older:
                return True
            self._older.popleft()
            self._spare = buffer, view  # one empty chunk is kept, and all others are freed
            self._head = 0

    @property
    def pending(self) -> bool:
        """Whether the system has not taken all committed bytes yet."""
        return bool(self._older) or self._head != self._tail

    def refuse(self, reason: str) -> None:
        """Accept nothing more. Committed bytes can still be flushed. Takes no lock, so it is safe in a forked child."""
        self._refused = self._refused or reason
        self._room = -1

    def close(self, reason: str) -> None:
        """Accept nothing more, drop all pending bytes, and never call `send` again."""
        self.refuse(reason)
        with self._lock:
            self._closed = True
            self._older.clear()
            self._head = self._tail
            self._spare = None
            self._blocked = True
