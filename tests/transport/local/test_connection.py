"""The arena of a local connection, without an endpoint: which parts are mapped, when, and how often."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.transport.local_arena import memfd
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import PeerInfo
from zcactor.transport.local.endpoint import LocalConnection
from zcactor.transport.mapping import Mapping

NBYTES = 8192


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


@pytest.fixture
def arena() -> Iterator[int]:
    with memfd(NBYTES) as fd:
        yield fd


Ends = tuple[socket.socket, socket.socket]


def connection_on(
    sock: socket.socket, arena: int, open_arena: Callable[[], Awaitable[Mapping | None]]
) -> LocalConnection:
    peer = PeerInfo(bytes(16), 4242, os.getuid(), NBYTES)
    mapping = Mapping(arena, NBYTES)
    return LocalConnection(sock, peer, recv_depth=10, eager_limit=1000, mapping=mapping, map_writable=open_arena)


async def test_writable_mapping_is_made_once(ends: Ends, arena: int) -> None:
    made: list[Mapping] = []

    async def map_writable() -> Mapping:
        await asyncio.sleep(0)
        made.append(Mapping(arena, NBYTES, writable=True))
        return made[0]

    connection = connection_on(ends[0], arena, map_writable)
    with pytest.raises(LookupError, match="open_writable"):
        connection.map(0, 1, writable=True)
    await asyncio.gather(*(connection.open_writable() for _ in range(3)))
    assert connection.writable_mapping is made[0]
    assert connection.map(5, 1, writable=True).address == made[0].window(5, 1).address + 5
    assert connection.map(5, 1).address != made[0].window(5, 1).address + 5
    assert len(made) == 1
    connection.abort()


async def test_failing_to_map_leaves_it_as_it_was(ends: Ends, arena: int) -> None:
    async def map_writable() -> Mapping:
        raise ConnectionLost("nobody there")

    connection = connection_on(ends[0], arena, map_writable)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="nobody there"):
            await connection.open_writable()
    assert connection.writable_mapping is None
    connection.abort()
    with pytest.raises(ConnectionLost, match="closed"):
        await connection.open_writable()


async def test_nothing_is_pulled(ends: Ends, arena: int) -> None:
    async def map_writable() -> None:
        return None

    connection = connection_on(ends[0], arena, map_writable)
    with pytest.raises(RuntimeError, match="is mapped"):
        await connection.pull(RemoteRegion(1, 0, 1), connection.map(0, 1).address, None)
    with pytest.raises(ProtocolError, match="process 4242 named 2 bytes at 8191"):
        connection.map(NBYTES - 1, 2)
    assert repr(connection) == "<LocalConnection to process 4242, open>"
    connection.abort()
