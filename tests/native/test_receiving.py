"""Many bytes from a socket to their place."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zcactor.native import hot

MOMENT = struct.pack("@ll", 0, 1000)
"""A millisecond: the patience of a socket that is to lose it."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


Ends = tuple[socket.socket, socket.socket]


def wait_until_asleep(thread: int) -> None:
    """Return once a thread of this process sleeps in a system call."""
    while Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(") ")[2][0] != "S":
        os.sched_yield()


@pytest.mark.parametrize("looking", [0, 50])
@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("pieces", [[1], [1] * 20, [3, 1 << 16, 5], [1 << 20, 1 << 20, 17], [1 << 18] * 20])
def test_bytes_that_come_in_pieces(ends: Ends, pieces: list[int], asleep: bool, looking: int) -> None:
    near, far = ends
    content = os.urandom(sum(pieces))
    into = bytearray(len(content) + 2)
    receiver = threading.get_native_id()

    def send() -> None:
        at = 0
        for nbytes in pieces:
            if asleep:
                wait_until_asleep(receiver)
            far.sendall(content[at : at + nbytes])
            at += nbytes

    thread = threading.Thread(target=send)
    thread.start()
    assert hot.receive(near.fileno(), memoryview(into)[1:-1], looking) == len(content)
    thread.join()
    assert into == b"\0" + content + b"\0"


@pytest.mark.parametrize("nbytes", [0, 1, 100])
def test_the_end_of_the_stream(ends: Ends, nbytes: int) -> None:
    near, far = ends
    far.sendall(b"x" * nbytes)
    far.shutdown(socket.SHUT_WR)
    into = bytearray(101)
    assert hot.receive(near.fileno(), into, 50) == nbytes
    assert into == b"x" * nbytes + bytes(101 - nbytes)


def test_no_bytes(ends: Ends) -> None:
    assert hot.receive(ends[0].fileno(), bytearray(), 50) == 0


def test_a_socket_that_loses_its_patience(ends: Ends) -> None:
    near, far = ends
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, MOMENT)
    far.send(b"12")
    with pytest.raises(BlockingIOError):
        hot.receive(near.fileno(), bytearray(3), 50)


def test_an_end_by_another_thread(ends: Ends) -> None:
    near, _ = ends
    receiver = threading.get_native_id()

    def end() -> None:
        wait_until_asleep(receiver)
        near.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=end)
    thread.start()
    assert hot.receive(near.fileno(), bytearray(1 << 20), 50) == 0
    thread.join()


def test_a_descriptor_that_is_none() -> None:
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        hot.receive(-1, bytearray(1), 50)
    assert raised.value.errno == errno.EBADF


@pytest.mark.parametrize(
    "wrong", [(1, bytearray(1)), ("1", bytearray(1), 1), (1, bytes(1), 1), (1, 2, 1), (1, bytearray(1), "1")]
)
def test_arguments_of_another_kind(wrong: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        hot.receive(*wrong)  # type: ignore[arg-type]
