"""Extents of GPU memory on their way through a socket: descriptors, and malformed answers."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.descriptors import opened
from tests.transport.local_arena import memfd
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.local.extents import MOST_EXTENTS, ExtentReply, RemoteExtent, hand_out, receive_extents

UUID = "GPU-00000000-0000-0000-0000-000000000001"
READER = b"r" * 16
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


@pytest.mark.parametrize("shared", [True, False])
async def test_there_and_back(ends: Ends, shared: bool) -> None:
    asked: list[tuple[bytes, list[int]]] = []
    with memfd(4096) as fd:
        os.pwrite(fd, b"bytes", 0)

        def supply(reader: bytes, places: Collection[int]) -> ExtentReply:
            asked.append((reader, list(places)))
            extents = [RemoteExtent(1 << 48 | at, 4096, UUID, os.dup(fd)) for at in range(2)]
            return ExtentReply(extents, os.dup(fd) if shared else None)

        before = opened()
        _, answer = await asyncio.gather(hand_out(ends[0], supply, READER), receive_extents(ends[1], [5, 7]))
        assert asked == [(READER, [5, 7])]
        assert [each[:3] for each in answer.extents] == [(1 << 48 | at, 4096, UUID) for at in range(2)]
        for number in (*[each.fd for each in answer.extents], *([answer.events] if shared else [])):
            assert number is not None and os.pread(number, 5, 0) == b"bytes"
        assert (answer.events is not None) == (answer.process is not None) == shared
        if answer.process is not None:
            assert f"Pid:\t{os.getpid()}" in Path(f"/proc/self/fdinfo/{answer.process}").read_text()
        answer.close()
        assert opened() <= before


async def test_nothing(ends: Ends) -> None:
    _, found = await asyncio.gather(hand_out(ends[0], lambda *_: None, READER), receive_extents(ends[1], [1]))
    assert found == ExtentReply([])


@pytest.mark.parametrize(
    "answer",
    [
        struct.pack("<BQQ40s", 9, 0, 0, b""),
        struct.pack("<BQQ40s", 2, 0, 0, b"\xff") + bytes(64),
        struct.pack("<BQQ40s", 1, 0, 0, UUID.encode()) + b"\0",  # no descriptor follows
    ],
    ids=["kind", "uuid", "descriptor"],
)
async def test_malformed_answers(ends: Ends, answer: bytes) -> None:
    ends[0].send(answer)
    with pytest.raises(ProtocolError):
        await receive_extents(ends[1], [1])


async def test_a_sender_that_ends_leaves_no_descriptor(ends: Ends) -> None:
    with memfd(4096) as fd:
        before = opened()
        ends[0].send(struct.pack("<BQQ40s", 1, 0, 4096, UUID.encode()))
        socket.send_fds(ends[0], [b"\1"], [fd])
        ends[0].shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLost):
            await receive_extents(ends[1], [1])
        assert opened() <= before


async def test_a_malformed_extent_leaves_no_descriptor(ends: Ends) -> None:
    with memfd(4096) as fd:
        before = opened()
        ends[0].send(struct.pack("<BQQ40s", 1, 0, 4096, b"\xff"))
        socket.send_fds(ends[0], [b"\1"], [fd])
        with pytest.raises(ProtocolError, match="malformed"):
            await receive_extents(ends[1], [1])
        assert opened() <= before


async def test_a_sender_that_names_more_than_it_was_asked_for(ends: Ends) -> None:
    with memfd(4096) as fd:
        before = opened()
        for at in range(2):
            ends[0].send(struct.pack("<BQQ40s", 1, 4096 * at, 4096, UUID.encode()))
            socket.send_fds(ends[0], [b"\1"], [fd])
        with pytest.raises(ProtocolError, match="too many"):
            await receive_extents(ends[1], [1])
        assert opened() <= before


async def test_a_receiver_that_asks_for_too_many(ends: Ends) -> None:
    ends[1].send(struct.pack("<I", MOST_EXTENTS + 1))
    with pytest.raises(ProtocolError, match="at most"):
        await hand_out(ends[0], lambda *_: None, READER)
