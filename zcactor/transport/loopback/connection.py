"""One end of a connection inside one process and on one loop.

Flushed frames wait for the loop's next turn, so a frame never arrives within the call that sent it. `LoopbackFaults`
adds delays in turns (no clock is read), lost batches and broken connections. One random generator draws all of them, so
the same seed gives the same run. The idea is FoundationDB's simulated network (Zhou et al., SIGMOD 2021, section 4).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from zcactor.config import TRANSPORTS
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.frames import LENGTH_PREFIX, PeerInfo, Receiver, whole_frames
from zcactor.transport.mapping import NOWHERE, Mapped
from zcactor.transport.stream.slots import Slots

if TYPE_CHECKING:
    import random

    from zcactor.config import Config
    from zcactor.transport.bytes import Commit, RemoteRegion

__all__ = ["NO_ARENA", "NO_FAULTS", "Arena", "LoopbackConnection", "LoopbackFaults"]

Arena = tuple[int, int, object]
"""The address and the bytes of one side's arena, and the object that owns them."""
NO_ARENA: Final[Arena] = (0, 0, None)


class LoopbackFaults(msgspec.Struct, frozen=True):
    """Faults of a connection, in each direction by itself. There are no faults by default.

    A lost batch breaks the connection, as on every ordered transport. With `drop_silently` it does not, which no real
    transport does: it shows how the layer above acts when an answer never arrives.
    """

    delay_turns: int = 0
    """The most further turns of the loop that each batch waits; the number is drawn. The order is kept."""
    drop: float = 0.0
    """Probability that a batch is lost."""
    drop_silently: bool = False
    break_after: int | None = None
    """Frames in one direction after which the connection breaks. These frames arrive."""


NO_FAULTS: Final = LoopbackFaults()
NOT_NEEDED: Final = dict.fromkeys(TRANSPORTS, "not needed inside one process")
"""The reasons against all other transports."""


class LoopbackConnection(Connection):
    """One end of a pair. Satisfies `zcactor.transport.base.Connection`. `zcactor.transport.loopback.endpoint` makes
    it."""

    kind = "loopback"
    integrity = "mapped"
    seals_payloads = False

    def __init__(
        self,
        peer: PeerInfo,
        peer_arena: Arena,
        *,
        loop: asyncio.AbstractEventLoop,
        recv_depth: int,
        eager_limit: int,
        faults: LoopbackFaults,
        rng: random.Random,
        maps: bool,
    ) -> None:
        super().__init__(loop, peer, recv_depth, eager_limit)
        self.rejected = NOT_NEEDED
        self.maps = maps
        self._batches = 0
        self._peer_arena = peer_arena
        self._writable_open = False
        self._faults = faults
        self._rng = rng
        self._frames_sent = 0
        self._out = Slots(self.max_frame + LENGTH_PREFIX, self._take).buffer
        self._send_by(self._out)
        self._wire: deque[bytes] = deque()  # flushed, but not sent yet
        self._incoming: deque[tuple[bytes | ConnectionLost, int]] = deque()  # a batch or the end, and the turns to wait
        self._pumping = False
        self._other = self  # until `join`

    def __repr__(self) -> str:
        return f"<LoopbackConnection to process {self.peer.process.hex()}, {'closed' if self._lost else 'open'}>"

    def describe(self) -> str:
        """See `zcactor.transport.base.Connection`."""
        return "the actor lives in this process"

    def idle_timeout(self, config: Config) -> float:
        """See `zcactor.transport.base.Connection`. 0: the connection takes no descriptor."""
        del config
        return 0.0

    def join(self, other: LoopbackConnection) -> None:
        """Make `other` the end that receives from this one."""
        self._other = other

    def _begin(self, receiver: Receiver) -> None:
        del receiver  # `_pump` uses the receiver at that time
        self._pump_soon()

    # ---- sending

    def flush(self) -> None:
        """Send all committed frames. They arrive in a later turn of the loop."""
        self._out.flush()

    def _sending_stopped(self, error: BaseException | None) -> None:
        if error is not None:  # otherwise all written bytes are taken
            lost = ConnectionLost(f"frames could not be sent: {error!r}", maybe_executed=True)
            self._loop.call_soon_threadsafe(self._lose, lost)

    def _leave(self) -> None:
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._transmit)
        else:
            self._loop.call_soon_threadsafe(self._transmit)

    def _take(self, view: memoryview) -> int:
        self._wire.append(bytes(view))
        self._leave()
        return len(view)

    def _transmit(self) -> None:
        faults = self._faults
        while self._wire and not self._lost:
            batch = self._wire.popleft()
            if faults.drop and self._rng.random() < faults.drop:
                if not faults.drop_silently:
                    self._break("lost a batch")
                continue
            if faults.break_after is not None:
                batch = self._first_frames(batch, faults.break_after - self._frames_sent)
            turns = self._rng.randint(0, faults.delay_turns) if faults.delay_turns else 0
            self._other.arrive(batch, turns)
            if faults.break_after is not None and self._frames_sent >= faults.break_after:
                self._break(f"broke after {self._frames_sent} frames")

    def _first_frames(self, batch: bytes, count: int) -> bytes:
        position = 0
        while position < len(batch) and count > 0:
            position += LENGTH_PREFIX + int.from_bytes(batch[position : position + LENGTH_PREFIX], "little")
            count -= 1
            self._frames_sent += 1
        return batch[:position]

    def _break(self, what: str) -> None:
        cause = ConnectionLost(f"the loopback connection {what}: a fault was asked for", maybe_executed=True)
        self._other.arrive(cause, 0)
        self._lose(cause)

    # ---- receiving

    def arrive(self, item: bytes | ConnectionLost, turns: int) -> None:
        """Take a batch, or the end of the stream, from the other end. It waits `turns` turns after the one before."""
        if not self._lost:
            self._incoming.append((item, turns))
            self._pump_soon()

    def _pump_soon(self) -> None:
        if self._incoming and self._receiver is not None and not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._lost or not self._incoming:
            return
        item, turns = self._incoming.popleft()
        if turns:
            self._incoming.appendleft((item, turns - 1))
        elif isinstance(item, ConnectionLost):
            self._lose(item)
        elif item:
            self._deliver(item)
        self._pump_soon()

    @property
    def heard(self) -> int | None:
        """Number of received batches, where the pair stands for two hosts; see `zcactor.transport.base.Connection`."""
        return None if self.maps else self._batches

    def _deliver(self, batch: bytes) -> None:
        self._batches += 1
        receiver = self._receiver
        delivered = False
        try:
            done = whole_frames(batch, len(batch), self.max_frame)
            if done and receiver is not None:
                receiver.frames_received(memoryview(batch)[:done])
            if done < len(batch) and not self._lost:
                self._lose(ProtocolError(f"a batch of {len(batch)} bytes is whole frames only up to byte {done}"))
            delivered = True
        except ProtocolError as error:
            self._lose(error)
        finally:
            if not delivered:  # the defect goes to the loop's handler, and the connection ends as well
                self._lose(ConnectionLost("the loopback connection's receiver failed", maybe_executed=True))

    # ---- the peer's arena

    def map(self, offset: int, nbytes: int, *, writable: bool = False) -> Mapped:
        """Return `nbytes` of the other end's arena at `offset`, which its owner keeps: the arena is in this process.

        Raises:
            ProtocolError: the range does not lie inside the arena.
            LookupError: `writable` is True, and `open_writable` has not succeeded yet.
        """
        self._check_range(offset, nbytes)
        address, size, owner = self._peer_arena
        if writable and not self._writable_open:
            raise LookupError("the arena is not writable yet: await open_writable()")
        return Mapped(address + offset, nbytes, owner, owner) if size else NOWHERE

    async def open_writable(self) -> None:
        """Allow `map` with write access. Idempotent.

        Raises:
            ConnectionLost: the connection is closed.
        """
        if self._lost:
            raise ConnectionLost("the loopback connection is closed")
        self._writable_open = True

    async def pull(self, region: RemoteRegion, address: int, keep: object, commit: Commit | None = None) -> None:
        """Copy the bytes some turns of the loop later, as a transport between hosts does.

        Raises:
            ConnectionLost: the connection is closed, or closes meanwhile. Nothing is written after that.
            ProtocolError: the range does not lie inside the arena.
        """
        source = self.map(region.offset, region.nbytes)
        for _ in range(1 + self._rng.randint(0, self._faults.delay_turns)):
            await asyncio.sleep(0)
        if self._lost:
            raise ConnectionLost("the loopback connection was closed", maybe_executed=True)
        if commit is not None:  # here, as the copy is made here, too
            commit(0, region.nbytes)
        ctypes.memmove(address, source.address, region.nbytes)
        del keep

    # ---- ending

    async def aclose(self) -> None:
        """Send all committed frames, then close. Idempotent."""
        if not self._lost:
            self._closing = True
            self._out.refuse("the loopback connection is closing")
            self._out.flush()
            self._end(None)
        await self._gone.wait()

    def abort(self) -> None:
        """Close at once and drop all frames that were not flushed. Idempotent. In a forked child it reports nothing."""
        if os.getpid() != self._process:
            self._lost = True
            self._out.refuse("this connection belongs to the process that forked this one")
        elif threading.get_ident() == self._thread:
            self._end(None)
        else:
            self._loop.call_soon_threadsafe(self._end, None)

    def _end(self, cause: Exception | None) -> None:
        self._transmit()
        self._lose(cause)

    def _lose(self, cause: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._out.close("the loopback connection is closed")
        self._wire.clear()
        self._incoming.clear()
        self._other.arrive(
            ConnectionLost(f"process {self._other.peer.pid} closed the connection", maybe_executed=True), 0
        )
        self._report_later(cause)
