"""The two ends of a connection as the suites see them, and the helpers that send by one and receive at the other."""

from __future__ import annotations

import asyncio
import ctypes
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from zcactor.transport import LENGTH_PREFIX, RemoteRegion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.transport import Connection, Endpoint

__all__ = [
    "ARENA_NBYTES", "ConnectedPair", "PullKeeper", "Recorder", "Sender", "Side", "connect", "finish", "put", "region",
    "send", "turns",
]  # fmt: skip

ARENA_NBYTES = 1 << 16
"""Bytes of the arena of each side."""


@dataclass
class Side:
    """One endpoint, not started, and the owner's own view of its arena of `ARENA_NBYTES` bytes."""

    endpoint: Endpoint
    process: bytes
    arena: bytearray | memoryview

    @property
    def address(self) -> int:
        """The address of the arena in this process; pulls go to places inside it, as a device may reach no other."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.arena))


@dataclass
class ConnectedPair:
    """Two ends of one connection; `left` connected to `right`."""

    left: Connection
    right: Connection
    sides: tuple[Side, Side]
    accepted: asyncio.Queue[Connection]
    """The accepting ends of further connections."""


@dataclass
class Recorder:
    """A receiver that keeps everything it is told."""

    frames: list[bytes] = field(default_factory=list)
    lost: list[Exception | None] = field(default_factory=list)
    batches: int = 0
    raises: Exception | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def frames_received(self, data: memoryview) -> None:
        """Cut the batch into frames, which must come out even."""
        if self.raises is not None:
            raise self.raises
        self.batches += 1
        position = 0
        while position < len(data):
            (length,) = struct.unpack_from("<I", data, position)
            frame = bytes(data[position + LENGTH_PREFIX : position + LENGTH_PREFIX + length])
            assert len(frame) == length, "a batch ended inside a frame"
            self.frames.append(frame)
            position += LENGTH_PREFIX + length
        self._changed.set()

    def connection_lost(self, cause: Exception | None) -> None:
        """Note the end."""
        self.lost.append(cause)
        self._changed.set()

    async def wait_frames(self, count: int) -> list[bytes]:
        """The frames, once there are `count` of them."""
        while len(self.frames) < count:
            assert not self.lost, f"lost after {len(self.frames)} of {count} frames: {self.lost}"
            self._changed.clear()
            await self._changed.wait()
        return self.frames

    async def wait_lost(self) -> Exception | None:
        """The cause of the end, once it has come."""
        while not self.lost:
            self._changed.clear()
            await self._changed.wait()
        return self.lost[0]


class Sender(Protocol):
    """The part of a connection that sends."""

    def reserve(self, nbytes: int) -> tuple[bytearray | memoryview, int]: ...
    def commit(self, nbytes: int) -> None: ...
    def flush(self) -> None: ...


def put(connection: Sender, frame: bytes) -> None:
    """Reserve, write and commit one frame."""
    nbytes = LENGTH_PREFIX + len(frame)
    buffer, offset = connection.reserve(nbytes)
    struct.pack_into("<I", buffer, offset, len(frame))
    buffer[offset + LENGTH_PREFIX : offset + nbytes] = frame
    connection.commit(nbytes)


def send(connection: Sender, frames: Iterable[bytes]) -> None:
    """Send `frames` as one batch."""
    for frame in frames:
        put(connection, frame)
    connection.flush()


async def connect(left: Side, right: Side) -> ConnectedPair:
    """A connection from `left` to `right`, whose endpoints are not started yet."""
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    await left.endpoint.start(accepted.put_nowait)
    await right.endpoint.start(accepted.put_nowait)
    connection = await left.endpoint.connect(right.endpoint.address)
    return ConnectedPair(connection, await accepted.get(), (left, right), accepted)


async def turns(count: int = 5) -> None:
    """Let the loop go round a few times, for what must not happen in them."""
    for _ in range(count):
        await asyncio.sleep(0)


async def finish(pair: ConnectedPair) -> None:
    """Close everything."""
    for connection in (pair.left, pair.right):
        connection.abort()
    for side in pair.sides:
        await side.endpoint.aclose()
    await turns()


class PullKeeper:
    """An object that a pull holds, and that a weak reference can be made to."""


def region(offset: int, nbytes: int) -> RemoteRegion:
    """Bytes of the peer's arena, of an object that is all of it."""
    return RemoteRegion(1, offset, nbytes)
