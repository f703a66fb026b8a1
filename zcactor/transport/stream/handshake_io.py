"""The handshake over a non-blocking socket, as long as it makes progress.

A silent peer is given up soon, and a slow one is not: where many processes connect to each other on a few cores, a
handshake of one millisecond may wait for its turn for seconds.

Only bytes before the first frame pass through here, so clarity counts for more than speed. All waiting happens on the
running event loop, and leaves no watch behind when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeVar

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.stream.handshake import Crowded

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable

    from zcactor.transport.stream.handshake import Handshake, Introduction

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
"""Seconds without a byte. A handshake takes under a millisecond, so the limit is for a peer that is stopped or swapped
out."""
HANDSHAKE_TOTAL: Final = 30.0
"""Seconds of a handshake that makes progress: far above the time of thousands of handshakes at once. The limit is for a
peer that sends a byte from time to time."""
ADMITTED_WITHIN: Final = 30.0
"""Seconds of further attempts where a peer has too many handshakes under way."""
UNDER_WAY: Final = 32
"""Handshakes that a process begins at the same time. Further ones wait for their turn, so that these are answered
soon."""
_FIRST_RETRY: Final = 0.02
_LAST_RETRY: Final = 0.4
"""Seconds before the first further attempt and between the last ones. Each pause is drawn between half and all of
it."""


class Patience:
    """The time limit of a handshake: `HANDSHAKE_TIMEOUT` after the last progress, and `HANDSHAKE_TOTAL` in all."""

    __slots__ = ("_end", "_timeout", "messages", "missing")

    def __init__(self, timeout: asyncio.Timeout, end: float) -> None:
        self._timeout = timeout
        self._end = end
        self.messages = 0
        """Whole messages that the peer has sent."""
        self.missing = 1
        """Bytes that are still missing of its next message."""

    def progressed(self) -> None:
        """Begin the wait anew: a byte was received or sent."""
        if not self._timeout.expired() and self._timeout.when() is not None:
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(min(now + HANDSHAKE_TIMEOUT, self._end))

    def end(self) -> None:
        """Lift the limit: the handshake is done."""
        if not self._timeout.expired():
            self._timeout.reschedule(None)


_patience: ContextVar[Patience | None] = ContextVar("patience", default=None)


@contextlib.asynccontextmanager
async def patient() -> AsyncIterator[Patience]:
    """Limit the time of a handshake, unless a limit of an outer block applies already.

    Raises:
        TimeoutError: the handshake made no progress for too long, or took too long in all.
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
    """Begin the wait of the current handshake's limit anew: a byte was received or sent."""
    patience = _patience.get()
    if patience is not None:
        patience.progressed()


async def admitted(attempt: Callable[[], Awaitable[T]]) -> T:
    """Run ``attempt()``, again after a pause as long as the peer has too many handshakes under way. Returns its result.

    Raises:
        ConnectionLost: the peer had too many for `ADMITTED_WITHIN` seconds. Other errors of the attempt are raised as
            they are.
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
    """Wait until `sock` has bytes to read, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Wait until `sock` takes bytes, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_writer, loop.remove_writer)


def binding_of(sock: socket.socket) -> bytes:
    """Return the binding of a handshake over `sock`: that of its TLS stream, or empty bytes without TLS."""
    binding: Callable[[], bytes] | None = getattr(sock, "binding", None)
    return b"" if binding is None else binding()


async def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Receive the next `nbytes` bytes and no byte more. The system closes descriptors that come with them.

    Raises:
        ConnectionLost: the stream ends before that.
        OSError: the system reports the connection broken.
    """
    received = b""
    patience = _patience.get()
    if patience is not None:
        patience.missing = nbytes
    while len(received) < nbytes:
        try:
            part = sock.recv(nbytes - len(received))
        except BlockingIOError:
            await readable(sock)
            continue
        if not part:
            raise ConnectionLost("the peer closed the connection during the handshake")
        received += part
        if patience is not None:
            patience.missing -= len(part)
    if patience is not None:
        patience.messages += 1
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
    """Exchange the messages of `handshake` over `sock` until it is done. A refusal sends the peer the reason if
    possible.

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
            with contextlib.suppress(OSError):  # the error that is being raised is the reason for closing
                sock.send(handshake.farewell)
        raise


async def introduce(sock: socket.socket, handshake: Handshake, process: str) -> Introduction:
    """Do the connecting side of a handshake with the process whose name, in hexadecimal, is `process`.

    Raises:
        AuthenticationError: the peer refused this process, does not hold the token, or is another process.
        VersionMismatch, ProtocolError, ConnectionLost, OSError: as `shake_hands`.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await send_all(sock, handshake.opening)  # a peer that refuses at once has sent its reason before
    await shake_hands(sock, handshake)
    hello = handshake.peer
    if hello.process.hex() != process:
        raise AuthenticationError(f"process {hello.process.hex()} answers in the place of {process}")
    return hello


@contextlib.asynccontextmanager
async def answering(address: str, where: str) -> AsyncIterator[None]:
    """Limit the time of a step of connecting, see `patient`, and raise `ConnectionLost` for errors of the system.

    Args:
        address: the address of the process, for messages.
        where: the place of the process, for messages.

    Raises:
        ConnectionLost: the step took too long, or raised an `OSError` that is no `ProtocolError`.
    """
    try:
        async with patient():
            yield
    except TimeoutError as error:
        message = f"process {address} did not answer the handshake within {HANDSHAKE_TIMEOUT:.0f} s"
        raise ConnectionLost(message) from error
    except (ConnectionLost, ProtocolError):  # some of these are an OSError as well
        raise
    except OSError as error:
        # Event loops differ in their texts for errors of connecting.
        reason = error if error.errno is None else os.strerror(error.errno)
        raise ConnectionLost(f"process {address} cannot be reached {where}: {reason}") from error
