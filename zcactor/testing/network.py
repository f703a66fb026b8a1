"""The connections of a runtime that is wholly in one process of the system: loopback connections, with real arenas.

`zcactor.transport.loopback.connection` carries the frames. Here each end belongs to one of several `Process` objects:
frames that arrive there are handled in the context of that process (see `zcactor.testing.inner`). The peer's arena is
mapped once more, read-only, as between two processes of one host.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import ref

from zcactor.errors import ConnectionLost
from zcactor.transport.base import Endpoint
from zcactor.transport.frames import LENGTH_PREFIX, PeerInfo
from zcactor.transport.loopback.connection import NO_FAULTS, LoopbackConnection
from zcactor.transport.mapping import Mapping
from zcactor.transport.os_process import OsProcess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from contextvars import Context

    from zcactor.objectstore.arena import Arena
    from zcactor.testing.faults import LinkFaults
    from zcactor.transport.base import Connection
    from zcactor.transport.mapping import ArenaFile, Mapped

__all__ = ["InnerConnection", "InnerEndpoint", "InnerNetwork"]

_NO_RANDOM: Final = random.Random(0)


class InnerNetwork:
    """The endpoints that can reach each other.

    Args:
        faults: of the connections that do not lead to the head; None for none.
    """

    def __init__(self, faults: LinkFaults | None = None) -> None:
        self.faults = faults
        self.listening: dict[str, InnerEndpoint] = {}
        self.mapped: list[tuple[ref[ArenaFile], InnerEndpoint, InnerEndpoint]] = []
        """All arenas that were opened so far: the file, the endpoint of its reader, and that of its owner."""

    def map(self, reader: InnerEndpoint, owner: InnerEndpoint, *, writable: bool = False) -> Mapping:
        """Open the arena of `owner` for `reader`.

        Raises:
            OSError: no descriptor is left, or the arena is closed.
        """
        made = Mapping(owner.arena.fd, owner.arena.nbytes, writable=writable)
        self.mapped = [entry for entry in self.mapped if entry[0]() is not None]
        self.mapped.append((ref(made.file), reader, owner))
        return made


class InnerEndpoint(Endpoint):
    """The endpoint of one process. Satisfies `zcactor.transport.base.Endpoint`.

    Args:
        network: the network in which it is found.
        loop: the loop of all processes.
        context: the context of its process.
        process: process id, 16 bytes.
        pid: the pid that its peers get.
        arena: of its process.
        is_head: whether it is the head's; connections with the head have no faults.
        recv_depth: frames it can take in; a connection uses the smaller of both sides' numbers.
        eager_limit: bytes of the largest payload inside a frame; likewise.
    """

    kind = "loopback"

    def __init__(
        self, network: InnerNetwork, loop: asyncio.AbstractEventLoop, context: Context, process: bytes, pid: int,
        arena: Arena, *, is_head: bool, recv_depth: int, eager_limit: int,
    ) -> None:  # fmt: skip
        self.network = network
        self.loop = loop
        self.context = context
        self.process = process
        self.address = process.hex()
        self.pid = pid
        self.arena = arena
        self.is_head = is_head
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit
        self.reader = OsProcess(0, int.from_bytes(process, "little"))
        """The name of its process at the owners of arenas that it maps. It has no pid: its end is reported by
        `zcactor.testing.inner.InnerProcess`."""
        self._accepted: Callable[[Connection], None] | None = None

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """See `zcactor.transport.base.Endpoint.start`.

        Raises:
            RuntimeError: it was started before.
        """
        if self._accepted is not None:
            raise RuntimeError(f"the endpoint {self.address} listens already")
        self._accepted = accepted
        self.network.listening[self.address] = self

    async def connect(self, address: str) -> InnerConnection:
        """See `zcactor.transport.base.Endpoint.connect`.

        Raises:
            ConnectionLost: no process listens there.
        """
        other = self.network.listening.get(address)
        if other is None or other._accepted is None:
            raise ConnectionLost(f"process {address} cannot be reached: nobody listens there")
        faults = None if self.is_head or other.is_head else self.network.faults
        ours, theirs = InnerConnection(self, other, faults), InnerConnection(other, self, faults)
        ours.join(theirs)
        theirs.join(ours)
        self.loop.call_soon(other._accepted, theirs, context=other.context)
        return ours

    async def aclose(self) -> None:
        """See `zcactor.transport.base.Endpoint.aclose`."""
        self.unlisten()

    def unlisten(self) -> None:
        """Accept no further connections. Idempotent."""
        if self.network.listening.get(self.address) is self:
            del self.network.listening[self.address]


class InnerConnection(LoopbackConnection):
    """One end of a connection. Satisfies `zcactor.transport.base.Connection`.

    Args:
        endpoint: of this end's process.
        other: the endpoint of the peer.
        faults: of this connection; None for none.
    """

    def __init__(self, endpoint: InnerEndpoint, other: InnerEndpoint, faults: LinkFaults | None) -> None:
        super().__init__(
            PeerInfo(other.process, other.pid, 0, other.arena.nbytes), (0, other.arena.nbytes, None),
            loop=endpoint.loop, recv_depth=min(endpoint.recv_depth, other.recv_depth),
            eager_limit=min(endpoint.eager_limit, other.eager_limit), faults=NO_FAULTS, rng=_NO_RANDOM, maps=True,
        )  # fmt: skip
        self.mapping = endpoint.network.map(endpoint, other)
        self.reader = other.reader
        self._endpoint = endpoint
        self._far = other
        self._link = faults
        self._sent: deque[tuple[float, bytes | ConnectionLost]] = deque()
        """Batches on the way, each with the time of its arrival."""
        self._last = 0.0
        self._coming: asyncio.TimerHandle | None = None

    # ---- frames

    def _pump_soon(self) -> None:
        if self._incoming and self._receiver is not None and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump, context=self._endpoint.context)

    def _transmit(self) -> None:
        while self._wire and not self._lost:
            batch, link = self._wire.popleft(), self._link
            if link is None or link.begun is None:
                self._other.arrive(batch, 0)
                continue
            if link.left is not None:
                frames = _lengths(batch)
                if len(frames) >= link.left:
                    self._send(link, batch[: sum(frames[: link.left])])
                    link.left = None
                    self._break(f"broke after {link.break_after} frames")
                    return
                link.left -= len(frames)
            self._send(link, batch)

    def _send(self, link: LinkFaults, item: bytes | ConnectionLost) -> None:
        """Have `item` arrive at the other end at its time, and not before earlier ones."""
        self._last = when = max(self._last, link.arrival())
        self._sent.append((when, item))
        if self._coming is None:
            self._bring()

    def _bring(self) -> None:
        self._coming = None
        while self._sent:
            when, item = self._sent[0]
            if when > self._loop.time():
                self._coming = self._loop.call_at(when, self._bring)
                return
            self._sent.popleft()
            self._other.arrive(item, 0)

    def _break(self, what: str) -> None:
        cause = ConnectionLost(f"the loopback connection {what}: a fault was asked for", maybe_executed=True)
        self._end_of_stream(cause)
        self._over(cause)

    def _end_of_stream(self, cause: ConnectionLost) -> None:
        if self._link is None or self._link.begun is None:
            self._other.arrive(cause, 0)
        else:
            self._send(self._link, cause)

    def _lose(self, cause: Exception | None) -> None:
        if not self._lost:
            self._end_of_stream(
                ConnectionLost(f"process {self._endpoint.address} closed the connection", maybe_executed=True)
            )
            self._over(cause)

    def _over(self, cause: Exception | None) -> None:
        self._lost = True
        self._out.close("the loopback connection is closed")
        self._wire.clear()
        self._incoming.clear()
        self._report_later(cause)

    # ---- the peer's arena

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> Mapped:
        """See `zcactor.transport.base.Connection.map`."""
        super().map(offset, nbytes, writable=writable)
        mapping = self.writable_mapping if writable else self.mapping
        if mapping is None:  # the connection has ended
            raise ConnectionLost("the loopback connection is closed: nothing more is mapped by it")
        return mapping.map(offset, nbytes)

    async def open_writable(self) -> None:
        """See `zcactor.transport.base.Connection.open_writable`.

        Raises:
            ConnectionLost: the connection is closed, or the system refuses the mapping.
        """
        if self.writable_mapping is None and not self._lost:
            try:
                self.writable_mapping = self._endpoint.network.map(self._endpoint, self._far, writable=True)
            except OSError as error:
                raise ConnectionLost(f"the arena of process {self._far.address} cannot be mapped: {error}") from error
        await super().open_writable()

    def unmap(self) -> None:
        """Let go of the peer's arena: arrays that lie in it keep it."""
        self.mapping = self.writable_mapping = None


def _lengths(batch: bytes) -> list[int]:
    """The bytes of each frame of a batch, prefix included."""
    found, position = [], 0
    while position < len(batch):
        found.append(LENGTH_PREFIX + int.from_bytes(batch[position : position + LENGTH_PREFIX], "little"))
        position += found[-1]
    return found
