"""The suite that every `Connection` and its `Endpoint` must pass.

A transport joins by a subclass of `MappingSuite` or `PullingSuite`, whichever its connections' `maps` says, that has
the fixture ``sides``; nothing else is needed.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import struct
import threading
import weakref
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport import LENGTH_PREFIX, Connection, Endpoint, RemoteRegion

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
        """Where the arena lies in this process; pulls go to places inside it, as a device may reach no other."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.arena))


@dataclass
class Pair:
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


async def connect(left: Side, right: Side) -> Pair:
    """A connection from `left` to `right`, whose endpoints are not started yet."""
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    await left.endpoint.start(accepted.put_nowait)
    await right.endpoint.start(accepted.put_nowait)
    connection = await left.endpoint.connect(right.endpoint.address)
    return Pair(connection, await accepted.get(), (left, right), accepted)


async def turns(count: int = 5) -> None:
    """Let the loop go round a few times, for what must not happen in them."""
    for _ in range(count):
        await asyncio.sleep(0)


async def finish(pair: Pair) -> None:
    """Close everything."""
    for connection in (pair.left, pair.right):
        connection.abort()
    for side in pair.sides:
        await side.endpoint.aclose()
    await turns()


class ConnectionSuite:
    """What `MappingSuite` and `PullingSuite` share: everything about frames.

    Whoever joins them has a fixture ``sides``, which gives two `Side` objects, as a tuple, that can reach each other
    and are not started; closing their endpoints is the suite's.
    """

    @pytest.fixture
    async def pair(self, sides: tuple[Side, Side]) -> AsyncIterator[Pair]:
        """A connection whose ends are not started."""
        pair = await connect(*sides)
        yield pair
        await finish(pair)

    @pytest.fixture
    def left(self, pair: Pair) -> Recorder:
        """What the left end receives; starts it."""
        recorder = Recorder()
        pair.left.start(recorder)
        return recorder

    @pytest.fixture
    def right(self, pair: Pair) -> Recorder:
        """What the right end receives; starts it."""
        recorder = Recorder()
        pair.right.start(recorder)
        return recorder

    # ---- what the ends say about themselves

    async def test_is_a_connection(self, pair: Pair) -> None:
        assert isinstance(pair.left, Connection)
        assert isinstance(pair.right, Connection)

    async def test_ends_agree_and_know_each_other(self, pair: Pair) -> None:
        left, right = pair.left, pair.right
        assert left.kind == right.kind == pair.sides[0].endpoint.kind
        assert left.recv_depth == right.recv_depth > 0
        assert left.eager_limit == right.eager_limit > 0
        assert left.max_frame == right.max_frame >= max(32 << 10, left.eager_limit)
        assert (left.peer.process, right.peer.process) == (pair.sides[1].process, pair.sides[0].process)
        assert left.peer.arena_nbytes == right.peer.arena_nbytes == ARENA_NBYTES

    async def test_connect_to_nobody(self, pair: Pair) -> None:
        with pytest.raises(ConnectionLost):
            await pair.sides[0].endpoint.connect("00" * 16)

    async def test_viable(self, sides: tuple[Side, Side]) -> None:
        assert sides[0].endpoint.viability() is None

    async def test_endpoint_aclose_is_idempotent_and_keeps_connections(
        self, pair: Pair, left: Recorder, right: Recorder
    ) -> None:
        endpoint = pair.sides[1].endpoint
        await endpoint.aclose()
        await endpoint.aclose()
        with pytest.raises(ConnectionLost):
            await pair.sides[0].endpoint.connect(endpoint.address)
        send(pair.left, [b"still here"])
        assert await right.wait_frames(1) == [b"still here"]

    async def test_start_twice(self, pair: Pair, left: Recorder) -> None:
        with pytest.raises(RuntimeError):
            pair.left.start(left)

    # ---- frames

    async def test_order_both_ways(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        count = 10_000
        frames = [struct.pack("<I", i) * (i % 40 + 1) for i in range(count)]
        position, size = 0, 1
        while position < count:
            send(pair.left, frames[position : position + size])
            send(pair.right, frames[position : position + size])
            position, size = position + size, size % 97 + 1
            await asyncio.sleep(0)
        assert await left.wait_frames(count) == frames
        assert await right.wait_frames(count) == frames

    async def test_batch_arrives_whole_and_later(self, pair: Pair, right: Recorder) -> None:
        send(pair.left, [b"a", b"bc", b""])
        assert right.frames == [], "delivered inside flush"
        assert await right.wait_frames(3) == [b"a", b"bc", b""]
        assert right.batches == 1

    async def test_nothing_goes_without_flush(self, pair: Pair, right: Recorder) -> None:
        put(pair.left, b"held")
        await turns()
        assert right.frames == []
        pair.left.flush()
        pair.left.flush()
        assert await right.wait_frames(1) == [b"held"]

    async def test_every_size(self, pair: Pair, right: Recorder) -> None:
        largest = pair.left.max_frame
        sizes = [*range(1, 1500), *range(1500, largest - 64, 997), *range(largest - 64, largest + 1)]
        pattern = bytes(range(256)) * (largest // 256 + 2)
        sent = [pattern[size % 256 : size % 256 + size] for size in sizes]
        for frame in sent:
            send(pair.left, [frame])
            if len(frame) % 7 == 0:
                await asyncio.sleep(0)
        assert await right.wait_frames(len(sent)) == sent

    async def test_reserve_limit(self, pair: Pair, right: Recorder) -> None:
        limit = pair.left.max_frame + LENGTH_PREFIX
        buffer, offset = pair.left.reserve(limit)
        assert len(buffer) - offset >= limit
        with pytest.raises(ValueError, match=str(limit)):
            pair.left.reserve(limit + 1)
        send(pair.left, [b"the connection is none the worse"])
        await right.wait_frames(1)

    async def test_reservation_that_is_not_committed(self, pair: Pair, right: Recorder) -> None:
        buffer, offset = pair.left.reserve(100)
        buffer[offset : offset + 100] = b"?" * 100
        send(pair.left, [b"instead"])
        assert await right.wait_frames(1) == [b"instead"]

    async def test_slow_receiver_gets_everything(self, pair: Pair, left: Recorder) -> None:
        frames = [bytes((i % 256,)) * pair.left.max_frame for i in range(300)]  # 10 MB, more than any socket buffers
        for frame in frames:
            send(pair.left, [frame])
            await asyncio.sleep(0)
        right = Recorder()
        pair.right.start(right)
        send(pair.right, [b"the other way is open"])
        await left.wait_frames(1)
        assert await right.wait_frames(len(frames)) == frames
        send(pair.left, [b"and after"])
        assert (await right.wait_frames(len(frames) + 1))[-1] == b"and after"

    async def test_cancelled_task_leaves_its_frame(self, pair: Pair, right: Recorder) -> None:
        async def writer() -> None:
            put(pair.left, b"written by a task that is no more")
            await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(writer())
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        send(pair.left, [b"next"])
        assert await right.wait_frames(2) == [b"written by a task that is no more", b"next"]

    async def test_flush_from_other_threads(self, pair: Pair, right: Recorder) -> None:
        lock, threads, count = threading.Lock(), 3, 400
        padding = b"." * 4000  # 5 MB in all, so that the threads meet a full socket as well

        def sender(name: int) -> None:
            for i in range(count):
                with lock:
                    send(pair.left, [struct.pack("<II", name, i) + padding])

        await asyncio.gather(*(asyncio.to_thread(sender, name) for name in range(threads)))
        frames = await right.wait_frames(threads * count)
        received = [struct.unpack_from("<II", frame) for frame in frames]
        for name in range(threads):
            assert [i for sender_name, i in received if sender_name == name] == list(range(count))

    # ---- ends

    async def test_peer_aborts(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        pair.right.abort()
        assert isinstance(await left.wait_lost(), ConnectionLost)
        assert await right.wait_lost() is None or isinstance(right.lost[0], ConnectionLost)
        with pytest.raises(ConnectionLost):
            pair.left.reserve(10)
        pair.left.flush()
        await turns()
        assert (len(left.lost), len(right.lost)) == (1, 1)

    async def test_what_was_flushed_before_abort_may_arrive_but_never_half(
        self, pair: Pair, left: Recorder, right: Recorder
    ) -> None:
        send(pair.left, [b"x" * 1000] * 50)
        pair.left.abort()
        await right.wait_lost()
        assert all(frame == b"x" * 1000 for frame in right.frames)

    async def test_aclose_delivers_then_ends(self, pair: Pair, left: Recorder) -> None:
        frames = [struct.pack("<I", i) * 2000 for i in range(400)]  # 3 MB
        for frame in frames:
            put(pair.left, frame)
        closing = asyncio.create_task(pair.left.aclose())
        await turns()
        with pytest.raises(ConnectionLost):
            pair.left.reserve(10)
        right = Recorder()
        pair.right.start(right)
        assert await right.wait_frames(len(frames)) == frames
        assert isinstance(await right.wait_lost(), ConnectionLost)
        await closing
        assert left.lost == [None]

    async def test_aclose_delivers_although_it_leaves_bytes_unread(
        self, pair: Pair, left: Recorder, right: Recorder
    ) -> None:
        send(pair.right, [b"never read"] * 10)
        frames = [b"y" * 1000] * 20
        send(pair.left, frames)
        await pair.left.aclose()
        await right.wait_lost()
        assert right.frames == frames

    async def test_aclose_is_idempotent(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        await asyncio.gather(pair.left.aclose(), pair.left.aclose())
        await pair.left.aclose()
        pair.left.abort()
        await right.wait_lost()
        await pair.right.aclose()
        await turns()
        assert left.lost == [None]
        assert len(right.lost) == 1

    async def test_aclose_before_start(self, pair: Pair) -> None:
        await pair.left.aclose()
        with pytest.raises(ConnectionLost):
            pair.left.reserve(1)

    async def test_cancelled_aclose_closes(self, pair: Pair, left: Recorder) -> None:
        for _ in range(300):
            put(pair.left, b"z" * pair.left.max_frame)
        closing = asyncio.create_task(pair.left.aclose())
        await turns()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert await left.wait_lost() is None
        right = Recorder()
        pair.right.start(right)
        await right.wait_lost()
        assert all(frame == b"z" * pair.left.max_frame for frame in right.frames)

    async def test_abort_drops_and_ends_once(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        put(pair.left, b"never flushed")
        pair.left.abort()
        pair.left.abort()
        await pair.left.aclose()
        assert isinstance(await right.wait_lost(), ConnectionLost)
        await turns()
        assert right.frames == []
        assert left.lost == [None]
        assert len(right.lost) == 1

    async def test_a_frame_that_is_committed_behind_the_end_is_refused(self, pair: Pair, left: Recorder) -> None:
        """A thread is encoding it while the connection ends on the loop's: its caller learns that it never leaves."""
        buffer, offset = pair.left.reserve(20)
        pair.left.abort()
        buffer[offset : offset + 20] = bytes(20)
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                pair.left.commit(20)
        pair.left.flush()
        assert await left.wait_lost() is None

    async def test_last_words_before_a_failing_send(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        send(pair.right, [b"goodbye"])
        pair.right.abort()
        send(pair.left, [b"to nobody"])
        assert isinstance(await left.wait_lost(), ConnectionLost)
        assert left.frames == [b"goodbye"]
        await turns()
        assert len(left.lost) == 1

    async def test_receiver_refuses_a_frame(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        other = await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)
        other_left, other_right = Recorder(), Recorder()
        other.start(other_left)
        (await pair.accepted.get()).start(other_right)
        right.raises = ProtocolError("no such frame")
        send(pair.left, [b"bad"])
        assert await right.wait_lost() is right.raises
        assert isinstance(await left.wait_lost(), ConnectionLost)
        await turns()
        assert (len(left.lost), len(right.lost), other_left.lost) == (1, 1, [])
        send(other, [b"untouched"])
        await other_right.wait_frames(1)
        await other.aclose()
        await other_right.wait_lost()

    async def test_receiver_with_a_defect(self, pair: Pair, left: Recorder, right: Recorder) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
        right.raises = KeyError("a defect")
        send(pair.left, [b"innocent"])
        assert isinstance(await right.wait_lost(), ConnectionLost)
        await left.wait_lost()
        assert [context["exception"] for context in reported] == [right.raises]

    @pytest.mark.parametrize("excess", [1, 2**32 - 1])
    async def test_prefix_beyond_the_limit(self, pair: Pair, left: Recorder, right: Recorder, excess: int) -> None:
        put(pair.left, b"good")
        buffer, offset = pair.left.reserve(LENGTH_PREFIX)
        struct.pack_into("<I", buffer, offset, min(pair.left.max_frame + excess, 2**32 - 1))
        pair.left.commit(LENGTH_PREFIX)
        pair.left.flush()
        assert isinstance(await right.wait_lost(), ProtocolError)
        assert right.frames == [b"good"]
        assert isinstance(await left.wait_lost(), ConnectionLost)

    async def test_closing_from_inside_the_receiver(self, pair: Pair, left: Recorder) -> None:
        class Leaver(Recorder):
            def frames_received(self, data: memoryview) -> None:
                super().frames_received(data)
                pair.right.abort()

        right = Leaver()
        pair.right.start(right)
        send(pair.left, [b"last"])
        await right.wait_lost()
        await left.wait_lost()
        assert right.frames == [b"last"]


class MappingSuite(ConnectionSuite):
    """For connections that map the peer's arena."""

    async def test_maps(self, pair: Pair) -> None:
        assert pair.left.maps and pair.right.maps

    async def test_map_reads_in_place(self, pair: Pair) -> None:
        arena = pair.sides[1].arena
        arena[100:105] = b"hello"
        address = pair.left.map(100, 5)
        assert ctypes.string_at(address, 5) == b"hello"
        arena[100:105] = b"later"
        assert ctypes.string_at(address, 5) == b"later"

    async def test_map_bounds(self, pair: Pair) -> None:
        base = pair.left.map(0, ARENA_NBYTES)
        assert base
        assert pair.left.map(0, 0) == base
        assert pair.left.map(ARENA_NBYTES - 1, 1) == base + ARENA_NBYTES - 1
        assert pair.left.map(ARENA_NBYTES, 0) == base + ARENA_NBYTES
        wrong = [(0, ARENA_NBYTES + 1), (1, ARENA_NBYTES), (ARENA_NBYTES, 1), (ARENA_NBYTES + 1, 0), (-1, 1), (0, -1)]
        wrong += [(2**64 - 1, 1), (2**64 - 1, 2**64 - 1), (1, 2**64 - 1), (2**64 - 8, 16)]
        for offset, nbytes in wrong:
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes)
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes, writable=True)

    async def test_map_writable(self, pair: Pair) -> None:
        with pytest.raises(LookupError):
            pair.left.map(0, 10, writable=True)
        await asyncio.gather(pair.left.open_writable(), pair.left.open_writable())
        await pair.left.open_writable()
        ctypes.memmove(pair.left.map(8, 5, writable=True), b"moved", 5)
        assert bytes(pair.sides[1].arena[8:13]) == b"moved"
        with pytest.raises(LookupError):
            pair.right.map(0, 10, writable=True)
        await pair.right.open_writable()
        ctypes.memmove(pair.right.map(0, 4, writable=True), b"back", 4)
        assert bytes(pair.sides[0].arena[:4]) == b"back"

    async def test_open_writable_when_closed(self, pair: Pair) -> None:
        await pair.left.aclose()
        with pytest.raises(ConnectionLost):
            await pair.left.open_writable()


class Keeper:
    """What a pull is given to hold, which a weak reference can be made to."""


def region(offset: int, nbytes: int) -> RemoteRegion:
    """Bytes of the peer's arena, of an object that is all of it."""
    return RemoteRegion(1, offset, nbytes)


class PullingSuite(ConnectionSuite):
    """For connections through which the peer's bytes are pulled."""

    @pytest.fixture
    def source(self, pair: Pair) -> bytes:
        """What the right side's arena holds, other bytes everywhere."""
        data = random.Random(1).randbytes(ARENA_NBYTES)
        pair.sides[1].arena[:] = data
        return data

    async def test_pulls(self, pair: Pair) -> None:
        assert not pair.left.maps and not pair.right.maps
        assert pair.left.mapping is pair.left.writable_mapping is None

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 1), (1, 1), (ARENA_NBYTES - 1, 1), (4095, 2), (64, 4096), (3, 20_001), (0, ARENA_NBYTES)],
    )
    async def test_bytes_arrive_exactly(self, pair: Pair, source: bytes, offset: int, nbytes: int) -> None:
        side = pair.sides[0]
        start = min(offset // 2, ARENA_NBYTES - nbytes)  # other places than at the owner
        side.arena[:] = b"\xee" * ARENA_NBYTES
        await pair.left.pull(region(offset, nbytes), side.address + start, side)
        expected = b"\xee" * start + source[offset : offset + nbytes] + b"\xee" * (ARENA_NBYTES - start - nbytes)
        assert bytes(side.arena) == expected

    async def test_pulls_both_ways(self, pair: Pair) -> None:
        for side, byte in zip(pair.sides, b"lr", strict=True):
            side.arena[:100] = bytes((byte,)) * 100
        left, right = pair.sides
        await asyncio.gather(
            pair.left.pull(region(0, 100), left.address + 1000, left),
            pair.right.pull(region(0, 100), right.address + 1000, right),
        )
        assert bytes(left.arena[1000:1100]) == b"r" * 100
        assert bytes(right.arena[1000:1100]) == b"l" * 100

    async def test_later_bytes(self, pair: Pair) -> None:
        left, right = pair.sides
        for word in (b"first", b"later"):
            right.arena[100:105] = word
            await pair.left.pull(region(100, 5), left.address, left)
            assert bytes(left.arena[:5]) == word

    async def test_many_at_once(self, pair: Pair, source: bytes) -> None:
        side, count = pair.sides[0], 64
        nbytes = ARENA_NBYTES // count
        order = random.Random(2).sample(range(count), count)
        await asyncio.gather(
            *(
                pair.left.pull(region(there * nbytes, nbytes), side.address + here * nbytes, side)
                for here, there in enumerate(order)
            )
        )
        assert bytes(side.arena) == b"".join(source[there * nbytes : (there + 1) * nbytes] for there in order)

    async def test_frames_go_on_beside_pulls(self, pair: Pair, source: bytes, left: Recorder, right: Recorder) -> None:
        side, count = pair.sides[0], 50
        for i in range(count):
            send(pair.right, [b"%d" % i])
            send(pair.left, [b"%d" % i])
            await pair.left.pull(region(i, 1000), side.address, side)
            assert bytes(side.arena[:1000]) == source[i : i + 1000]
        assert await left.wait_frames(count) == await right.wait_frames(count) == [b"%d" % i for i in range(count)]

    async def test_pull_bounds(self, pair: Pair, source: bytes) -> None:
        side = pair.sides[0]
        wrong = [(0, ARENA_NBYTES + 1), (1, ARENA_NBYTES), (ARENA_NBYTES, 1), (-1, 1), (2**64 - 1, 1), (2**64 - 8, 16)]
        for offset, nbytes in wrong:
            with pytest.raises(ProtocolError):
                await pair.left.pull(region(offset, nbytes), side.address, side)
        await pair.left.pull(region(0, 10), side.address, side)
        assert bytes(side.arena[:10]) == source[:10]

    async def test_map_gives_nothing_beyond_bounds(self, pair: Pair) -> None:
        for offset, nbytes in [(0, ARENA_NBYTES + 1), (ARENA_NBYTES, 1), (-1, 1), (0, -1), (2**64 - 1, 1)]:
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes)

    async def test_pull_from_a_closed_connection(self, pair: Pair, left: Recorder) -> None:
        await pair.left.aclose()
        side = pair.sides[0]
        with pytest.raises(ConnectionLost):
            await pair.left.pull(region(0, 10), side.address, side)

    async def test_keep_is_let_go_of(self, pair: Pair, source: bytes) -> None:
        keeper = Keeper()
        held = weakref.ref(keeper)
        side = pair.sides[0]
        await pair.left.pull(region(0, 10), side.address, keeper)
        del keeper
        while held() is not None:
            await asyncio.sleep(0)

    @pytest.mark.parametrize("waited", [0, 1, 2, 5, 20])
    async def test_cancelled_pull_writes_nothing_once_it_let_go(self, pair: Pair, source: bytes, waited: int) -> None:
        side, keeper = pair.sides[0], Keeper()
        held = weakref.ref(keeper)
        pull = asyncio.create_task(pair.left.pull(region(0, ARENA_NBYTES), side.address, keeper))
        del keeper
        await turns(waited)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        del pull
        while held() is not None:
            await asyncio.sleep(0)
        side.arena[:] = bytes(ARENA_NBYTES)
        await turns(50)
        assert not any(side.arena)
        await pair.left.pull(region(0, ARENA_NBYTES), side.address, side)
        assert bytes(side.arena) == source

    @pytest.mark.parametrize("waited", [0, 1, 2, 5, 20])
    @pytest.mark.parametrize("end", ["left", "right"])
    async def test_connection_lost_during_a_pull(
        self, pair: Pair, source: bytes, left: Recorder, right: Recorder, waited: int, end: str
    ) -> None:
        side, keeper = pair.sides[0], Keeper()
        held = weakref.ref(keeper)
        pull = asyncio.create_task(pair.left.pull(region(0, ARENA_NBYTES), side.address, keeper))
        del keeper
        await turns(waited)
        (pair.left if end == "left" else pair.right).abort()
        (outcome,) = await asyncio.gather(pull, return_exceptions=True)
        if outcome is None:
            assert bytes(side.arena) == source
        else:
            assert isinstance(outcome, ConnectionLost)
        await left.wait_lost()
        with pytest.raises(ConnectionLost):
            await pair.left.pull(region(0, 10), side.address, side)
        del pull, outcome
        while held() is not None:
            await asyncio.sleep(0)
