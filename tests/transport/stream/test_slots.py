"""Frames in slots of ordinary memory leave whole and in order, however much of them is taken at a time."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from functools import partial
from types import CodeType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.steps import act_at_step
from zcactor.transport.stream.slots import NBYTES, Slots

TRACED = __file__, inspect.getfile(Slots)


def write(out: Any, frame: bytes) -> None:
    buffer, offset = out.reserve(len(frame))
    buffer[offset : offset + len(frame)] = frame
    out.commit(len(frame))


class Socket:
    """A socket that takes as many bytes as it has room for."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.taken: list[bytes] = []

    def send(self, view: memoryview) -> int:
        if not self.room:
            raise BlockingIOError
        nbytes = min(self.room, len(view))
        self.room -= nbytes
        self.taken.append(bytes(view[:nbytes]))
        return nbytes


def test_frames_leave_when_they_are_flushed() -> None:
    sock = Socket()
    out = Slots(5000, sock.send).buffer
    write(out, b"a" * 10)
    write(out, b"b" * 10)
    assert not sock.taken and out.pending
    assert out.flush() is False
    assert sock.taken == [b"a" * 10 + b"b" * 10] and not out.pending
    write(out, b"c" * 5000)
    write(out, b"d" * 5000)  # the first frame leaves no room for this one
    assert len(sock.taken) == 1
    assert out.flush() is False
    assert sock.taken[1:] == [b"c" * 5000, b"d" * 5000]
    with pytest.raises(ValueError, match="limit is 5000"):
        out.reserve(5001)


def test_the_largest_frame_fits_and_slots_are_used_again() -> None:
    seen: set[int] = set()

    def send(view: memoryview) -> int:
        assert isinstance(view.obj, bytearray)
        seen.add(id(view.obj))
        return len(view)

    out = Slots(NBYTES + 1, send).buffer
    for _ in range(10):
        write(out, bytes(NBYTES + 1))
        out.flush()
    assert len(seen) == 2


@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=5000), st.integers(1, 9000), st.none()), max_size=40),
)
def test_a_socket_that_is_full_now_and_then(steps: list[bytes | int | None]) -> None:
    """Bytes are frames, numbers are room in the socket, and None is a flush."""
    sock = Socket(0)
    slots = Slots(5000, sock.send)
    out, sent = slots.buffer, b""
    for step in steps:
        if isinstance(step, bytes):
            write(out, step)
            sent += step
        elif step is None:
            out.flush()
        else:
            sock.room += step
            out.resume()
        assert sent.startswith(b"".join(sock.taken))
        assert slots.pending == (b"".join(sock.taken) != sent)
    sock.room = 1 << 30
    assert out.resume() is True
    assert b"".join(sock.taken) == sent and not slots.pending


def test_who_was_told_that_the_socket_is_full_goes_on() -> None:
    sock = Socket(3)
    out = Slots(100, sock.send).buffer
    write(out, b"first")
    assert out.flush() is True
    write(out, b"second")
    sock.room = 1
    assert out.flush() is False and sock.taken == [b"fir"]
    assert out.resume() is False and sock.taken == [b"fir", b"s"]
    sock.room = 100
    assert out.resume() is True and b"".join(sock.taken) == b"firstsecond"
    write(out, b"third")
    assert out.flush() is False and sock.taken[-1] == b"third"


def test_frames_of_a_full_slot_leave_though_no_frame_follows() -> None:
    sock = Socket()
    slots = Slots(100, sock.send)
    write(slots.buffer, b"waits")
    slots.full()  # for a frame that another thread's frames keep back
    assert slots.pending
    slots.buffer.flush()
    assert sock.taken == [b"waits"] and not slots.pending


def test_a_slot_is_left_with_its_frames_alone() -> None:
    slots = Slots(100, len)
    frames: deque[memoryview] = deque()
    assert not slots.buffer.leave(memoryview(bytearray(200)), frames)
    write(slots.buffer, b"frame")
    with pytest.raises(BufferError):
        slots.buffer.leave(memoryview(b"read-only"), frames)
    with pytest.raises(TypeError):
        slots.buffer.leave(frames)  # type: ignore[call-arg, arg-type]
    assert not frames and slots.buffer.pending == 5
    assert slots.buffer.leave(memoryview(bytearray(200)), frames) and bytes(frames[0]) == b"frame"
    slots.buffer.close("it is closed")
    assert not slots.buffer.leave(memoryview(bytearray(200)), frames) and len(frames) == 1


def test_an_error_of_the_socket_is_raised() -> None:
    def send(view: memoryview) -> int:
        raise BrokenPipeError

    out = Slots(100, send).buffer
    write(out, b"to nobody")
    with pytest.raises(BrokenPipeError):
        out.flush()


def test_nothing_is_sent_once_it_is_closed() -> None:
    sock = Socket(1)
    slots = Slots(100, sock.send)
    write(slots.buffer, b"dropped")
    assert slots.buffer.flush() is True
    sock.room = 100
    slots.close()
    assert slots.flush() is False and sock.taken == [b"d"]
    slots.buffer.close("it is closed")
    assert not slots.buffer.pending


@pytest.mark.parametrize("step", ["pending", "close"])
def test_another_thread_waits_for_the_call_of_the_socket(step: str) -> None:
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()
    found: list[bool] = []

    def send(view: memoryview) -> int:
        began.set()
        assert go_on.wait(20) and not done.is_set()
        return len(view)

    def other() -> None:
        if step == "close":
            slots.close()
        found.append(slots.pending)
        done.set()

    slots = Slots(100, send)
    write(slots.buffer, b"frame")
    threads = [threading.Thread(target=slots.buffer.flush), threading.Thread(target=other)]
    threads[0].start()
    assert began.wait(20)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert found == [False], "the frame has been sent by then"


def test_a_thread_writes_while_another_flushes() -> None:
    sock = Socket()
    lock = threading.Lock()  # the writers' own lock, like a session's
    out = Slots(100, sock.send).buffer

    def flushes() -> None:
        for _ in range(20_000):
            out.flush()

    thread = threading.Thread(target=flushes)
    thread.start()
    for number in range(20_000):
        with lock:
            write(out, number.to_bytes(4, "big"))
    thread.join()
    out.flush()
    assert b"".join(sock.taken) == b"".join(number.to_bytes(4, "big") for number in range(20_000))


def test_a_frame_that_a_finalizer_writes_inside_of_a_flush() -> None:
    """The flush sends the frame behind those that were there, and none is sent twice."""
    sock = Socket()
    written = [b"c" * 4000, b"d" * 4000, b"e" * 10]

    def send(view: memoryview) -> int:
        if written:
            write(slots.buffer, written.pop(0))
            assert slots.buffer.flush() is False
        return sock.send(view)

    slots = Slots(5000, send)
    write(slots.buffer, b"a" * 4000)
    write(slots.buffer, b"b" * 4000)
    write(slots.buffer, b"f" * 4000)
    assert slots.buffer.flush() is False
    sent = b"".join(sock.taken)
    assert (len(sent), sent[:12_000:4000], sent[12_000::4000]) == (20_010, b"abf", b"cde")
    assert not slots.pending


def is_of_slots(code: CodeType) -> bool:
    return code.co_filename in TRACED  # else a callback of the collector's


def write_and_flush(out: Any, frame: bytes) -> None:
    write(out, frame)
    assert out.flush() is False


def test_a_frame_that_is_written_at_any_step_of_a_flush() -> None:
    """A finalizer's, or that of a signal's handler: the interpreter may run them between any two steps."""
    step, steps = 0, 1
    while step < steps:
        sock = Socket()
        out = Slots(100, sock.send).buffer
        write(out, b"first")
        steps = act_at_step(out.flush, step, partial(write_and_flush, out, b"second"), is_of_slots)
        assert sorted(sock.taken) in ([b"first", b"second"], [b"firstsecond"]), f"the frame of step {step}"
        step += 1
    assert steps > 100


def stop() -> None:
    raise TimeoutError("a signal's handler has raised")


def test_an_exception_at_any_step_of_a_flush_sends_nothing_twice() -> None:
    """Nobody knows whether the socket had taken the bytes, so it gets no more of them."""
    step, raised = 0, True
    while raised:
        sock = Socket()
        slots = Slots(100, sock.send)
        write(slots.buffer, b"first")
        raised = False
        try:
            act_at_step(slots.buffer.flush, step, stop, is_of_slots)
        except TimeoutError:
            raised = True
        slots.buffer.resume()
        slots.flush()
        assert sock.taken in ([], [b"first"]), f"the exception of step {step}"
        step += 1
    assert step > 100 and sock.taken == [b"first"]
