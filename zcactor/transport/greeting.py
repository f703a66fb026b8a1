"""Carrying the handshake over a non-blocking socket, as long as it makes progress.

A peer that says nothing is given up soon, and one that is slow is not: where many processes connect to each other on a
few cores, a handshake of a millisecond takes its turn for seconds.

Only what happens before the first frame goes through here, so clarity counts for more than speed. Whatever has to wait
does so on the running event loop and leaves no watch behind when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.auth import Crowded

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable

    from zcactor.transport.auth import Handshake, Hello

__all__ = [
    "ADMITTED_WITHIN",
    "HANDSHAKE_TIMEOUT",
    "HANDSHAKE_TOTAL",
    "UNDER_WAY",
    "Patience",
    "admitted",
    "answering",
    "binding_of",
    "introduce",
    "patient",
    "progressed",
    "readable",
    "receive_exactly",
    "send_all",
    "shake_hands",
    "writable",
]

T = TypeVar("T")

HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds without a byte; a handshake takes under a millisecond, so this is for a peer that is stopped or swapped
out."""
HANDSHAKE_TOTAL: Final = 30.0
"""Seconds of a handshake that makes progress: far above what thousands of them at once take, so it bounds a peer that
sends a byte from time to time."""
ADMITTED_WITHIN: Final = 30.0
"""Seconds of trying again where a peer has no place for us."""
UNDER_WAY: Final = 32
"""Handshakes that a process begins at once; the others wait for their turn, so that each of those is answered soon."""
_FIRST_RETRY: Final = 0.02
_LAST_RETRY: Final = 0.4
"""Seconds before the first and between the last attempts at a peer that is full; each is drawn, down to half of it."""


class Patience:
    """How long a handshake may go on: `HANDSHAKE_TIMEOUT` from the last progress on, `HANDSHAKE_TOTAL` in all."""

    __slots__ = ("_end", "_timeout", "heard")

    def __init__(self, timeout: asyncio.Timeout, end: float) -> None:
        self._timeout = timeout
        self._end = end
        self.heard = False
        """Whether the peer has said anything."""

    def progressed(self) -> None:
        """A byte has come or gone."""
        if not self._timeout.expired() and self._timeout.when() is not None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(min(now + HANDSHAKE_TIMEOUT, self._end))

    def end(self) -> None:
        """There is nothing to wait for any more."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)


_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)


@contextlib.asynccontextmanager
async def patient() -> AsyncIterator[Patience]:
    """Bounds a handshake in time, unless one of its steps is within a bound already.

    Raises:
        TimeoutError: there was no progress for too long, or it took too long in all.
    """
    outer = _patience.get()
    if outer is not None:
        yield outer
        return
    async with asyncio.timeout(HANDSHAKE_TIMEOUT) as timeout:
        patience = Patience(timeout, asyncio.get_running_loop().time() + HANDSHAKE_TOTAL)
        token = _patience.set(patience)
        try:
            yield patience
        finally:
            _patience.reset(token)
            patience.end()


def progressed() -> None:
    """A byte has come or gone: whatever bounds this handshake waits anew."""
    patience = _patience.get()
    if patience is not None:
        patience.progressed()


async def admitted(attempt: Callable[[], Awaitable[T]]) -> T:
    """What ``attempt()`` gives, which is made again, after a while, as long as the peer has no place for us.

    Raises:
        ConnectionLost: the peer has had none for `ADMITTED_WITHIN`; and what else the attempt raises.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + ADMITTED_WITHIN
    delay = _FIRST_RETRY
    while True:
        try:
            return await attempt()
        except Crowded as error:
            if loop.time() + delay > end:
                raise ConnectionLost(*error.args) from error
        await asyncio.sleep(random.uniform(delay / 2, delay))
        delay = min(2 * delay, _LAST_RETRY)


async def _ready(sock: socket.socket, add: Callable[..., object], remove: Callable[[int], object]) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    fd = sock.fileno()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)
    progressed()


async def readable(sock: socket.socket) -> None:
    """Wait until `sock` has bytes, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Wait until `sock` takes bytes, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_writer, loop.remove_writer)


def binding_of(sock: socket.socket) -> bytes:
    """What a handshake over `sock` is bound to: its TLS, where it speaks that, and else nothing."""
    binding: Callable[[], bytes] | None = getattr(sock, "binding", None)
    return b"" if binding is None else binding()


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """The next `nbytes` bytes and not one more. Descriptors that come along are closed by the system.

    Raises:
        ConnectionLost: the stream ends before.
        OSError: the system reports the connection broken.
    """
    received = b""
    while len(received) < nbytes:
        try:
            part = sock.recv(nbytes - len(received))
        except BlockingIOError:
            await readable(sock)
            continue
        if not part:
            raise ConnectionLost("the peer closed the connection during the handshake")
        received += part
        if (patience := _patience.get()) is not None:
            patience.heard = True
    return received


async def send_all(sock: socket.socket, data: bytes) -> None:
    """Send all of `data`.

    Raises:
        OSError: the system reports the connection broken.
    """
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await writable(sock)


async def shake_hands(sock: socket.socket, handshake: Handshake) -> None:
    """Carry `handshake`'s messages over `sock` until it is done; on refusing, tell the peer why as far as that goes.

    The connecting side has sent `Handshake.opening` before.

    Raises:
        AuthenticationError, VersionMismatch, ProtocolError, ConnectionLost: as `Handshake.receive`.
        OSError: the system reports the connection broken.
    """
    try:
        while handshake.wants:
            answer = handshake.receive(await receive_exactly(sock, handshake.wants))
            if answer:
                await send_all(sock, answer)
    except ProtocolError:
        if handshake.farewell:
            with contextlib.suppress(OSError):  # the reason for closing is the one being raised
                sock.send(handshake.farewell)
        raise


async def introduce(sock: socket.socket, handshake: Handshake, process: str) -> Hello:
    """The connecting side's `shake_hands`, with the process that is named `process` in hexadecimal.

    Raises:
        AuthenticationError: the peer refused us, does not hold the token, or is another process.
        VersionMismatch, ProtocolError, ConnectionLost, OSError: as `shake_hands`.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await send_all(sock, handshake.opening)  # a peer that refuses at once has left its reason
    await shake_hands(sock, handshake)
    hello = handshake.peer
    if hello.process.hex() != process:
        raise AuthenticationError(f"process {hello.process.hex()} answers in the place of {process}")
    return hello


@contextlib.asynccontextmanager
async def answering(address: str, where: str) -> AsyncIterator[None]:
    """Bounds a step of connecting in time, see `patient`, and says in our own terms that the process did not take part.

    Args:
        address: names the process in messages.
        where: where it is looked for, for messages.

    Raises:
        ConnectionLost: the step took too long, or met an `OSError` that is no `ProtocolError`.
    """
    try:
        async with patient():
            yield
    except TimeoutError as error:
        message = f"process {address} did not answer the handshake within {HANDSHAKE_TIMEOUT:.0f} s"
        raise ConnectionLost(message) from error
    except (ConnectionLost, ProtocolError):  # some of which are an OSError as well
        raise
    except OSError as error:
        # loops word errors of connecting in their own ways
        reason = error if error.errno is None else os.strerror(error.errno)
        raise ConnectionLost(f"process {address} cannot be reached {where}: {reason}") from error
