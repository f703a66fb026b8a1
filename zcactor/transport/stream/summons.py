"""A word to a process, over a connection of its own, that another head leads its cluster.

The connection that a process has to a head does not end where that is stopped, so nobody else may tell the process
where the head is now. After the handshake for `Purpose.SUMMONS` the connector sends a byte with the length of its
message, the message, which is the epoch of its term (8 bytes, little endian) and its place ``host:port``, and a proof:
HMAC-SHA256 keyed by the token, over a label, the transcript of the handshake and the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Final

from zcactor.errors import AuthenticationError, ProtocolError
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import (
    admitted,
    answering,
    binding_of,
    introduce,
    progressed,
    receive_exactly,
    send_all,
)
from zcactor.transport.stream.probe import connected, parse_host_port

if TYPE_CHECKING:
    from zcactor.transport.stream.tls import Tls

__all__ = ["summon", "take_summons"]

_EPOCH: Final = struct.Struct("<Q")
_LABEL: Final = b"zcactor summons\0"
_PROOF: Final = 32
_LONGEST: Final = 255


def _proof(token: bytes, transcript: bytes, message: bytes) -> bytes:
    return hmac.digest(token, _LABEL + transcript + message, "sha256")


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
    message = _EPOCH.pack(epoch) + place.encode("ascii")
    if len(message) > _LONGEST:
        raise ValueError(f"{place!r} is too long for an address")
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
            proof = _proof(token, handshake.transcript, message)
            await send_all(sock, bytes((len(message),)) + message + proof)


async def take_summons(sock: socket.socket, handshake: Handshake, token: bytes) -> tuple[str, int]:
    """Read the message of `summon` after the handshake. Returns the head's place and the epoch of its term.

    Raises:
        ConnectionLost: the connection has ended before.
        AuthenticationError: the message was changed on its way.
        ProtocolError: the message has another form.
    """
    nbytes = (await receive_exactly(sock, 1))[0]
    message = bytes(await receive_exactly(sock, nbytes))
    proof = bytes(await receive_exactly(sock, _PROOF))
    if not hmac.compare_digest(proof, _proof(token, handshake.transcript, message)):
        raise AuthenticationError("a message on the cluster's head was changed on its way")
    place = message[_EPOCH.size :].decode("ascii", "replace")
    try:
        parse_host_port(place)
        epoch = _EPOCH.unpack_from(message)[0]
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"a message names a head: {error}") from error
    return place, epoch
