"""Whether the host at the other end of a TCP socket still answers, as the system knows it.

The system asks a silent peer's system by keepalive and repeats what is not confirmed; TCP_INFO (tcp(7)) tells how long
ago it last heard anything. TCP_USER_TIMEOUT would end a connection as well, but not only one whose peer is gone: a peer
that is there, and whose program does not read for some seconds while much is sent to it, is cut off by it, because a
closed window counts as unconfirmed (tcp_probe_timer of Linux). And it is late where a local firewall drops what leaves.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["RESET_ON_CLOSE", "SILENCE", "Liveness", "received", "tune"]

KEEPALIVE: Final = (2, 1, 3)
"""Seconds of silence until the peer's system is asked whether it is there, seconds between questions, and how many go
unanswered."""
USER_TIMEOUT: Final = 60_000
"""Milliseconds that bytes may stay unsent because the peer does not read: it counts as hung then."""
SILENCE: Final = 4.5
"""Seconds without a sign of life after which a peer that owes one is given up: three questions went unanswered."""
AGAIN: Final = 0.5
"""Seconds until the second look, which has to find the same: an answer may have been on its way at the first."""
RESET_ON_CLOSE: Final = struct.pack("@ii", 1, 0)
"""A value of SO_LINGER: closing drops what was not sent and tells the peer at once (socket(7))."""
_LONGEST_REPEAT: Final = 1000
"""Milliseconds between two attempts at the most, where the system can be told (Linux 6.15)."""
_TCP_RTO_MAX_MS: Final = 44
"""Of linux/tcp.h; the socket module has no name for it."""

_INFO: Final = struct.Struct("=3xB20xI24xII")
"""Of struct tcp_info (linux/tcp.h): questions that are unanswered, segments that are not confirmed, and milliseconds
since the last data and since the last confirmation came."""


_RECEIVED: Final = struct.Struct("=128xQ")
"""Of struct tcp_info: bytes of data that have come."""


def received(sock: socket.socket) -> int:
    """Bytes that have come through a TCP socket, as its system counts them (TCP_INFO, tcp(7))."""
    count: int = _RECEIVED.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size))[0]
    return count


def tune(sock: socket.socket) -> None:
    """Send small frames at once, and have the system ask a silent peer for signs of life."""
    idle, interval, count = KEEPALIVE
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    with contextlib.suppress(OSError):  # an older kernel, which asks a peer that does not read ever more rarely
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_REPEAT)


class Liveness:
    """Looks at one socket until it is stopped. On the loop's thread.

    What it costs is one system call every few seconds. A peer that is silent and owes nothing is left alone: the system
    asks it after `KEEPALIVE`, and then it does.

    Args:
        sock: connected and tuned by `tune`; stays the caller's, who calls `stop` before closing it.
        loop: the loop.
        silent: called once, with words for what has happened; nothing is looked at after that.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, silent: Callable[[str], object]) -> None:
        self._sock = sock
        self._loop = loop
        self._silent = silent
        self._suspected = float("inf")  # the silence at the last look, where it was too long
        self._timer = loop.call_later(SILENCE, self._look)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()

    def _look(self) -> None:
        questions, unconfirmed, data, confirmation = _INFO.unpack(
            self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        )
        silence = min(data, confirmation) / 1000
        if silence < SILENCE or not (questions or unconfirmed):
            self._suspected = float("inf")
            self._timer = self._loop.call_later(max(SILENCE - silence, AGAIN), self._look)
        elif silence < self._suspected:  # the first look, or it has answered in between
            self._suspected = silence
            self._timer = self._loop.call_later(AGAIN, self._look)
        else:
            # Where only one direction is cut the peer still hears us, and it may hear nothing else of this: the end of
            # the stream would wait behind what it cannot confirm.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._silent(f"broke: its host has not answered for {silence:.1f} s")
