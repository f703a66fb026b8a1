"""A data socket: whole messages or none, and an end by another thread."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.transport.local_arena import memfd
from zcactor.transport.tcp import data as tcp_data
from zcactor.transport.tcp.data import PADDING_NBYTES, REQUEST, Answer, Channel


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    near, far = connected()
    channel = Channel(near)
    with far:
        yield channel, far
    channel.close()


Ends = tuple[Channel, socket.socket]


def test_request_on_the_wire() -> None:
    assert REQUEST.pack(1, 2, 3) == struct.pack("<QQQ", 1, 2, 3)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_answer_with_bytes(ends: Ends, mapped: bool) -> None:
    channel, far = ends
    owner = Channel(far)
    content = os.urandom(200_000)
    view = memoryview(bytearray(130_001))
    with memfd(len(content)) as fd:
        os.pwrite(fd, content, 0)
        for _ in range(2):
            channel.ask(1, 2, len(view), authenticate=False)
            object_id, offset, nbytes = owner.asked() or (0, 0, 0)
            assert object_id == 1
            piece = memoryview(content)[offset : offset + nbytes]
            thread = threading.Thread(target=owner.give, args=(fd, piece if mapped else None))
            thread.start()
            assert channel.answered()
            channel.take(view)
            thread.join()
            assert view == piece
    assert not channel.wait(0), "nothing was left over"


@pytest.mark.parametrize("answer", [Answer.REFUSED, 3, 255])
def test_an_answer_without_bytes(ends: Ends, answer: int) -> None:
    channel, far = ends
    far.send(bytes((answer,)))
    assert not channel.answered()


@pytest.mark.parametrize("length", [0, 1, PADDING_NBYTES - 1])
def test_a_stream_that_ends_in_the_padding(ends: Ends, length: int) -> None:
    channel, far = ends
    far.send(bytes((Answer.PADDED,)) + bytes(length))
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        channel.answered()


def test_receives_what_comes_in_parts(ends: Ends) -> None:
    channel, far = ends
    view = memoryview(bytearray(10))

    def dribble() -> None:
        for i in range(10):
            far.sendall(b"%d" % i)

    thread = threading.Thread(target=dribble)
    thread.start()
    assert channel.receive(view)
    thread.join()
    assert bytes(view) == b"0123456789"
    channel.check_alive()


def test_sends_parts_of_a_file(ends: Ends) -> None:
    channel, far = ends
    with memfd(100_000) as fd:
        os.pwrite(fd, content := os.urandom(100_000), 0)
        channel.send(b"ok", more=True)
        thread = threading.Thread(target=channel.send_file, args=(fd, 4097, 90_000))
        thread.start()
        received = b""
        while len(received) < 90_002:
            received += far.recv(1 << 16)
        thread.join()
        assert received == b"ok" + content[4097:94_097]
        with pytest.raises(BrokenPipeError, match="ends before"):
            channel.send_file(fd, 99_000, 1001)


@pytest.mark.parametrize("sent", [0, 1, 9])
def test_stream_that_ends(ends: Ends, sent: int) -> None:
    channel, far = ends
    far.sendall(bytes(sent))
    far.close()
    view = memoryview(bytearray(10))
    if sent:
        with pytest.raises(ConnectionResetError, match="inside a message"):
            channel.receive(view)
    else:
        assert not channel.receive(view)


def test_bytes_are_not_trusted_once_the_other_end_has_closed(ends: Ends) -> None:
    channel, far = ends
    far.sendall(bytes(10))
    far.close()
    assert channel.receive(memoryview(bytearray(10)))
    with pytest.raises(ConnectionResetError, match="closed"):
        channel.check_alive()


def test_ending_wakes_the_thread_that_waits(ends: Ends) -> None:
    channel, far = ends
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(channel.receive(memoryview(bytearray(10)))))
    thread.start()
    channel.end()
    channel.end()
    thread.join()
    assert outcome == [False]
    channel.close()
    channel.close()
    channel.end()
    assert far.recv(10) == b""


def test_closing_after_an_end_drops_what_is_on_its_way() -> None:
    near, far = connected()
    with far:
        channel = Channel(near)
        near.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                near.send(bytes(1 << 16))
        channel.end()
        channel.close()
        with pytest.raises(ConnectionResetError):
            while far.recv(1 << 16):
                pass


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_data, "PATIENCE", 0.01)
    near, far = connected()
    channel = Channel(near)
    with far, pytest.raises(BlockingIOError):
        channel.receive(memoryview(bytearray(10)))
    channel.close()
