"""Peers on any host: an authenticated TCP socket for frames, and further sockets for the bytes of arrays.

An endpoint's address has the process's name in hexadecimal and the listening socket: ``name@host:port``. Before any
frame both sides prove that they hold the cluster's token (`zcactor.transport.stream.handshake`), and the connector
checks the name of the process that answers. Then `TcpEndpoint._make_connection` makes a connection from the socket. A
transport that begins over TCP and continues by other means overrides that method.

Where one side asks for it, the socket is a `SealedSocket` from then on: frames can be neither read nor changed on their
way (`zcactor.transport.stream.record_layer`). **Bulk bytes are not encrypted**: arrays go through data sockets by
straight from the owner's pages. An attacker on the path can read them. He can change them unnoticed only
where both ends have agreed on less than the default (`zcactor.transport.tcp.authenticated`), or where frames are not
encrypted. Where arrays are secret, isolate the network, use one that encrypts (WireGuard, IPsec), or give the endpoint
certificates. Then all of its sockets use TLS from the first byte on, data sockets included, and the handshake runs
inside (`zcactor.transport.stream.tls`). Frames are not encrypted a second time then.
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

from zcactor.config import ports_of, security_of
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.logs import transport_log as log
from zcactor.transport.frames import PeerInfo
from zcactor.transport.registry import EndpointSettings, Transport
from zcactor.transport.stream.endpoint import ListeningEndpoint
from zcactor.transport.stream.handshake import Handshake, HandshakeStatus, Introduction, Purpose
from zcactor.transport.stream.handshake_io import (
    answering,
    binding_of,
    introduce,
    progressed,
    receive_exactly,
    send_all,
    shake_hands,
)
from zcactor.transport.stream.head_word import HeadWord, say
from zcactor.transport.stream.listener import Listener
from zcactor.transport.stream.record_layer import REMEDY, Integrity, SealedSocket, can_seal, key_exchange
from zcactor.transport.stream.summons import take_summons
from zcactor.transport.tcp.authenticated import DataSeal, SealedChannel
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.data import KEY_NBYTES
from zcactor.transport.tcp.liveness import tune
from zcactor.transport.tcp.serve import DataServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.base import Connection
    from zcactor.transport.frames import Receiver
    from zcactor.transport.stream.record_layer import KeyExchange, Seals
    from zcactor.transport.stream.tls import Tls
    from zcactor.transport.tcp.data import Channel

__all__ = ["TRANSPORT", "TcpEndpoint", "parse_address"]

BACKLOG: Final = 1024
"""Connections that the kernel holds while the loop is busy."""
NO_UID: Final = -1
"""`PeerInfo.uid` of a peer with an unknown user, because it may be on another host."""

_ADDRESS: Final = re.compile(r"([0-9a-f]{32})@(?:\[([0-9a-f:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})")
_LINK: Final = struct.Struct(f"<{KEY_NBYTES}s16sH")
"""The message of each end to the other: the key for data sockets, and the listening address (port 0: none)."""
_MAPPED: Final = bytes(10) + b"\xff\xff"
"""The first bytes of an IPv4 address in the form of an IPv6 address (RFC 4291, 2.5.5.2)."""


def parse_address(address: str) -> tuple[str, str, int]:
    """Split ``name@host:port`` into the process's name in hexadecimal, the IP address and the port.

    Raises:
        ConnectionLost: `address` has another form.
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
    """A listener at an IP address, and the way to connect to peers. Satisfies `zcactor.transport.base.Endpoint`.

    Connections stay open when it is closed, but peers can open no further data sockets for them.

    Args:
        host: the IP address at which this process listens and peers find it; not a wildcard address.
        process: 16 random bytes that name this process.
        token: the cluster's secret, 32 bytes.
        arena_fd: the memfd of this process's arena, open for reading; stays the caller's and must outlive the endpoint
            and its connections. None for a process without an arena.
        arena_nbytes: bytes of the arena; 0 without one.
        recv_depth: frames that this process can receive before it returns credits. A connection uses the smaller number
            of both sides.
        eager_limit: bytes of the largest payload inside a frame. A connection uses the smaller number of both sides.
        port: the port to listen at; with 0 the system chooses one.
        sealing: whether frames have to be encrypted. Where it is False they are encrypted if the peer asks for it, so
            both ends need the package ``cryptography``, of the extra ``cluster``.
        integrity: the bytes besides frames that are authenticated where frames are encrypted; the peer's wish counts,
            too.
        tls: certificates for TLS on all sockets. Peers must have them as well. `sealing` has no effect then.

    Attributes:
        address: the address that a peer passes to `connect`; empty until `start`.
        authorize: ``authorize(receiver, object_id, offset, nbytes)``: returns an object that keeps these bytes, which
            lie inside the arena, while they are sent to the peer of that receiver's connection. None (or False) where
            the peer may not read them. An object with an `address` and an `offset` also keeps the arena mapped from
            that offset on at that address. Called from serving threads, under no lock. By default all peers may read
            all bytes.

    Attributes:
        ports: the ports of which `start` takes a free one where the port is 0; None lets the system choose.

    Raises:
        ValueError: `process` has not 16 bytes, `host` is no IP address or a wildcard, or one of `arena_fd` and
            `arena_nbytes` is given without the other.
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
        self.ports: range | None = None
        # Servers by the key that a data socket sends. Each belongs to its connection, which keeps it.
        self._servers: weakref.WeakValueDictionary[bytes, DataServer] = weakref.WeakValueDictionary()

    def let_in(self, settings: EndpointSettings) -> None:
        """Set the ports at which peers get in, and the function that lets them read."""
        self.authorize = settings.authorize
        self.ports = None if settings.config.ports is None else ports_of(settings.config.ports)

    def viability(self) -> str | None:
        """Return None when this endpoint can work here, else the reason and the remedy."""
        if sys.platform != "linux":
            return f"connections over TCP need Linux (memfd, sendfile from it), this is {sys.platform}"
        if self._listener is not None:
            return None
        if self._sealing and self._exchange() is None:
            return f"connections over TCP are sealed, and cryptography is not installed; {REMEDY}"
        try:
            with _new_socket(self._host) as sock:
                sock.bind((self._host, 0))
        except OSError as error:
            return f"cannot listen at {self._host}: {error.strerror}; set host to an address of this machine"
        return None

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen, and call `accepted` on the loop with each authenticated connection, which is not started yet.

        Raises:
            RuntimeError: the endpoint listens already.
            OSError: the address is not one of this host's, or the port, or each of `ports`, is in use.
        """
        self._refuse_second_start()
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(self._listening())
            self._accepted = accepted
            self._port = sock.getsockname()[1]
            self.address = _written(self.process.hex(), self._host, self._port)
            self._listener = Listener(sock, self._greet, source=_source_of)
            undo.pop_all()

    def _listening(self) -> socket.socket:
        """Return a socket that listens at the port, or at a free one of `ports`.

        Raises:
            OSError: as `start`.
        """
        for port in self.ports if self.ports and not self._port else (self._port,):
            with contextlib.ExitStack() as undo:
                sock = undo.enter_context(_new_socket(self._host))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections may use the port
                try:
                    sock.bind((self._host, port))
                    sock.listen(BACKLOG)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE or port == self._port:
                        raise
                    continue
                undo.pop_all()
                return sock
        assert self.ports
        raise OSError(
            errno.EADDRINUSE,
            f"each of the ports {self.ports.start}-{self.ports.stop - 1} is in use at {self._host}; each process needs "
            "one, so name more of them (ports, ZCACTOR_PORTS)",
        )

    async def connect(self, address: str) -> Connection:
        """Connect to the process that listens at `address`, and authenticate both sides.

        Cancelling closes the socket. The peer sees a handshake that ends, or an accepted connection that is lost at
        once.

        Raises:
            ConnectionLost: `address` is malformed, no process listens there, the peer has ended, sent nothing for 5 s,
                took 30 s in all, or had too many handshakes under way for 30 s. The message names the address and the
                reason.
            AuthenticationError: the peer refused this process, does not hold the token, or is not the process that
                `address` names; frames have to be encrypted and one side cannot do that, which the message names; or a
                certificate is not accepted.
            VersionMismatch: the peer has another protocol or Python version.
            ProtocolError: the program there does not speak zcactor's protocol, or only one end uses TLS.
        """
        return await self._admitted(lambda: self._connect(address))

    async def _connect(self, address: str) -> Connection:
        async with answering(address, "over TCP"):
            sock, handshake = await self._introduce(address, Purpose.PEER)
            return await self._make_connection(sock, handshake.peer, accepting=False)

    # ---- for transports that begin over TCP

    async def _make_connection(self, sock: socket.socket, hello: Introduction, *, accepting: bool) -> Connection:
        """Make a connection from an authenticated socket. A subclass may override it. Both ends run it, within the time
        limit of a handshake, and each end has to receive all bytes that the other sends here.

        It owns `sock`, and closes it when it raises or is cancelled.

        Args:
            sock: non-blocking; nothing has been read from it beyond the handshake. With encrypted frames it is a
                `SealedSocket`, which encrypts messages by its `send` and `recv`, too. With `tls` it is a
                `zcactor.transport.stream.tls.TlsSocket`.
            hello: the peer's hello, authenticated.
            accepting: whether the peer has connected to this process.

        Raises:
            ConnectionLost: the peer has ended.
            ProtocolError: received bytes were not from the peer.
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
                offer_data=lambda: self._offer_data(address, peer_key, server),
                server=server,
            )
            undo.pop_all()
        return connection

    def _connection_class(self) -> type[TcpConnection]:
        if self._tls is None:
            return TcpConnection
        from zcactor.transport.tcp.tls_connection import TlsConnection

        return TlsConnection

    def _peer(self, hello: Introduction) -> PeerInfo:
        """Make the `PeerInfo` of a connection."""
        return PeerInfo(hello.process, hello.pid, NO_UID, hello.arena_nbytes)

    # ---- the handshake

    def _handshake(self, sock: socket.socket, purpose: Purpose, *, accepting: bool) -> Handshake:
        hello = msgspec.structs.replace(
            self._hello(purpose), seals=self._sealing and purpose is Purpose.PEER, integrity=self._integrity,
            rdma=self._may_use_rdma(),
        )  # fmt: skip
        return Handshake(self._token, hello, accepting=accepting, exchange=self._exchange, binding=binding_of(sock))

    def _may_use_rdma(self) -> bool:
        """Whether this end allows a connection to continue by RDMA."""
        return False

    async def _introduce(self, address: str, purpose: Purpose) -> tuple[socket.socket, Handshake]:
        """Connect and do the handshake. The socket belongs to the caller."""
        process, host, port = parse_address(address)
        with contextlib.ExitStack() as undo:
            async with answering(address, "over TCP"):
                sock = undo.enter_context(_new_socket(host))
                tune(sock)
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
                progressed()
                if sock.getsockname() == sock.getpeername():
                    # Where no process listens, TCP connects a socket to itself if its own port is that one by chance.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                if self._tls is not None:
                    sock = undo.enter_context(await self._tls.connect(sock))
                handshake = self._handshake(sock, purpose, accepting=False)
                await introduce(sock, handshake, process)
                sock = self._sealed(sock, handshake)
            undo.pop_all()
        return sock, handshake

    async def _greet(self, sock: socket.socket) -> None:
        """Do the accepting side of `connect`, `_connect_data` and `_offer_data`. Owns `sock`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            tune(sock)
            if self._tls is not None:
                sock = undo.enter_context(await self._tls.accept(sock))
            handshake = self._handshake(sock, Purpose.PEER, accepting=True)
            await shake_hands(sock, handshake)
            hello = handshake.peer
            if hello.purpose is Purpose.NAME:  # it knows the name by now
                await say(sock, handshake, self._token, HeadWord("", self.term()).encode())
                return
            if hello.purpose is Purpose.SUMMONS:
                self.summoned(*await take_summons(sock, handshake, self._token))
                return
            if hello.purpose in (Purpose.DATA, Purpose.OFFER):
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
        """Return the socket for the bytes after a handshake: `sock` itself, or a `SealedSocket` that takes it over."""
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
        """The bytes of the arena. They are mapped once, at the first use, and apart from the process's own mapping: a
        thread may still read when that one is unmapped."""
        if self._mapped is None:
            fd = -1 if self._arena_fd is None else self._arena_fd
            self._mapped = memoryview(mmap.mmap(fd, self._arena_nbytes or 1, prot=mmap.PROT_READ))
        return self._mapped

    async def _connect_data(self, address: str, key: bytes, seals: Seals | None) -> Channel:
        """Open a data socket to the peer that listens at `address`, for the connection with this `key` and these
        seals."""
        sock, occasion = await self._admitted(lambda: self._data_socket(address, key, Purpose.DATA))
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            channel = self._pulling(sock, occasion, seals)
            undo.pop_all()
        return channel

    async def _offer_data(self, address: str, key: bytes, server: DataServer) -> None:
        """Open a data socket to the peer that listens at `address`, for its pulls, which `server` answers. Where that
        fails the peer waits in vain, and says so."""
        try:
            sock, occasion = await self._admitted(lambda: self._data_socket(address, key, Purpose.OFFER))
            with contextlib.ExitStack() as undo:
                undo.enter_context(sock)
                server.adopt(sock, occasion)
                undo.pop_all()
        except (OSError, ProtocolError) as error:
            log.warning("process %s asked for a data socket, and got none: %s", address, error)

    def _pulling(self, sock: socket.socket, occasion: bytes, seals: Seals | None) -> Channel:
        """Make the puller's end of a data socket."""
        if seals is None:
            return self._connection_class().channel(sock)
        return SealedChannel(sock, DataSeal.of(seals, occasion))

    async def _data_socket(self, address: str, key: bytes, purpose: Purpose) -> tuple[socket.socket, bytes]:
        """Open a socket for the connection with this `key`. Returns it, and the occasion that its keys come from."""
        sock, handshake = await self._introduce(address, purpose)
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            async with answering(address, "over TCP"):
                await send_all(sock, key)
                status = await receive_exactly(sock, 1)
            if status[0] != HandshakeStatus.OK:
                raise ConnectionLost(f"process {address} has no connection to this one any more", maybe_executed=True)
            undo.pop_all()
        return sock, handshake.transcript + key

    async def _adopt(self, sock: socket.socket, hello: Introduction, transcript: bytes) -> None:
        key = await receive_exactly(sock, KEY_NBYTES)
        server = self._servers.get(key)
        if server is None or server.process != hello.process or server.full:
            with contextlib.suppress(OSError):  # the error that is being raised is the reason for closing
                sock.send(bytes((HandshakeStatus.AUTH,)))
            raise ProtocolError(f"process {hello.process.hex()} wants a data socket and has no connection for it")
        await send_all(sock, bytes((HandshakeStatus.OK,)))
        if hello.purpose is Purpose.DATA:
            server.adopt(sock, transcript + key)
        elif server.offered is not None:
            server.offered(self._pulling(sock, transcript + key, server.seals))


def _anything(receiver: Receiver | None, object_id: int, offset: int, nbytes: int) -> object:
    """The default of `TcpEndpoint.authorize`."""
    del receiver, object_id, offset, nbytes
    return True


def _source_of(sock: socket.socket) -> str | None:
    """Return the IP address that a connection comes from; None where it has ended already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return None


def _packed(host: str) -> bytes:
    """Encode an IP address of either version in 16 bytes."""
    place = ipaddress.ip_address(host)
    return _MAPPED + place.packed if place.version == 4 else place.packed


def _unpacked(place: bytes) -> str:
    return str(ipaddress.ip_address(place.removeprefix(_MAPPED)))


def _endpoint(settings: EndpointSettings) -> TcpEndpoint:
    config, arena = settings.config, settings.store.arena
    security = security_of(config.security)
    endpoint = TcpEndpoint(
        config.host, settings.process, settings.token, arena.fd, arena.nbytes, config.recv_depth, config.eager_limit,
        port=settings.port, sealing=security.sealing, integrity=Integrity[security.integrity.upper()],
        tls=settings.tls,
    )  # fmt: skip
    endpoint.let_in(settings)
    return endpoint


TRANSPORT: Final = Transport(_endpoint)
"""See `zcactor.transport.registry`."""
