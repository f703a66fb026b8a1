"""Detection of a lost host at the other end of a TCP socket, by the system's own records.

The system asks a silent peer's system by keepalive, and repeats bytes that are not confirmed. TCP_INFO (tcp(7)) has the
time since the last sign of life. TCP_USER_TIMEOUT ends connections as well, but not only those of lost hosts. It also
cuts off a peer that does not read for some seconds while much is sent to it, because a closed window counts as
unconfirmed (tcp_probe_timer of Linux). And it is late where a local firewall drops outgoing packets.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["RESET_ON_CLOSE", "SILENCE", "Liveness", "received", "timed_out", "tune"]

KEEPALIVE: Final = (2, 1, 3)
"""Seconds of silence until the first keepalive question, seconds between questions, and the number of questions without
an answer that ends the connection."""
USER_TIMEOUT: Final = 60_000
"""Milliseconds for which bytes may stay unsent because the peer does not read. After that it counts as hung."""
SILENCE: Final = 4.5
"""Seconds without a sign of life after which a peer that owes one is given up: three questions had no answer."""
AGAIN: Final = 0.5
"""Seconds until the second look, which has to find the same: at the first one an answer may have been under way."""
RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)
"""A value of SO_LINGER: closing drops unsent bytes and resets the connection (socket(7))."""
_LONGEST_REPEAT: Final = 1000
"""The most milliseconds between two attempts, where the system has such an option (Linux 6.15)."""
_TCP_RTO_MAX_MS: Final = 44
"""From linux/tcp.h; the socket module has no name for it."""

_INFO: Final = struct.Struct("=3xB20xI24xII")
"""Fields of struct tcp_info (linux/tcp.h): questions without an answer, segments without a confirmation, and
milliseconds since the last data and since the last confirmation arrived."""


_RECEIVED: Final = struct.Struct("=128xQ")
"""Field of struct tcp_info: bytes of received data."""


def received(sock: socket.socket) -> int:
    """Return the bytes that a TCP socket has received, as the system counts them (TCP_INFO, tcp(7))."""
    count: int = _RECEIVED.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size))[0]
    return count


def timed_out() -> TimeoutError:
    """The error of the system for a socket whose peer is silent, which is also that of a socket that `Liveness` gives
    up: from other ends it can be told that the process there may live."""
    return TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and have the system ask a silent peer for signs of life."""
    idle, interval, count = KEEPALIVE
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    with contextlib.suppress(OSError):  # older kernels probe a peer that does not read at growing intervals
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_REPEAT)


class Liveness:
    """A watch on one socket until it is stopped. Runs on the loop's thread.

    It costs one system call every few seconds. A silent peer that owes no confirmation is not given up: after
    `KEEPALIVE` the system asks it, and from then on it owes one.

    Args:
        sock: connected and tuned by `tune`; stays the caller's, which calls `stop` before closing it.
        loop: the loop.
        silent: called once with a description of the silence. The watch ends then.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, silent: Callable[[str], object]) -> None:
        self._sock = sock
        self._loop = loop
        self._silent = silent
        self._suspected = float("inf")  # the silence at the last look, if it was too long
        self._timer = loop.call_later(SILENCE, self._look)

    def stop(self) -> None:
        """Stop the watch. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        questions, unconfirmed, data, confirmation = _INFO.unpack(
            self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        )
        silence = min(data, confirmation) / 1000
        if silence < SILENCE or not (questions or unconfirmed):
            self._suspected = float("inf")
            self._timer = self._loop.call_later(max(SILENCE - silence, AGAIN), self._look)
        elif silence < self._suspected:  # the first look, or the peer has answered in between
            self._suspected = silence
            self._timer = self._loop.call_later(AGAIN, self._look)
        else:
            # Where only one direction is cut, the peer still receives our packets. A reset reaches it at once, but the
            # end of the stream would wait behind bytes that it cannot confirm.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._silent(f"broke: its host has not answered for {silence:.1f} s")
