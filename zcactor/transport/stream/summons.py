"""A word to a process, over a connection of its own, that another head leads its cluster.

The connection that a process has to a head does not end where that is stopped, so nobody else may tell the process
where the head is now. The form of the message is that of `zcactor.transport.stream.head_word`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING

from zcactor.errors import ProtocolError
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import (
    admitted,
    answering,
    binding_of,
    introduce,
    progressed,
)
from zcactor.transport.stream.head_word import HeadWord, hear, say
from zcactor.transport.stream.probe import connected, parse_host_port

if TYPE_CHECKING:
    from zcactor.transport.stream.tls import Tls

__all__ = ["summon", "take_summons"]


async def summon(address: str, place: str, epoch: int, token: bytes, tls: Tls | None = None) -> None:
    """Tell the process at `address` that a head leads its cluster at `place`. It does not answer.

    Args:
        address: of the process, ``name@host:port``.
        place: ``host:port`` of the head.
        epoch: of the head's term.
        token: the cluster's secret, 32 bytes.
        tls: the certificates where all bytes pass through TLS, otherwise None.

    Raises:
        ConnectionLost: no process listens there, or it sends nothing for 5 s.
        AuthenticationError: one side does not hold the other's token, or another process is there.
        VersionMismatch: the process has another protocol or Python version.
        ProtocolError: the program there does not speak zcactor's protocol.
        ValueError: `address` has another form, or `place` is too long.
    """
    message = HeadWord(place, epoch).encode()
    await admitted(lambda: _tell(address, message, token, tls))


async def _tell(address: str, message: bytes, token: bytes, tls: Tls | None) -> None:
    name, _, place = address.rpartition("@")
    host, port = parse_host_port(place)
    async with answering(address, "over TCP"):
        with contextlib.ExitStack() as undo:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            sock = undo.enter_context(await connected(found))
            progressed()
            if tls is not None:
                sock = undo.enter_context(await tls.connect(sock))
            hello = Introduction(secrets.token_bytes(16), os.getpid(), 0, 4, 64, Purpose.SUMMONS)
            handshake = Handshake(token, hello, accepting=False, binding=binding_of(sock))
            await introduce(sock, handshake, name)
            await say(sock, handshake, token, message)


async def take_summons(sock: socket.socket, handshake: Handshake, token: bytes) -> HeadWord:
    """Read the message of `summon` after the handshake. Returns the head's place and the epoch of its term.

    Raises:
        ConnectionLost: the connection has ended before.
        AuthenticationError: the message was changed on its way.
        ProtocolError: the message has another form.
    """
    word = await hear(sock, handshake, token)
    try:
        parse_host_port(word.place)
    except ValueError as error:
        raise ProtocolError(f"a message names a head: {error}") from error
    return word
