"""Frames in the native send buffer of a simulated connection leave whole and in order."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from simulation.connection import SimSlot


def write(out: Any, frame: bytes) -> None:
    buffer, offset = out.reserve(len(frame))
    buffer[offset : offset + len(frame)] = frame
    out.commit(len(frame))


def test_frames_leave_when_flushed_and_make_room_before() -> None:
    taken: list[bytes] = []
    left: list[int] = []
    out = SimSlot(5000, lambda view: taken.append(bytes(view)), lambda: left.append(len(taken))).native
    write(out, b"a" * 10)
    write(out, b"b" * 10)
    assert not taken and out.pending
    out.flush()
    assert taken == [b"a" * 10 + b"b" * 10] and left == [1] and not out.pending
    write(out, b"c" * 5000)
    write(out, b"d" * 5000)  # the first frame leaves no room for this one
    assert taken[1:] == [b"c" * 5000] and left == [1]
    out.flush()
    assert taken[2:] == [b"d" * 5000] and left == [1, 3]
    with pytest.raises(ValueError, match="limit is 5000"):
        out.reserve(5001)


def test_a_thread_writes_while_another_flushes() -> None:
    taken: list[bytes] = []
    lock = threading.Lock()  # the writers' own lock, like a session's
    out = SimSlot(100, lambda view: taken.append(bytes(view)), lambda: None).native

    def flushes() -> None:
        for _ in range(20_000):
            with lock:
                out.flush()

    thread = threading.Thread(target=flushes)
    thread.start()
    for number in range(20_000):
        with lock:
            write(out, number.to_bytes(4, "big"))
    thread.join()
    out.flush()
    assert b"".join(taken) == b"".join(number.to_bytes(4, "big") for number in range(20_000))
