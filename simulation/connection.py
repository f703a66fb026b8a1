"""One end of a connection between two simulated processes.

`zcactor.transport.loopback.connection` carries the frames. This module adds the space between the two ends: a network
with delays and cuts (`simulation.network`), hosts, and processes that end. Processes of one host map each
other's arenas. Others pull, and get only the bytes that the owner has leased to them.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import deque
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.rpc.codec import TEMPLATE, decode
from zcactor.rpc.messages import UNCREDITED, Kind
from zcactor.transport.credits import RESERVED
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.loopback.connection import NO_FAULTS, LoopbackConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.loop import SimLoop
    from simulation.network import Network
    from zcactor.config import Config
    from zcactor.transport.bytes import Commit, RemoteRegion
    from zcactor.transport.frames import PeerInfo

__all__ = ["SimConnection"]


BANDWIDTH: Final = 5e9
"""Bytes that a pull brings in a virtual second."""
_KINDS: Final = {int(kind): kind.name for kind in Kind}
_CREDITED: Final = {int(kind): int(kind not in UNCREDITED) for kind in Kind if kind is not Kind.HELLO}
_PLAIN: Final = Struct("<I52sQ14xHBx")
"""The layout of a frame without references, see `zcactor.rpc.codec`: its length, the part that is the same in all, id,
credits and kind."""
_PLAIN_NBYTES: Final = _PLAIN.size
_unpack_plain = _PLAIN.unpack_from


def _anything(*_: object) -> object:
    return True


class SimConnection(LoopbackConnection):
    """A connection in the simulated network. Satisfies `zcactor.transport.base.Connection`.

    Args:
        network: the network.
        loop: the loop of this end's process.
        peer: the facts about the other end that a handshake would give.
        arena: address and bytes of the peer's arena.
        keeps: an object that keeps that arena's memory alive, as a mapping does in a real process.
        maps: whether both processes are on one host.
        native: whether the native part writes and reads plain frames; otherwise Python does all frames.
        authorize: ``authorize(receiver, object_id, offset, nbytes)`` of this end's endpoint returns an object that
            keeps the bytes where the peer may pull them, else None.
    """

    integrity = "none"

    def __init__(
        self, network: Network, loop: SimLoop, peer: PeerInfo, arena: tuple[int, int], keeps: Any, *, recv_depth: int,
        eager_limit: int, maps: bool, native: bool = False,
        authorize: Callable[[Any, int, int, int], object] = _anything,
    ) -> None:  # fmt: skip
        super().__init__(
            peer, (*arena, keeps), loop=loop, recv_depth=recv_depth, eager_limit=eager_limit, faults=NO_FAULTS,
            rng=network.undrawn, maps=maps,
        )  # fmt: skip
        self.kind = "sim"
        self.native_out.declines = not native
        self.integrity = "mapped" if maps else "none"
        self.loop = loop
        self.network = network
        self.held: list[bytes | ConnectionLost] = []
        """Batches that wait for a cut way to open."""
        self.not_before = 0.0
        """Virtual time before which no further batch arrives at the other end: earlier batches are there first."""
        self._keeps = keeps
        self._authorize = authorize
        self._greeted = False
        self._borrowed: dict[object, object] = {}
        """The objects that keep bytes in the other end's arena which are being pulled. This end's process may end, and
        its coroutines, which never go on, keep nothing of another process."""
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
        """Whether this end is closed."""
        return self._lost

    def idle_timeout(self, config: Config) -> float:
        """See `zcactor.transport.base.Connection`: as between processes of the system."""
        return config.idle_timeout

    # ---- sending

    def _leave(self) -> None:
        """Send at once: the way takes its time anyway. Only tests have threads; theirs leave it to the loop."""
        if threading.get_ident() == self._thread:
            self._transmit()
        elif self._wire:
            self._loop.call_soon_threadsafe(self._transmit)

    def _transmit(self) -> None:
        while self._wire and not self._lost:
            self.carry(self._wire.popleft())

    def carry(self, item: bytes | ConnectionLost) -> None:
        """Send a batch, or the end of the stream, to the other end."""
        network, other = self.network, self.other
        here, there = self.loop, other.loop
        if self.held or network.is_cut(here.host, there.host):
            self.held.append(item)
            return
        world = network.world
        at = world.now + network.time(here, there)
        if at < self.not_before:
            at = self.not_before
        else:
            self.not_before = at
        if isinstance(item, bytes):
            network.batches += 1
            network.nbytes += len(item)
            frames, taken, returned = self._frames(item)
            network.frames += len(frames)
            other._returns.append(returned)
            self._outstanding += taken
            if self._outstanding > self.recv_depth - RESERVED:
                network.on_overrun(here, self._outstanding, self.recv_depth - RESERVED)
            world.trace.sent(world.now, here.label, there.label, len(item), frames)
        else:
            world.note(here.label, "close", to=there.label)
        if there.dead:
            if not isinstance(item, ConnectionLost):  # the system there does not know the connection
                here.at(at + network.time(there, here), self.lose, _gone(other))
        else:
            there.at(at, other.arrive, item)

    def _frames(self, batch: bytes) -> tuple[list[str], int, int]:
        """The kind and id of each frame of a batch, for the trace; the number of frames that take a credit, and the
        number of credits that the frames return. Malformed frames are for the receiver to refuse."""
        found: list[str] = []
        position = taken = returned = 0
        nbytes = len(batch)
        while position < nbytes:
            if nbytes - position >= _PLAIN_NBYTES:
                length, constant, number, credits, kind = _unpack_plain(batch, position)
                if constant == TEMPLATE and kind in _CREDITED:  # nearly all frames; the others cost ten times as much
                    found.append(f"{_KINDS[kind]} {number}")
                    taken += _CREDITED[kind]
                    returned += credits
                    position += LENGTH_PREFIX + length
                    continue
            start = position + LENGTH_PREFIX
            position = start + int.from_bytes(batch[position:start], "little")
            if self._greeted:
                try:
                    kind, _, _, credits, _, number, *_ = decode(batch, start, min(position, nbytes))
                except ProtocolError:
                    found.append("no frame")
                else:
                    found.append(f"{_KINDS[kind]} {number}")
                    taken += _CREDITED[kind]
                    returned += credits
            else:
                self._greeted = True
                found.append("HELLO")
                taken += 1
        return found, taken, returned

    def arrive(self, item: bytes | ConnectionLost, turns: int = 0) -> None:
        """Take a batch from the other end, or the end of the stream, in a turn of its own."""
        if not self._lost:
            self._incoming.append((item, turns))
            if self._receiver is not None and not self._pumping:
                self._pump()

    def _deliver(self, batch: bytes) -> None:
        self._outstanding -= self._returns.popleft()
        super()._deliver(batch)
        if not self._lost:
            self.network.on_delivered(self.loop, self._receiver, self._outstanding)

    # ---- the peer's arena

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Copy the bytes after the time that a request and its answer would take.

        Raises:
            ConnectionLost: the connection is closed, or closes meanwhile; then no further byte is written.
            ObjectLost: the owner has not leased them to this process.
            ProtocolError: the range does not lie inside the arena.
        """
        source = self.map(region.offset, region.nbytes)
        network, other = self.network, self.other
        await self._way(network.time(self.loop, other.loop))
        turn = object()
        self._borrowed[turn] = other._authorize(other._receiver, region.object_id, region.offset, region.nbytes)
        try:
            await self._way(network.time(other.loop, self.loop) + region.nbytes / BANDWIDTH)
            if self._borrowed[turn] is None:
                raise ObjectLost(f"process {self.peer.pid} does not have object {region.object_id:x} any more")
            if commit is not None:
                commit(0, region.nbytes)
            ctypes.memmove(address, source.address, region.nbytes)
        finally:
            self._borrowed.pop(turn, None)
        del keep

    async def _way(self, seconds: float) -> None:
        """Wait for `seconds`, and longer while the network is cut or the peer is stopped."""
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
        """Take the system's report that the connection is broken."""
        if not self.loop.dead:
            self._lose(cause)

    def vanish(self, *, silently: bool) -> None:
        """Close the end of a process that has ended; `silently` where its host has ended as well, so that the peer gets
        no word."""
        if self._lost:
            return
        if not silently:
            self._transmit()
            self.carry(_gone(self))
        self._over()
        self._receiver = None  # the peer's end may be kept for long, and keeps this one

    def _over(self) -> None:
        self._lost = True
        self._out.close("the connection is closed")
        self._wire.clear()
        self._incoming.clear()
        self._borrowed.clear()
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
