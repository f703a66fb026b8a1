"""The listening socket, and the limit of connections that have not proved anything yet.

A process that connects and stays silent, or sends other bytes, costs one descriptor and one task for at most five
seconds. There are at most 128 of them, and from one address at most a quarter. At the limit, the oldest one that owes a
message for half a second is closed: single bytes keep no place. Where there is none, a new connection is refused and
closed, and its process tries again.

Who has proved the token takes no such place any more. Addresses from which somebody has proved it have places of their
own, so that strangers elsewhere do not delay the further sockets of connected peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError
from zcactor.logs import transport_log as log
from zcactor.transport.stream import handshake_io
from zcactor.transport.stream.handshake import HandshakeStatus, refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["MAX_PENDING", "Listener", "Rebuff"]

MAX_PENDING: Final = 128
"""Handshakes at the same time: enough for many workers that start together, and a small part of the usual 1,024
descriptors."""
PER_SOURCE: Final = MAX_PENDING // 4
"""Handshakes at the same time with peers at one address, so that no host takes all of them."""
RESERVED: Final = MAX_PENDING // 4
"""Further handshakes, with peers at known addresses only: those from which somebody has proved the token."""
KNOWN: Final = 1024
"""Addresses that are known, the latest ones."""
SILENT: Final = 0.5
"""Seconds that a connection has for its hello, and then for its proof, where others wait for its place. A connector
sends each at once."""
SILENT_BY_TLS: Final = 4
"""Times `SILENT` for a connection by TLS, which computes more: its bytes cannot be looked at before they are read."""
HELLO: Final = 2
"""Messages up to the end of the hello: the preamble is one of its own."""
PROOF: Final = 3
"""Messages up to the proof of the token."""
ACCEPTS_PER_TURN: Final = 64
"""New connections in one turn of the loop, so that many of them do not keep connected peers waiting."""
PAUSE: Final = 1.0
"""Seconds without accepting after the process ran out of descriptors: the loop would spin otherwise."""
LOG_INTERVAL: Final = 10.0
"""Seconds between two log lines about refused connections."""

_CALLERS_FAULT: Final = frozenset(
    (
        errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET, errno.EHOSTUNREACH,
        errno.EOPNOTSUPP, errno.ENETUNREACH, errno.EPERM, errno.ETIMEDOUT,
    )
)  # fmt: skip
"""Errors of a single new connection, as accept(2) reports them. The next connection may work."""
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Rebuff:
    """A log of refused connections: at most one line for each `LOG_INTERVAL`, with the number of omitted ones.

    Args:
        what: the text of the line before the reason.
    """

    def __init__(self, what: str = "refused a connection") -> None:
        self._what = what
        self._silent_until = float("-inf")
        self._left_out = 0

    def report(self, now: float, reason: object) -> None:
        """Log `reason`, or count it. `now` is in seconds of a monotonic clock."""
        if now < self._silent_until:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._silent_until, self._left_out = now + LOG_INTERVAL, 0
        log.warning("%s: %s%s", self._what, reason, more)


class _Place:
    """A handshake that is under way."""

    __slots__ = ("_hello", "begun", "known", "left", "patience", "sock", "source")

    def __init__(self, sock: socket.socket, source: str | None, begun: float, *, known: bool) -> None:
        self.sock = sock
        self.source = source
        self.known = known
        """Whether its address is one from which somebody has proved the token."""
        self._hello = False
        self.begun = begun
        self.left = False
        """Whether it was closed for another one."""
        self.patience: handshake_io.Patience | None = None

    @property
    def messages(self) -> int:
        """Whole messages of the peer."""
        return 0 if self.patience is None else self.patience.messages

    @property
    def proven(self) -> bool:
        """Whether the peer's proof has come. A wrong one ends the handshake at once."""
        return self.messages >= PROOF

    def is_silent(self, now: float) -> bool:
        """Whether the peer owes its hello or its proof for `SILENT` seconds. While bytes of it are not read
        yet, not the peer is late."""
        if self.proven:
            return False
        if self.messages >= HELLO and not self._hello:
            self._hello, self.begun = True, now
        if now - self.begun < SILENT:
            return False
        if self.sock.fileno() < 0:  # a `TlsSocket` has taken it over
            return now - self.begun >= SILENT_BY_TLS * SILENT
        missing = 1 if self.patience is None else self.patience.missing
        try:
            return len(self.sock.recv(missing, socket.MSG_PEEK)) < missing
        except OSError:  # nothing is there, or the connection has ended
            return True


class Listener:
    """A listener that runs `greet` for each accepted connection, unless there is an objection.

    Args:
        sock: non-blocking and listening; belongs to the listener from here.
        greet: does the handshake on a socket, which it owns from here. `ProtocolError` and `OSError` (which includes
            `TimeoutError`) are logged at a limited rate. Other exceptions go to the loop's exception handler.
        objection: the reason to refuse a connection before anything is read from it, or None.
        source: the address that a connection comes from; None where it has no address.
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
        self._known: dict[str, None] = {}
        self._pause: asyncio.TimerHandle | None = None
        self.closed = False
        """Whether the listener is closed."""
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    @property
    def pending(self) -> int:
        """Number of handshakes under way."""
        return sum(not place.left for place in self._pending.values())

    def _met(self, source: str | None) -> None:
        """Note that somebody at `source` has proved the token."""
        if source is not None:
            self._known.pop(source, None)
            self._known[source] = None
            if len(self._known) > KNOWN:
                del self._known[next(iter(self._known))]

    @property
    def ours(self) -> bool:
        """Whether this process has made the listener. False in a forked child."""
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
            self._turn_away(sock, HandshakeStatus.AUTH)
            self._rebuff.report(self._loop.time(), objection)
            return
        source = self._source(sock)
        known = source in self._known
        taken = {task: place for task, place in self._pending.items() if not (place.left or place.proven)}
        neighbours = {task: place for task, place in taken.items() if place.source == source is not None}
        most = MAX_PENDING + RESERVED
        if not known:
            taken = {task: place for task, place in taken.items() if not place.known}
            most = MAX_PENDING
        for crowd, limit, where in ((neighbours, PER_SOURCE, f" from {source}"), (taken, most, "")):
            if len(crowd) >= limit and not self._make_place(crowd):
                # No connection is silent: many peers arrive at once. They try again.
                log.debug("put off a connection: %d handshakes%s are pending already", limit, where)
                self._turn_away(sock, HandshakeStatus.FULL)
                return
        place = _Place(sock, source, self._loop.time(), known=known)
        task = self._loop.create_task(self._welcome(place), name="zcactor handshake")
        self._pending[task] = place
        task.add_done_callback(self._on_done)

    def _make_place(self, crowd: Mapping[asyncio.Task[None], _Place]) -> bool:
        """Close the oldest silent connection of `crowd`, if there is one. It is told that it may try again."""
        now = self._loop.time()
        for task, place in crowd.items():
            if not place.left and place.is_silent(now):
                place.left = True
                with contextlib.suppress(OSError):  # it may have ended already
                    status = refusal(HandshakeStatus.FULL)
                    place.sock.send(status if place.messages < HELLO else status[-1:])
                task.cancel()
                self._rebuff.report(now, f"it owed a message for {SILENT:g} s while others waited for a place")
                return True
        return False

    def _turn_away(self, sock: socket.socket, status: HandshakeStatus) -> None:
        with sock, contextlib.suppress(OSError):  # it may have ended already
            sock.send(refusal(status))

    async def _welcome(self, place: _Place) -> None:
        try:
            async with handshake_io.patient() as place.patience:
                await self._greet(place.sock)
            self._met(place.source)
        except TimeoutError:
            self._rebuff.report(
                self._loop.time(), f"it said nothing in the handshake for {handshake_io.HANDSHAKE_TIMEOUT:.0f} s"
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
        """Close this process's copy of the socket, in a forked child, so that no peer connects to a parent that has
        ended."""
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
