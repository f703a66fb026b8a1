"""Carrying the handshake over a non-blocking socket, within a time.

Only what happens before the first frame goes through here, so clarity counts for more than speed. Whatever has to wait
does so on the running event loop and leaves no watch behind when it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Callable

    from zcactor.transport.auth import Handshake, Hello

__all__ = [
    "HANDSHAKE_TIMEOUT",
    "answering",
    "introduce",
    "readable",
    "receive_exactly",
    "send_all",
    "shake_hands",
    "writable",
]

HANDSHAKE_TIMEOUT: Final = 5.0
"""Seconds; a handshake takes under a millisecond, so this is for a peer that is stopped or swapped out."""


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


async def readable(sock: socket.socket) -> None:
    """Wait until `sock` has bytes, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_reader, loop.remove_reader)


async def writable(sock: socket.socket) -> None:
    """Wait until `sock` takes bytes, or has ended. Cancelling leaves no watch behind."""
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_writer, loop.remove_writer)


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
    """Bounds a step of connecting in time, and says in our own terms that the process did not take part.

    Args:
        address: names the process in messages.
        where: where it is looked for, for messages.

    Raises:
        ConnectionLost: the step took longer than `HANDSHAKE_TIMEOUT` or met an `OSError` that is no `ProtocolError`.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
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
