"""A connection to a peer on any host: frames through a TCP socket, and bytes through further sockets."""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
from typing import TYPE_CHECKING, Any, ClassVar, Final

from zcactor.errors import ConnectionLost
from zcactor.transport.base import Connection
from zcactor.transport.stream.connection import StreamConnection
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.tcp.data import Channel
from zcactor.transport.tcp.liveness import Liveness, received, timed_out
from zcactor.transport.tcp.pull import STREAMS, DataPuller

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine

    from zcactor.transport.bytes import Commit, Flow, RemoteRegion
    from zcactor.transport.frames import PeerInfo, Receiver
    from zcactor.transport.tcp.serve import DataServer

__all__ = ["TcpConnection"]

LINGER: Final = 5.0
"""Seconds that closing waits for the peer's system to confirm the last bytes. After that it counts as gone."""
MAX_OFFERS: Final = STREAMS
"""Data sockets that this process opens to a peer at the same time: as many as a puller uses."""
_FIRST_LOOK: Final = 0.001
_LAST_LOOK: Final = 0.05


class TcpConnection(StreamConnection, Connection):
    """A connected and authenticated TCP socket. Satisfies `zcactor.transport.base.Connection`.

    Frames are encrypted where the socket is a `zcactor.transport.stream.record_layer.SealedSocket`. Pulled bytes are
    not encrypted, and they are authenticated as both ends have agreed.
    `zcactor.transport.tcp.tls_connection.TlsConnection` encrypts all bytes.

    Args, beside those of `StreamConnection`, which raises the same:
        connect_data: opens a data socket to the peer, for `pull`.
        offer_data: opens a data socket to the peer, for its pulls, and hands it to `server`.
        server: answers the peer's pulls; belongs to the connection from here.
    """

    kind = "tcp"
    nbytes_per_s = 1e9  # a cable of 10 Gbit/s
    channel: ClassVar[type[Channel]] = Channel
    """The class of data sockets where frames are not encrypted."""

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerInfo,
        *,
        recv_depth: int,
        eager_limit: int,
        where: str,
        connect_data: Callable[[], Awaitable[Channel]],
        offer_data: Callable[[], Coroutine[Any, Any, None]],
        server: DataServer,
    ) -> None:
        super().__init__(sock, peer, recv_depth=recv_depth, eager_limit=eager_limit, where=where)
        self._puller = DataPuller(self.name, connect_data, self._lose)
        self._offer_data = offer_data
        self._offers: set[asyncio.Task[None]] = set()
        self._server = server
        server.offered = self._puller.offered
        self._liveness: Liveness | None = None

    def _begin(self, receiver: Receiver) -> None:
        self._server.receiver = receiver
        self._puller.ask = self.ask_to_dial
        super()._begin(receiver)
        self._liveness = Liveness(self._sock, self._loop, self._silent)

    def _silent(self, how: str) -> None:
        lost = self._ended(how)
        lost.__cause__ = timed_out()
        self._lose(lost)

    @property
    def heard(self) -> int | None:
        """Number of received bytes; see `zcactor.transport.base.Connection`."""
        return None if self._lost else received(self._sock)

    @property
    def integrity(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        if self._sealed is None:
            return "none"
        return "frames" if self._sealed.seals.integrity is Integrity.FRAMES else "arrays"

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Copy bytes of the peer's arena to `address`. Several pulls may run at the same time.

        Cancelling ends the data socket in use. Other pulls continue.

        Args:
            region: the bytes.
            address: their destination.
            keep: the owner of the memory at `address`. It is held until no thread can write there any more, which is
                soon after this has raised or was cancelled.
            commit: see `zcactor.transport.base.Connection.pull`; each thread that receives calls it for its piece.

        Raises:
            ConnectionLost: the connection has ended, or the peer cannot be reached for a data socket.
            ObjectLost: the peer has freed the object.
            OutOfMemory: as `commit`.
            ProtocolError: the range does not lie inside the peer's arena, or received bytes are not from the peer. In
                the latter case the connection ends, too.
        """
        if self._lost:
            raise ConnectionLost(f"the connection to {self.name} is closed")
        self._check_range(region.offset, region.nbytes)
        try:
            if region.nbytes:
                await self._puller.pull(region, address, keep, commit)
        finally:
            del keep  # an exception that is kept refers to this frame

    def dial(self) -> None:
        """See `zcactor.transport.base.Connection`."""
        if not self._lost and not self._server.full and len(self._offers) < MAX_OFFERS:
            offer = self._loop.create_task(self._offer_data(), name="zcactor data socket")
            self._offers.add(offer)
            offer.add_done_callback(self._offers.discard)

    def describe(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        frames = "frames over TCP, sealed" if self.sealed else "frames over TCP"
        arrays = "arrays authenticated and received" if self.integrity == "arrays" else "arrays received"
        return f"{frames}; {arrays} into the store over {self._further_sockets()}"

    def _further_sockets(self) -> str:
        reason = self._puller.undialled
        why = f" that the peer opens, as this process cannot reach it ({reason})" if reason else ""
        return f"further sockets{why}"

    async def flow(self, region: RemoteRegion) -> Flow | None:
        """See `zcactor.transport.base.Connection`."""
        self._check_range(region.offset, region.nbytes)
        return None if self._lost else await self._puller.flow(region)

    async def _linger(self) -> None:
        # A TCP socket that is closed with unread bytes, or that receives more, is reset (RFC 2525, 2.17). Bytes that
        # the peer's system has not confirmed are lost then. The system does not report a confirmation, so ask it.
        delay, unconfirmed = _FIRST_LOOK, array.array("i", [0])
        until = self._loop.time() + LINGER
        while not self._lost and self._loop.time() < until:
            fcntl.ioctl(self._fd, termios.TIOCOUTQ, unconfirmed)
            if unconfirmed[0] == 0:
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_LOOK)

    def _fence(self, then: Callable[[], None]) -> None:
        if self._liveness is not None:
            self._liveness.stop()
        for offer in self._offers:
            offer.cancel()
        self._puller.close()
        self._server.close(then)

    def _abandon(self) -> None:
        self._puller.abandon()
        self._server.abandon()
