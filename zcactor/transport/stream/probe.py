"""The first contact with a cluster: the identity of the process at a host and a port, or at several of them.

A standby has the name `NOBODY` in its handshake, and says after it where the head is that leads: a byte with the length
of the address ``host:port``, and the address, which is empty where it knows of none.
"""

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
from zcactor.transport.stream.handshake_io import (
    admitted,
    answering,
    binding_of,
    progressed,
    send_all,
    shake_hands,
)
from zcactor.transport.stream.head_word import hear

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.transport.stream.tls import Tls

__all__ = ["NOBODY", "Identity", "Standby", "connected", "find_leader", "identify", "parse_host_port"]

NOBODY: Final = bytes(16)
"""The name of a process that only says where the cluster's head is."""
_ANY: Final = 16
_PAUSE: Final = 0.1
"""Seconds until processes are asked again that know of no head, or have hung up."""
_ANEW: Final = 2.0
"""Seconds within which a process that has hung up answers as another one: a head that was deposed while it was asked
begins to listen anew."""


class Standby(ConnectionLost):
    """The process is a standby, and no head.

    Args:
        address: of the standby.
        leader: ``host:port`` of the head that leads; empty where the standby knows of none.
        epoch: of the head's term; 0 likewise.
    """

    def __init__(self, address: str, leader: str, epoch: int) -> None:
        where = f"the head is at {leader}" if leader else "no head leads at present"
        super().__init__(f"{address} is a standby, and {where}", False)
        self.leader = leader
        self.epoch = epoch


class Identity(msgspec.Struct, frozen=True):
    """The facts about a process that a handshake has proved."""

    process: bytes
    """The name of the process."""
    host: str
    """Its IP address."""
    port: int
    ours: str
    """The IP address of this host on the way to it, by which it can reach this host."""
    epoch: int
    """The epoch of the term in which it leads its cluster; 0 where it leads none."""

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


class HungUp(ConnectionLost):
    """The process has closed the connection before it had answered."""


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
        HungUp: the process has closed the connection before it had answered.
        AuthenticationError: one side does not hold the other's token, or refuses its certificate.
        VersionMismatch: the process has another protocol or Python version.
        ProtocolError: the program there does not speak zcactor's protocol.
        Standby: the process is a standby.
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
            sock = undo.enter_context(await connected(found))
            progressed()
            hello = Introduction(secrets.token_bytes(_ANY), os.getpid(), 0, 4, 64, Purpose.NAME)
            try:
                if tls is not None:
                    sock = undo.enter_context(await tls.connect(sock))
                handshake = Handshake(token, hello, accepting=False, binding=binding_of(sock))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await send_all(sock, handshake.opening)  # a peer that refuses at once has sent its reason before
                await shake_hands(sock, handshake)
                word = await hear(sock, handshake, token)
            except ConnectionResetError as error:
                raise HungUp(f"{address}: the peer closed the connection during the handshake") from error
            except (ConnectionLost, ProtocolError) as error:
                plain = HungUp if type(error) is ConnectionLost else _plain(error)
                kind = Crowded if isinstance(error, Crowded) else plain
                raise kind(f"{address}: {error.args[0]}") from error
            if handshake.peer.process == NOBODY:
                raise Standby(address, _checked(word.place), word.epoch)
            host, ours = str(sock.getpeername()[0]), str(sock.getsockname()[0])
            return Identity(handshake.peer.process, host, port, ours, word.epoch)


def _checked(leader: str) -> str:
    """`leader`, the place that a standby names."""
    if leader:
        try:
            parse_host_port(leader)
        except ValueError as error:
            raise ProtocolError(f"a standby names a head: {error}") from error
    return leader


async def find_leader(addresses: str, token: bytes, tls: Tls | None = None, patience: float = 0.0) -> Identity:
    """Find the head of a cluster at the first of several addresses that leads to it. Standbys know where it is.

    Args:
        addresses: ``"host:port"``, or several of them, with commas between them.
        token, tls: as in `identify`.
        patience: seconds for which standbys are asked again that know of no head, and two of which processes are
            asked again that have hung up.

    Raises:
        ValueError: one of the addresses has another form.
        ConnectionLost: none leads to a head. The message has the reason against each.
        AuthenticationError, VersionMismatch, ProtocolError: as `identify`, at the first address where that happens.

    Cancelling ends the search.
    """
    given = [each.strip() for each in addresses.split(",")]
    for each in given:
        parse_host_port(each)
    loop = asyncio.get_running_loop()
    until, anew = loop.time() + patience, 0.0
    while True:
        failures: dict[str, ConnectionLost] = {}
        places = [*reversed(given)]
        while places:
            place = places.pop()
            if place in failures:
                continue
            try:
                return await identify(place, token, tls)
            except ConnectionLost as error:
                failures[place] = error
                if isinstance(error, Standby) and error.leader:
                    places.append(error.leader)
        if not anew and any(isinstance(error, HungUp) for error in failures.values()):
            anew = min(until, loop.time() + _ANEW)
        waits = any(isinstance(error, Standby) for error in failures.values())
        if loop.time() + _PAUSE > (until if waits else anew):
            break
        await asyncio.sleep(_PAUSE)
    if len(failures) == 1:
        failure = failures.popitem()[1]
        if isinstance(failure, HungUp):
            raise ConnectionLost(*failure.args) from failure.__cause__
        raise failure
    raise ConnectionLost("; ".join(str(error.args[0]) for error in failures.values()), False)


def _plain(error: ConnectionLost | ProtocolError) -> type[Exception]:
    """The class of `zcactor.errors` that `error` belongs to."""
    return next(cls for cls in type(error).__mro__ if cls.__module__ == ZcactorError.__module__)


async def connected(found: Iterable[tuple[Any, ...]]) -> socket.socket:
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
