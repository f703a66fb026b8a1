"""A connection to a peer on this host: frames through a unix stream socket, and the peer's arena as a mapping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.mapping import NOWHERE
from zcactor.transport.stream.connection import StreamConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Collection

    from zcactor.transport.base import Commit, PeerInfo, RemoteRegion
    from zcactor.transport.mapping import Mapped, Mapping
    from zcactor.transport.os_process import OsProcess

__all__ = ["LocalConnection"]


class LocalConnection(StreamConnection):
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
        native: bool = True,
    ) -> None:
        super().__init__(sock, peer, recv_depth=recv_depth, eager_limit=eager_limit, native=native)
        self.mapping = mapping
        """See `zcactor.transport.base.Connection`."""
        self.writable_mapping: Mapping | None = None
        """The windows with write access; None until `open_writable` has succeeded."""
        self.reader = reader
        """The peer's process, which maps our arena until it ends, also after the connection has ended."""
        self.fetch_extents = fetch_extents
        """See `zcactor.transport.base.Connection`."""
        self._map_writable = map_writable
        self._writable_lock = asyncio.Lock()
        self._writable_open = False

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
