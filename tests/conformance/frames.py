"""The part of the suite of connections that is the same for all of them: everything about frames, and about ends."""

from __future__ import annotations

import asyncio
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.conformance.ends import (
    ARENA_NBYTES,
    ConnectedPair,
    Recorder,
    Side,
    connect,
    finish,
    put,
    send,
    turns,
)
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport import LENGTH_PREFIX, Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["ConnectionSuite"]


class ConnectionSuite:
    """The tests of frames, which `MappingSuite` and `PullingSuite` share.

    A subclass has a fixture ``sides``, which gives two `Side` objects, as a tuple, that can reach each other
    and are not started; closing their endpoints is the suite's.
    """

    @pytest.fixture
    async def pair(self, sides: tuple[Side, Side]) -> AsyncIterator[ConnectedPair]:
        """A connection whose ends are not started."""
        pair = await connect(*sides)
        yield pair
        await finish(pair)

    @pytest.fixture
    def left(self, pair: ConnectedPair) -> Recorder:
        """Start the left end. Returns the record of the frames that it receives."""
        recorder = Recorder()
        pair.left.start(recorder)
        return recorder

    @pytest.fixture
    def right(self, pair: ConnectedPair) -> Recorder:
        """Start the right end. Returns the record of the frames that it receives."""
        recorder = Recorder()
        pair.right.start(recorder)
        return recorder

    # ---- what the ends say about themselves

    async def test_is_a_connection(self, pair: ConnectedPair) -> None:
        assert isinstance(pair.left, Connection)
        assert isinstance(pair.right, Connection)

    async def test_ends_agree_and_know_each_other(self, pair: ConnectedPair) -> None:
        left, right = pair.left, pair.right
        assert left.kind == right.kind == pair.sides[0].endpoint.kind
        assert left.recv_depth == right.recv_depth > 0
        assert left.eager_limit == right.eager_limit > 0
        assert left.max_frame == right.max_frame >= max(32 << 10, left.eager_limit)
        assert (left.peer.process, right.peer.process) == (pair.sides[1].process, pair.sides[0].process)
        assert left.peer.arena_nbytes == right.peer.arena_nbytes == ARENA_NBYTES

    async def test_connect_to_nobody(self, pair: ConnectedPair) -> None:
        with pytest.raises(ConnectionLost):
            await pair.sides[0].endpoint.connect("00" * 16)

    async def test_viable(self, sides: tuple[Side, Side]) -> None:
        assert sides[0].endpoint.viability() is None

    async def test_endpoint_aclose_is_idempotent_and_keeps_connections(
        self, pair: ConnectedPair, left: Recorder, right: Recorder
    ) -> None:
        endpoint = pair.sides[1].endpoint
        await endpoint.aclose()
        await endpoint.aclose()
        with pytest.raises(ConnectionLost):
            await pair.sides[0].endpoint.connect(endpoint.address)
        send(pair.left, [b"still here"])
        assert await right.wait_frames(1) == [b"still here"]

    async def test_start_twice(self, pair: ConnectedPair, left: Recorder) -> None:
        with pytest.raises(RuntimeError):
            pair.left.start(left)

    # ---- frames

    async def test_order_both_ways(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
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

    async def test_batch_arrives_whole_and_later(self, pair: ConnectedPair, right: Recorder) -> None:
        send(pair.left, [b"a", b"bc", b""])
        assert right.frames == [], "delivered inside flush"
        assert await right.wait_frames(3) == [b"a", b"bc", b""]
        assert right.batches == 1

    async def test_nothing_goes_without_flush(self, pair: ConnectedPair, right: Recorder) -> None:
        put(pair.left, b"held")
        await turns()
        assert right.frames == []
        pair.left.flush()
        pair.left.flush()
        assert await right.wait_frames(1) == [b"held"]

    async def test_every_size(self, pair: ConnectedPair, right: Recorder) -> None:
        largest = pair.left.max_frame
        sizes = [*range(1, 1500), *range(1500, largest - 64, 997), *range(largest - 64, largest + 1)]
        pattern = bytes(range(256)) * (largest // 256 + 2)
        sent = [pattern[size % 256 : size % 256 + size] for size in sizes]
        for frame in sent:
            send(pair.left, [frame])
            if len(frame) % 7 == 0:
                await asyncio.sleep(0)
        assert await right.wait_frames(len(sent)) == sent

    async def test_reserve_limit(self, pair: ConnectedPair, right: Recorder) -> None:
        limit = pair.left.max_frame + LENGTH_PREFIX
        buffer, offset = pair.left.reserve(limit)
        assert len(buffer) - offset >= limit
        with pytest.raises(ValueError, match=str(limit)):
            pair.left.reserve(limit + 1)
        send(pair.left, [b"the connection is none the worse"])
        await right.wait_frames(1)

    async def test_reservation_that_is_not_committed(self, pair: ConnectedPair, right: Recorder) -> None:
        buffer, offset = pair.left.reserve(100)
        buffer[offset : offset + 100] = b"?" * 100
        send(pair.left, [b"instead"])
        assert await right.wait_frames(1) == [b"instead"]

    async def test_slow_receiver_gets_everything(self, pair: ConnectedPair, left: Recorder) -> None:
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

    async def test_cancelled_task_leaves_its_frame(self, pair: ConnectedPair, right: Recorder) -> None:
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

    async def test_flush_from_other_threads(self, pair: ConnectedPair, right: Recorder) -> None:
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

    async def test_peer_aborts(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
        pair.right.abort()
        assert isinstance(await left.wait_lost(), ConnectionLost)
        assert await right.wait_lost() is None or isinstance(right.lost[0], ConnectionLost)
        with pytest.raises(ConnectionLost):
            pair.left.reserve(10)
        pair.left.flush()
        await turns()
        assert (len(left.lost), len(right.lost)) == (1, 1)

    async def test_what_was_flushed_before_abort_may_arrive_but_never_half(
        self, pair: ConnectedPair, left: Recorder, right: Recorder
    ) -> None:
        send(pair.left, [b"x" * 1000] * 50)
        pair.left.abort()
        await right.wait_lost()
        assert all(frame == b"x" * 1000 for frame in right.frames)

    async def test_aclose_delivers_then_ends(self, pair: ConnectedPair, left: Recorder) -> None:
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
        self, pair: ConnectedPair, left: Recorder, right: Recorder
    ) -> None:
        send(pair.right, [b"never read"] * 10)
        frames = [b"y" * 1000] * 20
        send(pair.left, frames)
        await pair.left.aclose()
        await right.wait_lost()
        assert right.frames == frames

    async def test_aclose_is_idempotent(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
        await asyncio.gather(pair.left.aclose(), pair.left.aclose())
        await pair.left.aclose()
        pair.left.abort()
        await right.wait_lost()
        await pair.right.aclose()
        await turns()
        assert left.lost == [None]
        assert len(right.lost) == 1

    async def test_aclose_before_start(self, pair: ConnectedPair) -> None:
        await pair.left.aclose()
        with pytest.raises(ConnectionLost):
            pair.left.reserve(1)

    async def test_cancelled_aclose_closes(self, pair: ConnectedPair, left: Recorder) -> None:
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

    async def test_abort_drops_and_ends_once(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
        put(pair.left, b"never flushed")
        pair.left.abort()
        pair.left.abort()
        await pair.left.aclose()
        assert isinstance(await right.wait_lost(), ConnectionLost)
        await turns()
        assert right.frames == []
        assert left.lost == [None]
        assert len(right.lost) == 1

    async def test_a_frame_that_is_committed_behind_the_end_is_refused(
        self, pair: ConnectedPair, left: Recorder
    ) -> None:
        """A thread is encoding it while the connection ends on the loop's: its caller learns that it never leaves."""
        buffer, offset = pair.left.reserve(20)
        pair.left.abort()
        buffer[offset : offset + 20] = bytes(20)
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                pair.left.commit(20)
        pair.left.flush()
        assert await left.wait_lost() is None

    async def test_last_words_before_a_failing_send(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
        send(pair.right, [b"goodbye"])
        pair.right.abort()
        send(pair.left, [b"to nobody"])
        assert isinstance(await left.wait_lost(), ConnectionLost)
        assert left.frames == [b"goodbye"]
        await turns()
        assert len(left.lost) == 1

    async def test_receiver_refuses_a_frame(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
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

    async def test_receiver_with_a_defect(self, pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
        right.raises = KeyError("a defect")
        send(pair.left, [b"innocent"])
        assert isinstance(await right.wait_lost(), ConnectionLost)
        await left.wait_lost()
        assert [context["exception"] for context in reported] == [right.raises]

    @pytest.mark.parametrize("excess", [1, 2**32 - 1])
    async def test_prefix_beyond_the_limit(
        self, pair: ConnectedPair, left: Recorder, right: Recorder, excess: int
    ) -> None:
        put(pair.left, b"good")
        buffer, offset = pair.left.reserve(LENGTH_PREFIX)
        struct.pack_into("<I", buffer, offset, min(pair.left.max_frame + excess, 2**32 - 1))
        pair.left.commit(LENGTH_PREFIX)
        pair.left.flush()
        assert isinstance(await right.wait_lost(), ProtocolError)
        assert right.frames == [b"good"]
        assert isinstance(await left.wait_lost(), ConnectionLost)

    async def test_closing_from_inside_the_receiver(self, pair: ConnectedPair, left: Recorder) -> None:
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
