"""The socket at which peers arrive, and the bound on those who have not proved anything yet.

A process that connects and stays silent, or sends something else, costs one descriptor and one task for at most five
seconds, and there are never more than 128 of them: beyond that a newcomer is told so and closed. Peers that are
already connected do not pass through here, so they do not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.transport import greeting
from zcactor.transport.auth import Status, refusal

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

__all__ = ["MAX_PENDING", "Listener", "Rebuff"]

log = logging.getLogger("zcactor.transport")

MAX_PENDING: Final = 128
"""Handshakes at once: enough for a worker burst, and a small part of the usual 1,024 descriptors."""
ACCEPTS_PER_TURN: Final = 64
"""New sockets in one turn of the loop, so that a flood of them does not keep live peers waiting."""
PAUSE: Final = 1.0
"""Seconds without accepting after the process ran out of descriptors; trying on would only keep the loop spinning."""
LOG_INTERVAL: Final = 10.0
"""Seconds between two log lines about refused connections."""

_CALLERS_FAULT: Final = frozenset(
    (
        errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH,
        errno.EOPNOTSUPP, errno.ENETUNREACH, errno.EPERM, errno.ETIMEDOUT,
    )
)  # fmt: skip
"""Errors of a new connection that accept(2) hands on; the next one may be sound."""
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Rebuff:
    """Reports refused connections by at most one line per `LOG_INTERVAL`, which counts those left out."""

    def __init__(self) -> None:
        self._silent_until = float("-inf")
        self._left_out = 0

    def report(self, now: float, reason: object) -> None:
        """Log `reason`, or count it. `now` is in seconds on any clock that does not jump."""
        if now < self._silent_until:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._silent_until, self._left_out = now + LOG_INTERVAL, 0
        log.warning("refused a connection: %s%s", reason, more)


class Listener:
    """Accepts at a socket and runs `greet` for each connection that there is nothing to say against.

    Args:
        sock: non-blocking and listening; belongs to the listener from here.
        greet: does the handshake on a socket that it owns from here. What it raises of `ProtocolError` and `OSError`
            (which includes `TimeoutError`) is logged at a bounded rate; anything else goes to the loop's exception
            handler.
        objection: why a connection is turned away before anything is read from it; None when it is not.
    """

    def __init__(
        self,
        sock: socket.socket,
        greet: Callable[[socket.socket], Awaitable[None]],
        objection: Callable[[socket.socket], str | None] = lambda _: None,
    ) -> None:
        self._sock = sock
        self._greet = greet
        self._objection = objection
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._pending: dict[asyncio.Task[None], socket.socket] = {}
        self._rebuff = Rebuff()
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False
        """Whether it listens no more."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    @property
    def pending(self) -> int:
        """Handshakes that are going on now."""
        return len(self._pending)

    @property
    def ours(self) -> bool:
        """Whether this process made it; a forked child did not."""
        return os.getpid() == self._process

    def _on_readable(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _CALLERS_FAULT:
                    continue
                if error.errno not in _EXHAUSTED:
                    raise
                self._rest(error)
                return
            sock.setblocking(False)
            self._admit(sock)

    def _rest(self, error: OSError) -> None:
        log.error("accepting no connections for %.0f s: %s; raise the limit (ulimit -n)", PAUSE, error.strerror)
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(PAUSE, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def _admit(self, sock: socket.socket) -> None:
        objection = self._objection(sock)
        if objection is not None:
            self._turn_away(sock, Status.AUTH, objection)
        elif len(self._pending) >= MAX_PENDING:
            self._turn_away(sock, Status.FULL, f"{MAX_PENDING} handshakes are pending already")
        else:
            task = self._loop.create_task(self._welcome(sock), name="zcactor handshake")
            self._pending[task] = sock
            task.add_done_callback(self._on_done)

    def _turn_away(self, sock: socket.socket, status: Status, reason: str) -> None:
        with sock, contextlib.suppress(OSError):  # it may have gone already, and nothing is lost then
            sock.send(refusal(status))
        self._rebuff.report(self._loop.time(), reason)

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            async with asyncio.timeout(greeting.HANDSHAKE_TIMEOUT):
                await self._greet(sock)
        except TimeoutError:
            self._rebuff.report(
                self._loop.time(), f"it did not finish the handshake in {greeting.HANDSHAKE_TIMEOUT:.0f} s"
            )
        except (ProtocolError, OSError) as error:
            self._rebuff.report(self._loop.time(), error)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        sock = self._pending.pop(task)
        if task.cancelled():
            sock.close()  # a task that never ran has not taken the socket over
        elif (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": "accepting a connection failed", "exception": error, "task": task}
            )

    def abandon(self) -> None:
        """In a forked child: close its copy of the socket, so that nobody connects to a parent that is gone."""
        self.closed = True
        self._sock.close()

    async def aclose(self) -> None:
        """Stop listening and end the pending handshakes. Idempotent.

        In a forked child only the child's copy of the socket is closed.
        """
        if self.closed:
            return
        self.closed = True
        if not self.ours:
            self._sock.close()
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        pending = list(self._pending)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
