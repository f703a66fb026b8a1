"""The first contact with a cluster: the identity of the process at a host and a port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.errors import ConnectionLost, ProtocolError, ZcactorError
from zcactor.transport.stream.handshake import Crowded, Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import admitted, answering, binding_of, progressed, send_all, shake_hands

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.transport.stream.tls import Tls

__all__ = ["Identity", "identify", "parse_host_port"]

_ANY: Final = 16


class Identity(msgspec.Struct, frozen=True):
    """The facts about a process that a handshake has proved."""

    process: bytes
    """The name of the process."""
    host: str
    """Its IP address."""
    port: int
    ours: str
    """The IP address of this host on the way to it, by which it can reach this host."""

    @property
    def address(self) -> str:
        """The address for `zcactor.transport.tcp.endpoint.TcpEndpoint.connect`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.process.hex()}@{host}:{self.port}"


def parse_host_port(text: str) -> tuple[str, int]:
    """Split ``"host:port"`` into both. An IPv6 address is in brackets.

    Raises:
        ValueError: `text` has another form.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isascii() or not port.isdecimal():
        raise ValueError(f"{text!r} is no address: it must be host:port, an IPv6 address in brackets")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no address: a port is a number from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def identify(address: str, token: bytes, tls: Tls | None = None) -> Identity:
    """Connect to the process at `address`, and let both sides prove that they hold `token`.

    Args:
        address: ``"host:port"``; the host may be a name.
        token: the cluster's secret, 32 bytes.
        tls: the certificates where all bytes pass through TLS, otherwise None.

    Raises:
        ValueError: `address` has another form.
        ConnectionLost: no process listens there, or it sends nothing for 5 s. This message and those below name the
            address and the reason.
        AuthenticationError: one side does not hold the other's token, or refuses its certificate.
        VersionMismatch: the process has another protocol or Python version.
        ProtocolError: the program there does not speak zcactor's protocol.
    """
    host, port = parse_host_port(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host name of another form
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConnectionLost(f"no host is called {host!r}: {reason}") from error
    return await admitted(lambda: _ask(address, found, port, token, tls))


async def _ask(address: str, found: Iterable[tuple[Any, ...]], port: int, token: bytes, tls: Tls | None) -> Identity:
    async with answering(address, "over TCP"):
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(await _connected(found))
            progressed()
            hello = Introduction(secrets.token_bytes(_ANY), os.getpid(), 0, 4, 64, Purpose.NAME)
            try:
                if tls is not None:
                    sock = undo.enter_context(await tls.connect(sock))
                handshake = Handshake(token, hello, accepting=False, binding=binding_of(sock))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await send_all(sock, handshake.opening)  # a peer that refuses at once has sent its reason before
                await shake_hands(sock, handshake)
            except (ConnectionLost, ProtocolError) as error:
                kind = Crowded if isinstance(error, Crowded) else _plain(error)
                raise kind(f"{address}: {error.args[0]}") from error
            return Identity(handshake.peer.process, str(sock.getpeername()[0]), port, str(sock.getsockname()[0]))


def _plain(error: ConnectionLost | ProtocolError) -> type[Exception]:
    """The class of `zcactor.errors` that `error` belongs to."""
    return next(cls for cls in type(error).__mro__ if cls.__module__ == ZcactorError.__module__)


async def _connected(found: Iterable[tuple[Any, ...]]) -> socket.socket:
    """Return a socket that is connected to the first of the addresses `found` at which a process listens.

    Raises:
        OSError: no process listens at any of them; the error is that of the last one.
    """
    failure = OSError("it has no address")
    for family, kind, proto, _, place in found:
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
        try:
            await asyncio.get_running_loop().sock_connect(sock, place)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
