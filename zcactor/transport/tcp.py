"""Peers on any host: a TCP socket for frames, authenticated, and further ones through which bytes are pulled.

An endpoint's address is its process's name in hexadecimal and where it listens: ``name@host:port``. Before any frame
both sides prove that they hold the cluster's token (`zcactor.transport.auth`), and the connector checks that the one
who answers is the process that it wanted. Then `TcpEndpoint._make_connection` makes a connection of the socket; a
transport that begins over TCP and goes on by other means overrides it.

Where either side wants it, the socket is a `SealedSocket` from then on: frames can be neither read nor changed on
their way (`zcactor.transport.sealing`). **Bulk bytes are not encrypted**: arrays go through data sockets by
sendfile(2), straight from the owner's pages. Whoever sits on the path can read them, and changes them unnoticed only
where both ends have agreed on less than the default (`zcactor.transport.tcp_sealed`), or where nothing is sealed.
Where arrays are secret, isolate the network, use one that encrypts (WireGuard, IPsec), or give the endpoint
certificates: then every socket of it speaks TLS from its first byte on, data sockets included, and the handshake runs
inside (`zcactor.transport.tls`). Nothing is sealed in addition.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import mmap
import os
import re
import secrets
import socket
import struct
import sys
import weakref
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.auth import Handshake, Hello, Purpose, Status
from zcactor.transport.base import Connection, PeerInfo
from zcactor.transport.endpoints import ListeningEndpoint
from zcactor.transport.greeting import (
    answering,
    binding_of,
    introduce,
    progressed,
    receive_exactly,
    send_all,
    shake_hands,
)
from zcactor.transport.listener import Listener
from zcactor.transport.liveness import tune
from zcactor.transport.sealing import REMEDY, Integrity, SealedSocket, can_seal, key_exchange
from zcactor.transport.tcp_connection import TcpConnection
from zcactor.transport.tcp_data import KEY_NBYTES
from zcactor.transport.tcp_sealed import DataSeal, SealedChannel
from zcactor.transport.tcp_serve import DataServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.base import Receiver
    from zcactor.transport.sealing import KeyExchange, Seals
    from zcactor.transport.tcp_data import Channel
    from zcactor.transport.tls import Tls

__all__ = ["TcpEndpoint", "parse_address"]

BACKLOG: Final = 1024
"""Connections the kernel holds for us while the loop is busy."""
NO_UID: Final = -1
"""`PeerInfo.uid` of a peer whose user nobody can vouch for, because it may be on another host."""

_ADDRESS: Final = re.compile(r"([0-9a-f]{32})@(?:\[([0-9a-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")
_LINK: Final = struct.Struct(f"<{KEY_NBYTES}s16sH")
"""What each end of a connection tells the other: the key for data sockets, and where it listens (port 0: nowhere)."""
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""What an address of version 4 begins with among those of version 6 (RFC 4291, 2.5.5.2)."""


def parse_address(address: str) -> tuple[str, str, int]:
    """The process's name in hexadecimal, the IP address and the port of ``name@host:port``.

    Raises:
        ConnectionLost: it has another form, so nobody can be reached there.
    """
    match = _ADDRESS.fullmatch(address)
    if match is not None:
        host, port = match[2] or match[3], int(match[4])
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            if 0 < port < 1 << 16:
                return match[1], host, port
    raise ConnectionLost(
        f"{address!r} is no address of a process: it must be 32 hexadecimal digits, @, an IP address (of version 6 in "
        "brackets), a colon and a port"
    )


def _written(process: str, host: str, port: int) -> str:
    return f"{process}@[{host}]:{port}" if ":" in host else f"{process}@{host}:{port}"


def _new_socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


class TcpEndpoint(ListeningEndpoint):
    """Listens for peers at an IP address and connects to theirs. Satisfies `zcactor.transport.base.Endpoint`.

    Connections stay open when it is closed, but peers can open no data sockets for them any more.

    Args:
        host: the IP address at which this process listens and peers find it; not a wildcard, which is no place.
        process: 16 random bytes that name this process.
        token: the cluster's secret, 32 bytes.
        arena_fd: this process's memfd, open for reading; stays the caller's and must outlive the endpoint and its
            connections. None for a process without an arena.
        arena_nbytes: its size; 0 without one.
        recv_depth: frames this process can take in. A connection uses the smaller of both sides' numbers.
        eager_limit: bytes of the largest payload inside a frame. Likewise the smaller one.
        port: where to listen; 0 lets the system choose.
        sealing: whether frames are to be sealed, whatever the peer wants. Where it is False they are sealed if the peer
            wants that, so both ends need the package ``cryptography``, of the extra ``cluster``.
        integrity: what besides frames is authenticated, where they are sealed; the peer's wish counts, too.
        tls: has all that is sent and received encrypted; peers must have it as well. `sealing` means nothing then.

    Attributes:
        address: what a peer passes to `connect`; empty until `start`.
        authorize: ``authorize(receiver, object_id, offset, nbytes)``: what keeps these bytes, which lie inside the
            arena, while they are sent to the peer of that receiver's connection; nothing (or False) where the peer may
            not have them. Called from serving threads, under no lock. By default everybody may have everything.

    Raises:
        ValueError: `process` has not 16 bytes, `host` is no IP address or a wildcard, or an arena is given without its
            size or the other way round.
    """

    kind = "tcp"

    def __init__(
        self,
        host: str,
        process: bytes,
        token: bytes,
        arena_fd: int | None,
        arena_nbytes: int,
        recv_depth: int = 1024,
        eager_limit: int = 16384,
        *,
        port: int = 0,
        sealing: bool = False,
        integrity: Integrity = Integrity.AUTO,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(process, token, arena_fd, arena_nbytes, recv_depth, eager_limit)
        place = ipaddress.ip_address(host)
        if place.is_unspecified or "%" in host:
            raise ValueError(f"{host} is a wildcard or has a scope: peers need an address that leads to this host")
        self.authorize: Callable[[Receiver | None, int, int, int], object] = _anything
        self._host = str(place)
        self._port = port
        self._sealing = sealing and tls is None
        self._integrity = integrity
        self._tls = tls
        self.seals_payloads = tls is None and can_seal()  # a peer's wish is enough
        self._mapped: memoryview | None = None
        self._exchange: Callable[[], KeyExchange | None] = key_exchange
        # by the key that a data socket shows; each is its connection's
        self._servers: weakref.WeakValueDictionary[bytes, DataServer] = weakref.WeakValueDictionary()

    def viability(self) -> str | None:
        """None when this endpoint can work here, else the reason and the remedy."""
        if sys.platform != "linux":
            return f"connections over TCP need Linux (memfd, sendfile from it), this is {sys.platform}"
        if self._listener is not None:
            return None
        if self._sealing and self._exchange() is None:
            return f"connections to other hosts are sealed, and cryptography is not installed; {REMEDY}"
        try:
            with _new_socket(self._host) as sock:
                sock.bind((self._host, 0))
        except OSError as error:
            return f"cannot listen at {self._host}: {error.strerror}; set host to an address of this machine"
        return None

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen; `accepted` is called on the loop with each authenticated connection, not yet started.

        Raises:
            RuntimeError: the endpoint listens already.
            OSError: the address is not one of this host's, or the port is in use.
        """
        self._refuse_second_start()
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(_new_socket(self._host))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended may still hold the port
            sock.bind((self._host, self._port))
            sock.listen(BACKLOG)
            self._accepted = accepted
            self._port = sock.getsockname()[1]
            self.address = _written(self.process.hex(), self._host, self._port)
            self._listener = Listener(sock, self._greet, source=_source_of)
            undo.pop_all()

    async def connect(self, address: str) -> Connection:
        """Connect to the process that listens at `address` and authenticate both ways.

        Cancelling closes the socket; the peer sees a connection that ended, or an accepted one that is lost at once.

        Raises:
            ConnectionLost: `address` is malformed, nobody listens there, the peer went away, said nothing for 5 s, took
                30 s in all, or had no place for another handshake for as long. The message names the address and the
                reason.
            AuthenticationError: the peer refused us, does not hold the token, or is not the process named by `address`;
                or frames are to be sealed and one side cannot, and the message says which; or a certificate is not
                accepted.
            VersionMismatch: the peer speaks another protocol or Python version.
            ProtocolError: what answers there does not speak zcactor's protocol, or only one of the ends speaks TLS.
        """
        return await self._admitted(lambda: self._connect(address))

    async def _connect(self, address: str) -> Connection:
        async with answering(address, "over TCP"):
            sock, handshake = await self._introduce(address, Purpose.PEER)
            return await self._make_connection(sock, handshake.peer, accepting=False)

    # ---- for transports that begin over TCP

    async def _make_connection(self, sock: socket.socket, hello: Hello, *, accepting: bool) -> Connection:
        """Make a connection of an authenticated socket. To be overridden; both ends run it, within the time that a
        handshake has, and what either end sends here the other must receive.

        It owns `sock` and closes it when it raises or is cancelled.

        Args:
            sock: non-blocking; nothing has been read from it beyond the handshake. Where frames are to be sealed it is
                a `SealedSocket`, which seals whatever is said through its `send` and `recv`, too; with `tls` it is a
                `zcactor.transport.tls.TlsSocket`.
            hello: what the peer said about itself, authenticated.
            accepting: whether the peer connected.

        Raises:
            ConnectionLost: the peer went away.
            ProtocolError: what came was not from the peer.
            OSError: the system reports the connection broken.
        """
        del accepting  # both ends do the same here
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            key = secrets.token_bytes(KEY_NBYTES)
            make = self._connection_class()
            seals = sock.seals if isinstance(sock, SealedSocket) else None
            server = DataServer(
                hello.process, self._arena_fd, self._arena_nbytes, self._authorized, make.channel, seals, self._bytes
            )
            self._servers[key] = server  # before the peer knows the key
            await send_all(sock, self._link(key))
            peer_key, place, port = _LINK.unpack(await receive_exactly(sock, _LINK.size))
            address = _written(hello.process.hex(), _unpacked(place), port)
            if isinstance(sock, SealedSocket):
                sock.check_drained()
            recv_depth, eager_limit = self._agreed(hello)
            connection = make(
                sock,
                self._peer(hello),
                recv_depth=recv_depth,
                eager_limit=eager_limit,
                where=f" at {sock.getpeername()[0]}",
                connect_data=lambda: self._connect_data(address, peer_key, seals),
                server=server,
            )
            undo.pop_all()
        return connection

    def _connection_class(self) -> type[TcpConnection]:
        if self._tls is None:
            return TcpConnection
        from zcactor.transport.tls_connection import TlsConnection

        return TlsConnection

    def _peer(self, hello: Hello) -> PeerInfo:
        """The peer, as a connection knows it."""
        return PeerInfo(hello.process, hello.pid, NO_UID, hello.arena_nbytes)

    # ---- the handshake

    def _handshake(self, sock: socket.socket, purpose: Purpose, *, accepting: bool) -> Handshake:
        hello = msgspec.structs.replace(
            self._hello(purpose), seals=self._sealing and purpose is Purpose.PEER, integrity=self._integrity,
            rdma=self._may_use_rdma(),
        )  # fmt: skip
        return Handshake(self._token, hello, accepting=accepting, exchange=self._exchange, binding=binding_of(sock))

    def _may_use_rdma(self) -> bool:
        """Whether a connection may go on by RDMA, as far as this end allows."""
        return False

    async def _introduce(self, address: str, purpose: Purpose) -> tuple[socket.socket, Handshake]:
        """Connect and shake hands; the socket is the caller's."""
        process, host, port = parse_address(address)
        with contextlib.ExitStack() as undo:
            async with answering(address, "over TCP"):
                sock = undo.enter_context(_new_socket(host))
                tune(sock)
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
                progressed()
                if sock.getsockname() == sock.getpeername():
                    # where nobody listens, TCP connects a socket to itself if its own port happens to be that one
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                if self._tls is not None:
                    sock = undo.enter_context(await self._tls.connect(sock))
                handshake = self._handshake(sock, purpose, accepting=False)
                await introduce(sock, handshake, process)
                sock = self._sealed(sock, handshake)
            undo.pop_all()
        return sock, handshake

    async def _greet(self, sock: socket.socket) -> None:
        """The accepting side of `connect` and of `_connect_data`; owns `sock`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            tune(sock)
            if self._tls is not None:
                sock = undo.enter_context(await self._tls.accept(sock))
            handshake = self._handshake(sock, Purpose.PEER, accepting=True)
            await shake_hands(sock, handshake)
            hello = handshake.peer
            if hello.purpose is Purpose.NAME:  # it has learned it
                return
            if hello.purpose is Purpose.DATA:
                await self._adopt(sock, hello, handshake.transcript)
            elif hello.purpose is not Purpose.PEER:
                raise ProtocolError(f"nobody connects over TCP for {hello.purpose.name}")
            else:
                sock = self._sealed(sock, handshake)
            undo.pop_all()
        if hello.purpose is Purpose.PEER:
            connection = await self._make_connection(sock, hello, accepting=True)
            self._hand_on(connection)

    def _sealed(self, sock: socket.socket, handshake: Handshake) -> socket.socket:
        """The socket for what follows a handshake; `sock` itself where nothing is to be sealed, and else empty."""
        if handshake.seals is None:
            return sock
        if self._tls is not None:
            raise ProtocolError("the peer speaks TLS and wants its frames to be sealed besides, which nobody does")
        return SealedSocket(sock, handshake.seals)

    # ---- data sockets

    def _authorized(self, receiver: Receiver | None, object_id: int, offset: int, nbytes: int) -> object:
        return self.authorize(receiver, object_id, offset, nbytes)

    def _link(self, key: bytes) -> bytes:
        listening = self._listener is not None and not self._listener.closed
        return _LINK.pack(key, _packed(self._host), self._port if listening else 0)

    def _bytes(self) -> memoryview:
        """The arena's. Mapped once, by whoever needs them first, apart from the process's own mapping: a thread may
        still read when that one goes."""
        if self._mapped is None:
            fd = -1 if self._arena_fd is None else self._arena_fd
            self._mapped = memoryview(mmap.mmap(fd, self._arena_nbytes or 1, prot=mmap.PROT_READ))
        return self._mapped

    async def _connect_data(self, address: str, key: bytes, seals: Seals | None) -> Channel:
        """A data socket to the peer that listens at `address`, for the connection to which it gave us `key`, and which
        has these seals."""
        return await self._admitted(lambda: self._ask_for_data(address, key, seals))

    async def _ask_for_data(self, address: str, key: bytes, seals: Seals | None) -> Channel:
        sock, handshake = await self._introduce(address, Purpose.DATA)
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            async with answering(address, "over TCP"):
                await send_all(sock, key)
                status = await receive_exactly(sock, 1)
            if status[0] != Status.OK:
                raise ConnectionLost(f"process {address} has no connection to this one any more", maybe_executed=True)
            if seals is None:
                channel = self._connection_class().channel(sock)
            else:
                channel = SealedChannel(sock, DataSeal.of(seals, handshake.transcript + key))
            undo.pop_all()
        return channel

    async def _adopt(self, sock: socket.socket, hello: Hello, transcript: bytes) -> None:
        key = await receive_exactly(sock, KEY_NBYTES)
        server = self._servers.get(key)
        if server is None or server.process != hello.process or server.full:
            with contextlib.suppress(OSError):  # the reason for closing is the one being raised
                sock.send(bytes((Status.AUTH,)))
            raise ProtocolError(f"process {hello.process.hex()} wants a data socket and has no connection for it")
        await send_all(sock, bytes((Status.OK,)))
        server.adopt(sock, transcript + key)


def _anything(receiver: Receiver | None, object_id: int, offset: int, nbytes: int) -> object:
    """The default of `TcpEndpoint.authorize`."""
    del receiver, object_id, offset, nbytes
    return True


def _source_of(sock: socket.socket) -> str | None:
    """The IP address that a connection comes from; None where it has ended already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return None


def _packed(host: str) -> bytes:
    """16 bytes for an address of either version."""
    place = ipaddress.ip_address(host)
    return _MAPPED + place.packed if place.version == 4 else place.packed


def _unpacked(place: bytes) -> str:
    return str(ipaddress.ip_address(place.removeprefix(_MAPPED)))
