"""Who is at an address: the first contact with a cluster, of which only a host and a port are known."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.errors import ConnectionLost, ProtocolError, ZcactorError
from zcactor.transport.auth import Crowded, Handshake, Hello, Purpose
from zcactor.transport.greeting import admitted, answering, binding_of, progressed, send_all, shake_hands

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.transport.tls import Tls

__all__ = ["Identity", "identify", "parse_host_port"]

_ANY: Final = 16


class Identity(msgspec.Struct, frozen=True):
    """What is known after a proven handshake."""

    process: bytes
    """The name of the process that listens there."""
    host: str
    """Its IP address."""
    port: int
    ours: str
    """The IP address by which this host reaches it, and so the one by which it reaches this host."""

    @property
    def address(self) -> str:
        """What `zcactor.transport.tcp.TcpEndpoint.connect` takes."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.process.hex()}@{host}:{self.port}"


def parse_host_port(text: str) -> tuple[str, int]:
    """The host and the port of ``"host:port"``, an IPv6 address in brackets.

    Raises:
        ValueError: it has another form.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isascii() or not port.isdecimal():
        raise ValueError(f"{text!r} is no address: it must be host:port, an IPv6 address in brackets")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no address: a port is a number from 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def identify(address: str, token: bytes, tls: Tls | None = None) -> Identity:
    """Prove to whoever listens at `address` that we hold `token`, and have it prove the same.

    Args:
        address: ``"host:port"``; the host may be a name.
        token: the cluster's secret, 32 bytes.
        tls: where it is given, all that is said passes through TLS.

    Raises:
        ValueError: `address` has another form.
        ConnectionLost: nobody is there, or says nothing for 5 s. The message names the address and the reason.
        AuthenticationError: one side does not hold the other's token, or refuses its certificate. This and what follows
            names the address, too.
        VersionMismatch: it speaks another protocol or Python version.
        ProtocolError: what answers there does not speak zcactor's protocol.
    """
    host, port = parse_host_port(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # the latter: no such name can be asked for
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConnectionLost(f"no host is called {host!r}: {reason}") from error
    return await admitted(lambda: _ask(address, found, port, token, tls))


async def _ask(address: str, found: Iterable[tuple[Any, ...]], port: int, token: bytes, tls: Tls | None) -> Identity:
    async with answering(address, "over TCP"):
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(await _connected(found))
            progressed()
            hello = Hello(secrets.token_bytes(_ANY), os.getpid(), 0, 4, 64, Purpose.NAME)
            try:
                if tls is not None:
                    sock = undo.enter_context(await tls.connect(sock))
                handshake = Handshake(token, hello, accepting=False, binding=binding_of(sock))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await send_all(sock, handshake.opening)  # a peer that refuses at once has left its reason
                await shake_hands(sock, handshake)
            except (ConnectionLost, ProtocolError) as error:
                kind = Crowded if isinstance(error, Crowded) else _plain(error)
                raise kind(f"{address}: {error.args[0]}") from error
            return Identity(handshake.peer.process, str(sock.getpeername()[0]), port, str(sock.getsockname()[0]))


def _plain(error: ConnectionLost | ProtocolError) -> type[Exception]:
    """The class of `zcactor.errors` that it belongs to."""
    return next(cls for cls in type(error).__mro__ if cls.__module__ == ZcactorError.__module__)


async def _connected(found: Iterable[tuple[Any, ...]]) -> socket.socket:
    """A socket connected to the first of the addresses `found` at which somebody listens.

    Raises:
        OSError: nobody listens at any of them; it tells of the last one.
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
