"""The send buffer against a fake socket that takes any number of bytes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from zcactor.errors import ConnectionLost
from zcactor.transport.stream.send_buffer import CHUNK_NBYTES, SendBuffer

LIMIT = CHUNK_NBYTES // 4


class FakeSocket:
    """A socket that takes up to `room` bytes, and then blocks."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.taken = bytearray()
        self.sends = 0
        self.error: OSError | None = None

    def send(self, view: memoryview) -> int:
        self.sends += 1
        if self.error is not None:
            raise self.error
        if self.room == 0:
            raise BlockingIOError
        count = len(view) if self.room is None else min(len(view), self.room)
        self.taken += view[:count]
        if self.room is not None:
            self.room -= count
        return count


def write(buffer: SendBuffer, data: bytes) -> None:
    into, offset = buffer.reserve(len(data))
    into[offset : offset + len(data)] = data
    buffer.commit(len(data))


def test_one_send_for_a_batch_and_the_same_memory_again() -> None:
    sock = FakeSocket()
    buffer = SendBuffer(LIMIT, sock.send)
    first = buffer.reserve(3)
    write(buffer, b"abc")
    write(buffer, b"def")
    assert buffer.pending
    assert buffer.flush() is False
    assert (bytes(sock.taken), sock.sends, buffer.pending) == (b"abcdef", 1, False)
    again = buffer.reserve(3)
    assert again[0] is first[0]
    assert again[1] == first[1] == 0


def test_chunks_are_as_large_as_asked_for_and_hold_a_frame() -> None:
    assert len(SendBuffer(100, FakeSocket().send, 4096).reserve(1)[0]) == 4096
    assert len(SendBuffer(5000, FakeSocket().send, 4096).reserve(1)[0]) == 5000


def test_flush_of_nothing_sends_nothing() -> None:
    sock = FakeSocket()
    buffer = SendBuffer(LIMIT, sock.send)
    assert buffer.flush() is False
    assert sock.sends == 0


def test_blocked_writer_does_not_overtake() -> None:
    sock = FakeSocket(room=2)
    buffer = SendBuffer(LIMIT, sock.send)
    write(buffer, b"abc")
    assert buffer.flush() is True
    write(buffer, b"def")
    sends = sock.sends
    assert buffer.flush() is False, "already being resumed"
    assert sock.sends == sends
    sock.room = None
    assert buffer.resume() is True
    assert bytes(sock.taken) == b"abcdef"
    write(buffer, b"g")
    assert buffer.flush() is False
    assert bytes(sock.taken) == b"abcdefg"


def test_reservation_survives_resuming() -> None:
    sock = FakeSocket(room=0)
    buffer = SendBuffer(LIMIT, sock.send)
    write(buffer, b"abc")
    assert buffer.flush() is True
    into, offset = buffer.reserve(3)
    sock.room = None
    assert buffer.resume() is True
    into[offset : offset + 3] = b"def"
    buffer.commit(3)
    buffer.flush()
    assert bytes(sock.taken) == b"abcdef"


def test_limits() -> None:
    buffer = SendBuffer(LIMIT, FakeSocket().send)
    buffer.reserve(LIMIT)
    with pytest.raises(ValueError, match=str(LIMIT)):
        buffer.reserve(LIMIT + 1)


def test_refuse_keeps_what_is_committed() -> None:
    sock = FakeSocket()
    buffer = SendBuffer(LIMIT, sock.send)
    write(buffer, b"last")
    buffer.refuse("closing")
    with pytest.raises(ConnectionLost, match="closing"):
        buffer.reserve(1)
    buffer.flush()
    assert bytes(sock.taken) == b"last"


def test_close_drops_it() -> None:
    sock = FakeSocket()
    buffer = SendBuffer(LIMIT, sock.send)
    write(buffer, b"dropped")
    buffer.refuse("closing")
    buffer.close("closed")
    assert not buffer.pending
    assert buffer.flush() is False
    assert sock.sends == 0
    with pytest.raises(ConnectionLost, match="closing"):
        buffer.reserve(1)


def test_errors_pass_through() -> None:
    sock = FakeSocket(room=0)
    buffer = SendBuffer(LIMIT, sock.send)
    write(buffer, b"x")
    assert buffer.flush() is True
    sock.error = BrokenPipeError()
    with pytest.raises(BrokenPipeError):
        buffer.resume()


def test_writer_in_one_thread_resumer_in_another() -> None:
    """The bytes stay in order when both sides run as fast as they can."""
    lock, writable = threading.Lock(), threading.Event()
    sock = FakeSocket(room=0)

    def refill() -> None:
        with lock:
            sock.room = 700

    buffer = SendBuffer(LIMIT, sock.send)
    expected = b"".join(bytes((i % 256,)) * (i % 300 + 1) for i in range(3000))
    done = threading.Event()

    def resumer() -> None:
        while not (done.is_set() and not buffer.pending):
            if writable.wait(0.01):
                writable.clear()
                while not buffer.resume():
                    refill()

    thread = threading.Thread(target=resumer)
    thread.start()
    for i in range(3000):
        write(buffer, bytes((i % 256,)) * (i % 300 + 1))
        if buffer.flush():
            writable.set()
    done.set()
    thread.join()
    assert bytes(sock.taken) == expected


class AgainstAModel(RuleBasedStateMachine):
    """The bytes come out in order and once, for any sizes that the socket takes at any time."""

    @initialize()
    def begin(self) -> None:
        self.sock = FakeSocket()
        self.buffer = SendBuffer(LIMIT, self.sock.send)
        self.committed = bytearray()
        self.counter = 0
        self.blocked = False

    @rule(nbytes=st.integers(1, LIMIT))
    def write(self, nbytes: int) -> None:
        self.counter = (self.counter + 1) % 251
        data = bytes((self.counter,)) * nbytes
        write(self.buffer, data)
        self.committed += data

    @rule(nbytes=st.integers(1, LIMIT))
    def reserve_in_vain(self, nbytes: int) -> None:
        into, offset = self.buffer.reserve(nbytes)
        into[offset : offset + nbytes] = b"\xff" * nbytes

    @rule(room=st.none() | st.integers(0, 3 * CHUNK_NBYTES))
    def flush(self, room: int | None) -> None:
        self.sock.room = room
        newly = self.buffer.flush()
        assert not (newly and self.blocked)
        self.blocked = self.blocked or newly

    @rule(room=st.none() | st.integers(0, 3 * CHUNK_NBYTES))
    def resume(self, room: int | None) -> None:
        if self.blocked:
            self.sock.room = room
            self.blocked = not self.buffer.resume()

    @invariant()
    def in_order(self) -> None:
        if hasattr(self, "sock"):
            assert self.committed.startswith(self.sock.taken)
            assert self.buffer.pending == (len(self.sock.taken) < len(self.committed))


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
