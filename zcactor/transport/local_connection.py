"""One peer on this host: frames through a unix stream socket, and its arena mapped in place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.stream_connection import StreamConnection

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from zcactor.transport.base import PeerInfo, RemoteRegion
    from zcactor.transport.mapping import Mapping
    from zcactor.transport.os_process import OsProcess

__all__ = ["LocalConnection"]


class LocalConnection(StreamConnection):
    """A connected and authenticated unix socket. Satisfies `zcactor.transport.base.Connection`.

    Args, beside those of `StreamConnection`, which raises the same:
        mapping: the peer's arena, read-only; None where it has none.
        map_writable: maps the peer's arena with write access; what `open_writable` calls once.
        reader: the peer's process, where our arena was passed to it.
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
    ) -> None:
        super().__init__(sock, peer, recv_depth=recv_depth, eager_limit=eager_limit)
        self.mapping = mapping
        """The peer's arena, read-only. Whoever hands out an array inside it keeps this, so that the mapping stays."""
        self.writable_mapping: Mapping | None = None
        """The peer's arena with write access, once `open_writable` has succeeded."""
        self.reader = reader
        """The peer's process, which maps our arena until it is gone, whatever becomes of the connection."""
        self._map_writable = map_writable
        self._writable_lock = asyncio.Lock()
        self._writable_open = False

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> int:
        """The address of `nbytes` of the peer's arena at `offset`, in place; 0 for an arena of no bytes.

        The address stays valid as long as `mapping` (or `writable_mapping`) is referenced, also after closing.

        Raises:
            ProtocolError: the range does not lie inside the peer's arena.
            LookupError: `writable`, but `open_writable` has not succeeded yet.
        """
        mapping = self.mapping
        size = 0 if mapping is None else mapping.nbytes
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise ProtocolError(
                f"process {self.peer.pid} named {nbytes} bytes at {offset} of its arena, which has {size} bytes"
            )
        if writable:
            if not self._writable_open:
                raise LookupError(f"the arena of process {self.peer.pid} is not writable yet: await open_writable()")
            mapping = self.writable_mapping
        return 0 if mapping is None else mapping.address + offset

    async def open_writable(self) -> None:
        """Get write access to the peer's arena. Idempotent; several tasks may ask at once.

        Cancelling leaves the connection as it was.

        Raises:
            ConnectionLost: the connection is closed, or the peer is gone.
            AuthenticationError: another process than the peer answers at its address.
        """
        async with self._writable_lock:
            if self._writable_open:
                return
            if self._lost:
                raise ConnectionLost(f"the connection to process {self.peer.pid} is closed")
            self.writable_mapping = await self._map_writable()
            self._writable_open = True

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """Never needed here.

        Raises:
            RuntimeError: always; the arena is mapped.
        """
        raise RuntimeError(f"the arena of process {self.peer.pid} is mapped: nothing has to be pulled from it")
