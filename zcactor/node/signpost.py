"""The listener of a standby: it tells any caller where the cluster's head is, and takes no connection.

See `zcactor.transport.stream.head_word` for the form of the answer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Final

from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import binding_of, shake_hands
from zcactor.transport.stream.head_word import HeadWord, say
from zcactor.transport.stream.listener import Listener
from zcactor.transport.stream.probe import NOBODY

if TYPE_CHECKING:
    from zcactor.transport.stream.tls import Tls

__all__ = ["Signpost"]

_BACKLOG: Final = 128


class Signpost:
    """A listener at the place where a head will listen, once it leads. Used on the loop's thread.

    Args:
        host: the IP address at which it listens.
        port: the port; 0 lets the system choose.
        token: the cluster's secret, 32 bytes.
        tls: the certificates where all bytes pass through TLS, otherwise None.

    Raises:
        OSError: the address is not one of this host's, or the port is in use.
    """

    def __init__(self, host: str, port: int, token: bytes, tls: Tls | None = None) -> None:
        self._token = token
        self._tls = tls
        self.leader = HeadWord("", 0)
        """The head that leads."""
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with contextlib.ExitStack() as undo:
            kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            sock = undo.enter_context(socket.socket(family, kind))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may use the port
            sock.bind((host, port))
            sock.listen(_BACKLOG)
            self.port: int = sock.getsockname()[1]
            self._listener = Listener(sock, self._greet, source=_source_of)
            undo.pop_all()

    async def _greet(self, sock: socket.socket) -> None:
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            if self._tls is not None:
                sock = undo.enter_context(await self._tls.accept(sock))
            hello = Introduction(NOBODY, os.getpid(), 0, 4, 64, Purpose.NAME)
            handshake = Handshake(self._token, hello, accepting=True, binding=binding_of(sock))
            await shake_hands(sock, handshake)
            if handshake.peer.purpose is Purpose.NAME:
                await say(sock, handshake, self._token, self.leader.encode())

    async def aclose(self) -> None:
        """Stop listening. Idempotent."""
        await self._listener.aclose()


def _source_of(sock: socket.socket) -> str | None:
    """The IP address that a connection comes from; None where it has ended already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return None
