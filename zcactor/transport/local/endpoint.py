"""Peers on this host: authenticated unix sockets in a private directory, and arenas that are passed as memfds.

An endpoint's address is its process's name in hexadecimal, and its socket is the file of that name in the run
directory. So a peer can never make this process open another path. Before any frame both sides

1. compare the user at the other end with their own (SO_PEERCRED, unix(7)),
2. prove that they hold the cluster's token (`zcactor.transport.stream.handshake`),
3. pass their arena, opened again read-only so that the peer cannot write to it by mistake, and check that the received
   one has file seals and the announced size (`zcactor.transport.mapping.check_seals`).

A peer that receives a moved array asks for the arena again, through a connection of its own, with write access. One
that receives an array on a GPU asks for extents in the same way (`zcactor.transport.local.extents`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import AuthenticationError, ConnectionLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.frames import PeerInfo
from zcactor.transport.local import unix
from zcactor.transport.local.extents import hand_out, receive_extents
from zcactor.transport.mapping import NOWHERE, Mapping, check_seals
from zcactor.transport.registry import EndpointSettings, Transport
from zcactor.transport.stream.connection import StreamConnection
from zcactor.transport.stream.endpoint import ListeningEndpoint
from zcactor.transport.stream.handshake import Introduction, Purpose
from zcactor.transport.stream.handshake_io import answering
from zcactor.transport.stream.listener import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection
    from pathlib import Path

    from zcactor.transport.bytes import Commit, RemoteRegion
    from zcactor.transport.local.extents import ExtentReply, Supply
    from zcactor.transport.mapping import Mapped
    from zcactor.transport.os_process import OsProcess

__all__ = ["TRANSPORT", "LocalConnection", "LocalEndpoint"]


class LocalConnection(StreamConnection, Connection):
    """A connected and authenticated unix socket. Satisfies `zcactor.transport.base.Connection`.

    Args, beside those of `StreamConnection`, which raises the same:
        mapping: the windows onto the peer's arena, read-only; None where it has no arena.
        map_writable: opens the peer's arena with write access; `open_writable` calls it once.
        reader: the peer's process, where our arena was passed to it.
        fetch_extents: gets extents of the peer's GPU memory.
    """

    kind = "local"
    integrity = "mapped"
    maps = True

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerInfo,
        *,
        recv_depth: int,
        eager_limit: int,
        mapping: Mapping | None,
        map_writable: Callable[[], Awaitable[Mapping | None]],
        reader: OsProcess | None = None,
        fetch_extents: Callable[[Collection[int]], Awaitable[Any]] | None = None,
    ) -> None:
        super().__init__(sock, peer, recv_depth=recv_depth, eager_limit=eager_limit)
        self.mapping = mapping
        self.reader = reader
        """The peer's process, which maps our arena until it ends, also after the connection has ended."""
        self.fetch_extents = fetch_extents
        """``await fetch_extents(places)`` gets the extents around places of the peer's GPU memory; see
        `zcactor.transport.local.extents.receive_extents`. GPU code asks for it."""
        self._map_writable = map_writable
        self._writable_lock = asyncio.Lock()
        self._writable_open = False

    def describe(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        return "same host: frames over a unix socket, arrays mapped in place"

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> Mapped:
        """See `zcactor.transport.base.Connection.map`."""
        mapping, size = self.mapping, self.peer.arena_nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ProtocolError(
                f"process {self.peer.pid} named {nbytes} bytes at {offset} of its arena, which has {size} bytes"
            )
        if writable:
            if not self._writable_open:
                raise LookupError(f"the arena of process {self.peer.pid} is not writable yet: await open_writable()")
            mapping = self.writable_mapping
        if mapping is not None:
            return mapping.map(offset, nbytes)
        if size:
            raise ConnectionLost(f"the connection to process {self.peer.pid} has ended: nothing more is mapped by it")
        return NOWHERE

    async def open_writable(self) -> None:
        """Get write access to the peer's arena. Idempotent. Several tasks may call it at the same time.

        Cancelling does not change the connection.

        Raises:
            ConnectionLost: the connection is closed, or the peer has ended.
            AuthenticationError: another process than the peer answers at its address.
        """
        async with self._writable_lock:
            if self._writable_open:
                return
            if self._lost:
                raise ConnectionLost(f"the connection to process {self.peer.pid} is closed")
            self.writable_mapping = await self._map_writable()
            self._writable_open = True

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Raise `RuntimeError`: the arena is mapped.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"the arena of process {self.peer.pid} is mapped: nothing has to be pulled from it")


_ADDRESS: Final = re.compile(r"[0-9a-f]{32}")


class LocalEndpoint(ListeningEndpoint):
    """A listener for peers on this host, and the way to connect to theirs. Satisfies `zcactor.transport.base.Endpoint`.

    Args:
        directory: the folder with the sockets of this cluster's processes; this user's, mode 0700.
        process: 16 random bytes that name this process.
        token: the cluster's secret, 32 bytes.
        arena_fd: the memfd of this process's arena, sealed against resizing, open for reading and writing; stays the
            caller's and must outlive the endpoint. None for a process without an arena.
        arena_nbytes: bytes of the arena; 0 without one.
        recv_depth: frames that this process can receive before it returns credits. A connection uses the smaller number
            of both sides.
        eager_limit: bytes of the largest payload inside a frame. A connection uses the smaller number of both sides.
        supply: hands out memory of the store to peers; None where there is none.
        apart: a sentence about processes of this host whose sockets lie elsewhere, for the message of a failure; empty
            where there are none.

    Raises:
        ValueError: `process` has not 16 bytes, or one of `arena_fd` and `arena_nbytes` is given without the other.
    """

    kind = "local"
    by_name = True

    def __init__(
        self,
        directory: Path,
        process: bytes,
        token: bytes,
        arena_fd: int | None,
        arena_nbytes: int,
        recv_depth: int = 1024,
        eager_limit: int = 16384,
        supply: Supply | None = None,
        apart: str = "",
    ) -> None:
        super().__init__(process, token, arena_fd, arena_nbytes, recv_depth, eager_limit)
        self.address = process.hex()
        self._directory = directory
        self._supply = supply
        self._apart = apart
        self._file: os.stat_result | None = None
        """The socket's file, as it was made."""

    def viability(self) -> str | None:
        """Return None when this endpoint can work here, else the reason and the remedy."""
        if sys.platform != "linux":
            return f"connections on one host need Linux (memfd, SO_PEERCRED), this is {sys.platform}; use TCP"
        return unix.directory_problem(self._directory)

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen at `address`, and call `accepted` on the loop with each authenticated connection, which is not started
        yet.

        Raises:
            PermissionError: the directory is missing, belongs to another user, or is open to others; see `viability`.
            RuntimeError: the endpoint listens already.
            OSError: the socket cannot be created.
        """
        self._refuse_second_start()
        problem = self.viability()
        if problem is not None:
            raise PermissionError(problem)
        self._accepted = accepted
        path = self._path(self.address)
        self._listener = Listener(unix.listen(path), self._greet, _objection)
        self._file = path.lstat()

    async def connect(self, address: str) -> LocalConnection:
        """Connect to the process that listens at `address`, and authenticate both sides.

        Cancelling closes the socket. The peer sees a handshake that ends, or an accepted connection that is lost at
        once.

        Raises:
            ConnectionLost: no process listens there, the peer has ended, sent nothing for 5 s, took 30 s in all, or had
                too many handshakes under way for 30 s.
            AuthenticationError: the peer refused this process, is another user's process, does not hold the token, or
                is not the process that `address` names.
            VersionMismatch: the peer has another protocol or Python version.
            ProtocolError: `address` is no process's name, or the peer passed a descriptor that is no sealed arena.
        """
        return await self._admitted(lambda: self._connect(address))

    async def _connect(self, address: str) -> LocalConnection:
        with contextlib.ExitStack() as undo:
            hello, sock = await self._introduce(address, Purpose.PEER, undo)
            async with answering(address, "on this host"):
                mapping = await self._receive_arena(sock, hello.arena_nbytes, writable=False)
                await self._send_arena(sock, writable=False)
                connection = self._connection(sock, hello, mapping)
            undo.pop_all()
        return connection

    async def aclose(self) -> None:
        """Stop listening and remove the socket's file, unless a later head of the cluster has put its own there.
        Connections stay open. Idempotent."""
        if self._listener is not None and not self._listener.closed and self._listener.ours:
            path = self._path(self.address)
            with contextlib.suppress(FileNotFoundError):
                if self._file is not None and os.path.samestat(path.lstat(), self._file):
                    path.unlink()
        await super().aclose()

    def _path(self, address: str) -> Path:
        if not _ADDRESS.fullmatch(address):
            raise ProtocolError(f"{address!r} is no address on this host: it must be 32 hexadecimal digits")
        return self._directory / f"{address}.sock"

    async def _introduce(
        self, address: str, purpose: Purpose, undo: contextlib.ExitStack
    ) -> tuple[Introduction, socket.socket]:
        """Connect and do the handshake. `undo` closes the socket."""
        path = self._path(address)
        where = f"on this host, in {self._directory}{self._apart and f' ({self._apart})'}"
        async with answering(address, where):
            sock = undo.enter_context(await unix.connect(path))
            uid = unix.peer_uid(sock)
            if uid != os.geteuid():
                raise AuthenticationError(f"process {address} runs as uid {uid}, this one as uid {os.geteuid()}")
            return await self._say_hello(sock, purpose, address), sock

    async def _greet(self, sock: socket.socket) -> None:
        """Do the accepting side of `connect`. Owns `sock`."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(sock)
            hello = await self._hear_hello(sock)
            if hello.purpose is Purpose.WRITABLE_ARENA:
                await self._send_arena(sock, writable=True)
                return
            if hello.purpose is Purpose.DEVICE_EXTENTS and self._supply is not None:
                await hand_out(sock, self._supply, hello.process)
                return
            if hello.purpose is not Purpose.PEER:
                raise ProtocolError(f"nobody connects on this host for {hello.purpose.name}")
            await self._send_arena(sock, writable=False)
            mapping = await self._receive_arena(sock, hello.arena_nbytes, writable=False)
            connection = self._connection(sock, hello, mapping)
            undo.pop_all()
        self._hand_on(connection)

    async def _send_arena(self, sock: socket.socket, *, writable: bool) -> None:
        if self._arena_fd is None:
            await unix.send_descriptor(sock, None)
            return
        # Opened again for each peer, so that the system counts the peers: see `ArenaFile.is_the_only_one`.
        access = os.O_RDWR if writable else os.O_RDONLY
        fd = os.open(f"/proc/self/fd/{self._arena_fd}", access | os.O_CLOEXEC)
        try:
            await unix.send_descriptor(sock, fd)
        finally:
            os.close(fd)

    async def _receive_arena(self, sock: socket.socket, nbytes: int, *, writable: bool) -> Mapping | None:
        fd = await unix.receive_descriptor(sock)
        if fd is None:
            if nbytes:
                raise ProtocolError(f"the peer announced an arena of {nbytes} bytes and passed none")
            return None
        try:
            check_seals(fd, nbytes)
            return Mapping(fd, nbytes, writable=writable)
        finally:
            os.close(fd)

    async def _map_writable(self, address: str, nbytes: int) -> Mapping | None:
        return await self._admitted(lambda: self._ask_for_writable(address, nbytes))

    async def _ask_for_writable(self, address: str, nbytes: int) -> Mapping | None:
        with contextlib.ExitStack() as undo:
            _, sock = await self._introduce(address, Purpose.WRITABLE_ARENA, undo)
            async with answering(address, "on this host"):
                return await self._receive_arena(sock, nbytes, writable=True)

    async def _fetch_extents(self, address: str, places: Collection[int]) -> ExtentReply:
        async def ask() -> ExtentReply:
            with contextlib.ExitStack() as undo:
                _, sock = await self._introduce(address, Purpose.DEVICE_EXTENTS, undo)
                async with answering(address, "on this host"):
                    return await receive_extents(sock, places)

        return await self._admitted(ask)

    def _connection(self, sock: socket.socket, hello: Introduction, mapping: Mapping | None) -> LocalConnection:
        unix.set_send_buffer(sock)
        recv_depth, eager_limit = self._agreed(hello)
        return LocalConnection(
            sock,
            PeerInfo(hello.process, hello.pid, unix.peer_uid(sock), hello.arena_nbytes),
            recv_depth=recv_depth,
            eager_limit=eager_limit,
            mapping=mapping,
            map_writable=lambda: self._map_writable(hello.process.hex(), hello.arena_nbytes),
            reader=None if self._arena_fd is None else unix.peer_process(sock),
            fetch_extents=lambda places: self._fetch_extents(hello.process.hex(), places),
        )


def _objection(sock: socket.socket) -> str | None:
    uid, ours = unix.peer_uid(sock), os.geteuid()
    return None if uid == ours else f"it comes from uid {uid}, we are uid {ours}"


def _endpoint(settings: EndpointSettings) -> LocalEndpoint:
    config, store = settings.config, settings.store
    return LocalEndpoint(
        settings.directory, settings.process, settings.token, store.arena.fd, store.arena.nbytes, config.recv_depth,
        config.eager_limit, store.supply_extents, settings.apart,
    )  # fmt: skip


TRANSPORT: Final = Transport(_endpoint, by_name=True)
"""See `zcactor.transport.registry`."""
