"""A word about a cluster's head: where it is, and in which term it leads.

It follows the handshake of a connection that serves nothing else: for `Purpose.SUMMONS` the connector says it, for
`Purpose.NAME` the process that was asked for its name. It is a byte with the length of a message, the message, which is
the epoch of the term (8 bytes, little endian) and the place ``host:port``, and a proof: HMAC-SHA256 keyed by the
token, over a label, the transcript of the handshake and the message. The transcript has both sides' purposes, so a word
of one kind is never taken for one of the other.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.errors import AuthenticationError, ProtocolError
from zcactor.transport.stream.handshake_io import receive_exactly, send_all

if TYPE_CHECKING:
    import socket

    from zcactor.transport.stream.handshake import Handshake

__all__ = ["HeadWord", "hear", "say"]

_EPOCH: Final = struct.Struct("<Q")
_LABEL: Final = b"zcactor head\0"
_PROOF: Final = 32
_LONGEST: Final = 255


class HeadWord(NamedTuple):
    """The place of a head and the epoch of its term."""

    place: str
    """``host:port``; empty for the speaker's own, and where no head is known."""
    epoch: int
    """0 where no head is known, and where the speaker leads nothing."""

    def encode(self) -> bytes:
        """Encode the message.

        Raises:
            ValueError: the place is too long.
        """
        message = _EPOCH.pack(self.epoch) + self.place.encode("ascii")
        if len(message) > _LONGEST:
            raise ValueError(f"{self.place!r} is too long for an address: {len(message)} bytes of {_LONGEST}")
        return message


def _proof(token: bytes, transcript: bytes, message: bytes) -> bytes:
    return hmac.digest(token, _LABEL + transcript + message, "sha256")


async def say(sock: socket.socket, handshake: Handshake, token: bytes, message: bytes) -> None:
    """Send a message of `HeadWord.encode` after the handshake.

    Raises:
        OSError: the connection has ended.
    """
    await send_all(sock, bytes((len(message),)) + message + _proof(token, handshake.transcript, message))


async def hear(sock: socket.socket, handshake: Handshake, token: bytes) -> HeadWord:
    """Read what the peer says after the handshake. The caller checks the place.

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
    if nbytes < _EPOCH.size:
        raise ProtocolError(f"a message names a head: it has {nbytes} bytes, at least {_EPOCH.size} are needed")
    return HeadWord(message[_EPOCH.size :].decode("ascii", "replace"), _EPOCH.unpack_from(message)[0])
