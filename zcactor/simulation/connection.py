"""One end of a connection between two simulated processes.

What carries frames is `zcactor.transport.loopback_connection`; here is what lies between the two ends: a network with
delays and cuts (`zcactor.simulation.network`), hosts, and processes that end. Processes of one host map each other's
arenas. Others pull, and get only what the owner has leased to them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.rpc.codec import decode
from zcactor.rpc.messages import UNCREDITED, Kind
from zcactor.simulation.slot import Slot
from zcactor.transport.base import LENGTH_PREFIX
from zcactor.transport.credits import RESERVED
from zcactor.transport.loopback_connection import NO_FAULTS, LoopbackConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.loop import SimLoop
    from zcactor.simulation.network import Network
    from zcactor.transport.base import PeerInfo, RemoteRegion

__all__ = ["SimConnection"]

BANDWIDTH: Final = 5e9
"""Bytes a virtual second that pulls bring."""
_KINDS: Final = {int(kind): kind.name for kind in Kind}


def _anything(*_: object) -> object:
    return True


class SimConnection(LoopbackConnection):
    """Satisfies `zcactor.transport.base.Connection`.

    Args:
        network: in which it is.
        loop: of this end's process.
        peer: what the handshake would tell of the other end's.
        arena: address and bytes of the peer's arena.
        keeps: what keeps that arena's memory, as a mapping does in a real process.
        maps: whether both processes are on one host.
        native: whether frames are written and read by the native part.
        authorize: ``authorize(receiver, object_id, offset, nbytes)`` of this end's endpoint: what keeps the bytes,
            where the peer may pull them, else None.
    """

    integrity = "none"

    def __init__(
        self, network: Network, loop: SimLoop, peer: PeerInfo, arena: tuple[int, int], keeps: Any, *, recv_depth: int,
        eager_limit: int, maps: bool, native: bool = False,
        authorize: Callable[[Any, int, int, int], object] = _anything,
    ) -> None:  # fmt: skip
        super().__init__(
            peer, arena, loop=loop, recv_depth=recv_depth, eager_limit=eager_limit, faults=NO_FAULTS,
            rng=network.world.random("no faults"), maps=maps,
        )  # fmt: skip
        self.kind = "sim"
        self.native_out: Any = None
        """The native send buffer, where there is one, see `zcactor.transport.stream_connection.StreamConnection`."""
        if native:
            slot = Slot(self.max_frame + LENGTH_PREFIX, self._take, self._leave)
            self._out = self.native_out = slot.native
        self.integrity = "mapped" if maps else "none"
        self.loop = loop
        self.network = network
        self.mapping = keeps if maps else None
        self.held: list[bytes | ConnectionLost] = []
        """What waits for a cut way to open."""
        self.not_before = 0.0
        """Virtual time before which nothing more arrives at the other end: what was sent earlier is there first."""
        self._keeps = keeps
        self._authorize = authorize
        self._greeted = False
        self._outstanding = 0  # frames that took a credit, and that the other end has not reported consumed by now
        self._returns: deque[int] = deque()  # credits in each batch that is on its way here
        network.connections[self] = None
        loop.connections[self] = None

    def __repr__(self) -> str:
        return f"<SimConnection {self.loop.label} to {self.other.loop.label}>"

    @property
    def other(self) -> SimConnection:
        """The other end."""
        assert isinstance(self._other, SimConnection)
        return self._other

    @property
    def lost(self) -> bool:
        """Whether this end is over."""
        return self._lost

    # ---- sending

    def flush(self) -> None:
        """Send what is committed; it arrives in a later turn of the loop."""
        if self.native_out is None:
            super().flush()
        else:
            self.native_out.flush()  # which also sees to it that it leaves

    def send_blocked(self) -> None:
        """Never called by the native part: all that is written is taken."""

    def send_failed(self, error: OSError) -> None:
        """Never called by the native part, for the same reason."""

    def _transmit(self) -> None:
        while self._wire and not self._lost:
            self.carry(self._wire.popleft())

    def carry(self, item: bytes | ConnectionLost) -> None:
        """Send a batch, or the end of the stream, on its way to the other end."""
        network, other = self.network, self.other
        if self.held or network.is_cut(self.loop.host, other.loop.host):
            self.held.append(item)
            return
        world = network.world
        at = self.not_before = max(self.not_before, world.now + network.time(self.loop, other.loop))
        if isinstance(item, bytes):
            network.batches += 1
            network.nbytes += len(item)
            frames, taken, returned = self._frames(item)
            network.frames += len(frames)
            other._returns.append(returned)
            self._outstanding += taken
            if self._outstanding > self.recv_depth - RESERVED:
                network.on_overrun(self.loop, self._outstanding, self.recv_depth - RESERVED)
            world.note(self.loop.label, "send", to=other.loop.label, nbytes=len(item), frames=frames)
        else:
            world.note(self.loop.label, "close", to=other.loop.label)
        if other.loop.dead:
            if not isinstance(item, ConnectionLost):  # the system there knows nothing of it
                self.loop.at(at + network.time(other.loop, self.loop), self.lose, _gone(other))
        else:
            other.loop.at(at, other.arrive, item, 0)

    def _frames(self, batch: bytes) -> tuple[list[str], int, int]:
        """Of each frame of a batch its kind and its id, for the trace; how many of them take a credit, and how many
        credits they return. What is no frame is the receiver's to refuse."""
        found: list[str] = []
        position = taken = returned = 0
        while position < len(batch):
            start = position + LENGTH_PREFIX
            position = start + int.from_bytes(batch[position:start], "little")
            if self._greeted:
                try:
                    kind, _, _, credits, _, number, *_ = decode(batch, start, min(position, len(batch)))
                except ProtocolError:
                    found.append("no frame")
                else:
                    found.append(f"{_KINDS[kind]} {number}")
                    taken += kind not in UNCREDITED
                    returned += credits
            else:
                self._greeted = True
                found.append("HELLO")
                taken += 1
        return found, taken, returned

    def _deliver(self, batch: bytes) -> None:
        self._outstanding -= self._returns.popleft()
        super()._deliver(batch)

    # ---- the peer's arena

    async def pull(self, region: RemoteRegion, address: int, keep: object) -> None:
        """Copy the bytes when a request and its answer would have taken their way.

        Raises:
            ConnectionLost: the connection is closed, or closes meanwhile; then nothing is written any more.
            ObjectLost: the owner has not leased them to us.
            ProtocolError: the range does not lie inside the arena.
        """
        source = self.map(region.offset, region.nbytes)
        network, other = self.network, self.other
        await self._way(network.time(self.loop, other.loop))
        held = other._authorize(other._receiver, region.object_id, region.offset, region.nbytes)
        await self._way(network.time(other.loop, self.loop) + region.nbytes / BANDWIDTH)
        if held is None:
            raise ObjectLost(f"process {self.peer.pid} does not have object {region.object_id:x} any more")
        ctypes.memmove(address, source, region.nbytes)
        del keep, held

    async def _way(self, seconds: float) -> None:
        """Wait for something that takes so long, and longer while nothing comes through or the peer is stopped."""
        while not self._lost:
            await asyncio.sleep(seconds)
            other = self.other.loop
            silent = self.network.is_cut(self.loop.host, other.host) or self.network.is_cut(other.host, self.loop.host)
            if not silent and not other.dead and not other.stopped:
                break
            seconds = 0.05
        if self._lost:
            raise ConnectionLost("the connection was closed", maybe_executed=True)

    # ---- ending

    def lose(self, cause: ConnectionLost) -> None:
        """The system reports that the connection is broken."""
        if not self.loop.dead:
            self._lose(cause)

    def vanish(self, *, silently: bool) -> None:
        """This end's process has ended; `silently`, where its host has as well, and nobody is told."""
        if self._lost:
            return
        if not silently:
            self._transmit()
            self.carry(_gone(self))
        self._over()

    def _over(self) -> None:
        self._lost = True
        self._out.close("the connection is closed")
        self._wire.clear()
        self._incoming.clear()
        self.loop.connections.pop(self, None)
        if not self.held or self.other._lost:
            self.network.connections.pop(self, None)

    def _lose(self, cause: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self.network.on_lost(self.loop, cause)
        if not self.other._lost:
            self.carry(_gone(self))
        self._over()
        self._report_later(cause)


def _gone(end: SimConnection) -> ConnectionLost:
    pid = end.other.peer.pid
    return ConnectionLost(f"process {pid} closed the connection", maybe_executed=True)
