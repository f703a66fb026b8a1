"""The common part of endpoints, in one that has nothing else: a plain server socket takes the place of a transport."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.connection import turns
from tests.transport.local_arena import TOKEN
from zcactor.errors import AuthenticationError
from zcactor.transport.base import Connection, Endpoint
from zcactor.transport.local.endpoint import LocalEndpoint
from zcactor.transport.loopback.endpoint import loopback_pair
from zcactor.transport.stream.endpoint import ListeningEndpoint
from zcactor.transport.stream.handshake import Purpose
from zcactor.transport.stream.listener import Listener

OURS, THEIRS = bytes(range(16)), bytes(range(16, 32))


class Bare(Endpoint):
    """A context that records each close."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        raise AssertionError("these tests close an endpoint, and start none")

    async def connect(self, address: str) -> Connection:
        raise AssertionError("these tests close an endpoint, and connect by none")

    async def aclose(self) -> None:
        self.closed.append("closed")


class Door(ListeningEndpoint):
    """An endpoint that listens at a plain socket, and keeps the connections that arrive."""

    def __init__(
        self, process: bytes = OURS, token: bytes = TOKEN, recv_depth: int = 1024, eager_limit: int = 16384
    ) -> None:
        super().__init__(process, token, None, 0, recv_depth, eager_limit)
        self.arrived: list[socket.socket] = []

    def listen(self, accepted: Callable[[Connection], None]) -> tuple[str, int]:
        """Begin to listen; return the place."""
        self._refuse_second_start()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self._accepted = accepted
        self._listener = Listener(sock, self._keep)
        place: tuple[str, int] = sock.getsockname()
        return place

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        self.listen(accepted)

    async def connect(self, address: str) -> Connection:
        raise AssertionError("these tests connect to a door, and never from one")

    async def _keep(self, sock: socket.socket) -> None:
        self.arrived.append(sock)
        try:
            await asyncio.Event().wait()
        finally:
            sock.close()


def nobody(connection: Connection) -> None:
    """A callback that no connection may reach."""
    raise AssertionError(connection)


async def test_leaving_closes() -> None:
    async with (bare := Bare()) as entered:
        assert entered is bare
        assert bare.closed == []
    assert bare.closed == ["closed"]


async def test_leaving_closes_when_something_is_raised() -> None:
    with pytest.raises(LookupError, match="as it was"):
        async with (bare := Bare()):
            raise LookupError("as it was")
    assert bare.closed == ["closed"]


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 bytes, this one has 3"):
        Door(b"abc")
    for fd, nbytes in ((None, 4096), (3, 0)):
        with pytest.raises(ValueError, match="a descriptor and a size"):
            LocalEndpoint(tmp_path, OURS, TOKEN, fd, nbytes)


async def test_nothing_happens_before_it_listens() -> None:
    async with Door() as door:
        assert door.address == ""
        assert door.pending == 0
        door.abandon()
    door.dispose()


async def test_pending_peers_end_with_it() -> None:
    async with Door() as door:
        with socket.create_connection(door.listen(nobody)):
            while not door.arrived:
                await turns(1)
            assert door.pending == 1
            await door.aclose()
            assert door.pending == 0
            assert door.arrived[0].fileno() == -1
    assert not [sock for sock in door.arrived if sock.fileno() != -1]


async def test_listens_once() -> None:
    async with Door() as door:
        door.listen(nobody)
        with pytest.raises(RuntimeError, match="listens already"):
            door.listen(nobody)
    with pytest.raises(RuntimeError, match="listens already"):  # it is closed for good
        door.listen(nobody)


async def test_abandoned_socket_takes_nobody() -> None:
    door = Door()
    place = door.listen(nobody)
    assert door._listener is not None
    asyncio.get_running_loop().remove_reader(door._listener._sock.fileno())  # as in a child, whose loop is another
    door.abandon()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)


async def test_accepted_connections_are_handed_on() -> None:
    door, got = Door(), list[Connection]()
    left, right = loopback_pair()
    door._hand_on(left)  # no callback is set yet
    door.listen(got.append)
    door._hand_on(right)
    assert got == [right]
    await door.aclose()
    left.abort()
    await turns()


async def test_handshake() -> None:
    left, right = Door(recv_depth=10, eager_limit=2000), Door(THEIRS, recv_depth=20, eager_limit=1000)
    near, far = socket.socketpair()
    with near, far:
        for sock in (near, far):
            sock.setblocking(False)
        theirs, ours = await asyncio.gather(left._say_hello(near, Purpose.DATA, THEIRS.hex()), right._hear_hello(far))
    assert (theirs.process, theirs.purpose, theirs.recv_depth, theirs.eager_limit) == (THEIRS, Purpose.PEER, 20, 1000)
    assert (ours.process, ours.pid, ours.purpose, ours.arena_nbytes) == (OURS, os.getpid(), Purpose.DATA, 0)
    assert left._agreed(theirs) == right._agreed(ours) == (10, 1000)


async def test_stranger_is_refused() -> None:
    left, right = Door(), Door(THEIRS, token=bytes(32))
    near, far = socket.socketpair()
    with near, far:
        for sock in (near, far):
            sock.setblocking(False)
        results = await asyncio.gather(
            left._say_hello(near, Purpose.PEER, THEIRS.hex()), right._hear_hello(far), return_exceptions=True
        )
    assert [type(result) for result in results] == [AuthenticationError, AuthenticationError]
