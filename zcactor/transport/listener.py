"""The socket at which peers arrive, and the bound on those who have not proved anything yet.

A process that connects and stays silent, or sends something else, costs one descriptor and one task for at most five
seconds, and there are never more than 128 of them, of one address never more than a quarter: beyond that one that has
said nothing for half a second makes place, and where there is none a newcomer is told so and closed. It tries again by
itself. Peers that are already connected do not pass through here, so they do not notice.
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
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["MAX_PENDING", "Listener", "Rebuff"]

log = logging.getLogger("zcactor.transport")

MAX_PENDING: Final = 128
"""Handshakes at once: enough for a worker burst, and a small part of the usual 1,024 descriptors."""
PER_SOURCE: Final = MAX_PENDING // 4
"""Handshakes at once with peers at one address, so that no single host keeps the others away."""
SILENT: Final = 0.5
"""Seconds after which one that has said nothing makes place for another; a connector speaks first, and at once."""
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
    """Reports what strangers do by at most one line per `LOG_INTERVAL`, which counts those left out.

    Args:
        what: was done about it.
    """

    def __init__(self, what: str = "refused a connection") -> None:
        self._what = what
        self._silent_until = float("-inf")
        self._left_out = 0

    def report(self, now: float, reason: object) -> None:
        """Log `reason`, or count it. `now` is in seconds on any clock that does not jump."""
        if now < self._silent_until:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._silent_until, self._left_out = now + LOG_INTERVAL, 0
        log.warning("%s: %s%s", self._what, reason, more)


class _Place:
    """One handshake."""

    __slots__ = ("begun", "left", "patience", "sock", "source")

    def __init__(self, sock: socket.socket, source: str | None, begun: float) -> None:
        self.sock = sock
        self.source = source
        self.begun = begun
        self.left = False
        """Whether it has made place for another."""
        self.patience: greeting.Patience | None = None

    def is_silent(self, now: float) -> bool:
        """Whether it has had the time to say something, and has not."""
        return now - self.begun >= SILENT and not (self.patience is not None and self.patience.heard)


class Listener:
    """Accepts at a socket and runs `greet` for each connection that there is nothing to say against.

    Args:
        sock: non-blocking and listening; belongs to the listener from here.
        greet: does the handshake on a socket that it owns from here. What it raises of `ProtocolError` and `OSError`
            (which includes `TimeoutError`) is logged at a bounded rate; anything else goes to the loop's exception
            handler.
        objection: why a connection is turned away before anything is read from it; None when it is not.
        source: the address that a connection comes from, as far as there is one.
    """

    def __init__(
        self,
        sock: socket.socket,
        greet: Callable[[socket.socket], Awaitable[None]],
        objection: Callable[[socket.socket], str | None] = lambda _: None,
        source: Callable[[socket.socket], str | None] = lambda _: None,
    ) -> None:
        self._sock = sock
        self._greet = greet
        self._objection = objection
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._pending: dict[asyncio.Task[None], _Place] = {}
        self._rebuff = Rebuff()
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False
        """Whether it listens no more."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    @property
    def pending(self) -> int:
        """Handshakes that are going on now."""
        return sum(not place.left for place in self._pending.values())

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
            self._turn_away(sock, Status.AUTH)
            self._rebuff.report(self._loop.time(), objection)
            return
        source = self._source(sock)
        taken = {task: place for task, place in self._pending.items() if not place.left}
        neighbours = {task: place for task, place in taken.items() if place.source == source is not None}
        for crowd, limit, where in ((neighbours, PER_SOURCE, f" from {source}"), (taken, MAX_PENDING, "")):
            if len(crowd) >= limit and not self._make_place(crowd):
                # None of them is silent: many peers come at once, and try again.
                log.debug("put off a connection: %d handshakes%s are pending already", limit, where)
                self._turn_away(sock, Status.FULL)
                return
        place = _Place(sock, source, self._loop.time())
        task = self._loop.create_task(self._welcome(place), name="zcactor handshake")
        self._pending[task] = place
        task.add_done_callback(self._on_done)

    def _make_place(self, crowd: Mapping[asyncio.Task[None], _Place]) -> bool:
        """Give up the oldest of `crowd` that has said nothing, if there is one."""
        now = self._loop.time()
        for task, place in crowd.items():
            if not place.left and place.is_silent(now):
                place.left = True
                with contextlib.suppress(OSError):  # it may have gone already, and nothing is lost then
                    place.sock.send(refusal(Status.FULL))
                task.cancel()
                self._rebuff.report(now, f"it said nothing for {SILENT:g} s while others waited for a place")
                return True
        return False

    def _turn_away(self, sock: socket.socket, status: Status) -> None:
        with sock, contextlib.suppress(OSError):  # it may have gone already, and nothing is lost then
            sock.send(refusal(status))

    async def _welcome(self, place: _Place) -> None:
        try:
            async with greeting.patient() as place.patience:
                await self._greet(place.sock)
        except TimeoutError:
            self._rebuff.report(
                self._loop.time(), f"it said nothing in the handshake for {greeting.HANDSHAKE_TIMEOUT:.0f} s"
            )
        except (ProtocolError, OSError) as error:
            self._rebuff.report(self._loop.time(), error)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        sock = self._pending.pop(task).sock
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
