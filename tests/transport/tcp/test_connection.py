"""A TCP connection on bare sockets: events that closing and an end wait for, and memory that cannot be mapped."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.conformance.connection import ARENA_NBYTES, Recorder, put, send, turns
from tests.transport.local_arena import memfd
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.peers.losses import ended_there
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import PeerInfo
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.data import REQUEST, Channel
from zcactor.transport.tcp.serve import DataServer

PEER = PeerInfo(b"p" * 16, 4242, -1, ARENA_NBYTES)


def connected(receive_nbytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection; the far end has a receive buffer of that size."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if receive_nbytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_nbytes)
        near = socket.create_connection(listener.getsockname())
        near.setblocking(False)
        return near, listener.accept()[0]


async def unreachable() -> Channel:
    raise ConnectionLost("nobody listens")


async def nothing() -> None:
    """Open no data socket to the peer."""


def connection_on(sock: socket.socket, server: DataServer | None = None) -> TcpConnection:
    return TcpConnection(
        sock,
        PEER,
        recv_depth=10,
        eager_limit=1000,
        where=" at 10.1.2.3",
        connect_data=unreachable,
        offer_data=nothing,
        server=server or DataServer(PEER.process, None, 0, lambda *_: True),
    )


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = connected()
    with near, far:
        yield near, far


Ends = tuple[socket.socket, socket.socket]


async def test_the_loss_of_a_silent_peer_is_no_end_of_its_process(ends: Ends) -> None:
    connection = connection_on(ends[0])
    receiver = Recorder()
    connection.start(receiver)
    assert connection._liveness is not None
    connection._liveness._silent("broke: its host has not answered for 5.0 s")
    lost = await receiver.wait_lost()
    assert not ended_there(lost)


async def test_closing_loses_nothing_although_bytes_are_unread() -> None:
    near, far = connected(receive_nbytes=4096)
    connection = connection_on(near)  # it is not started: bytes stay unread, so that closing resets
    far.sendall(b"never read")
    count = 5
    for _ in range(count):
        put(connection, b"x" * 30_000)
    connection.flush()
    assert not connection._out.pending, "the system has taken all, and the peer has not"
    closing = asyncio.create_task(connection.aclose())
    await turns(50)
    assert not closing.done()
    with far:
        received = await asyncio.to_thread(receive_all, far)
    assert len(received) == count * (4 + 30_000)
    await closing


def receive_all(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            received += part
    return received


async def test_closing_does_not_wait_for_a_peer_that_is_gone(ends: Ends) -> None:
    connection, recorder = connection_on(ends[0]), Recorder()
    connection.start(recorder)
    ends[1].close()
    await recorder.wait_lost()
    await connection.aclose()


async def test_cancelled_closing_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = connected(receive_nbytes=4096)
    connection = connection_on(near)
    with far:
        send(connection, [b"x" * 30_000] * 5)
        closing = asyncio.create_task(connection.aclose())
        await turns()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert near.fileno() == -1


async def test_end_is_reported_when_nobody_reads_the_arena_any_more(ends: Ends) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def authorize(*_: object) -> bool:
        asked.set()
        return go_on.wait()

    with memfd() as fd:
        server = DataServer(PEER.process, fd, ARENA_NBYTES, authorize)
        connection, recorder = connection_on(ends[0], server), Recorder()
        connection.start(recorder)
        puller, served = connected()
        served.setblocking(False)
        server.adopt(served)
        puller.send(REQUEST.pack(1, 0, 100))
        await asyncio.to_thread(asked.wait)
        ends[1].close()
        closing = asyncio.create_task(connection.aclose())
        await turns(50)
        assert recorder.lost == []
        assert not closing.done()
        go_on.set()
        await recorder.wait_lost()
        await closing
        with puller, contextlib.suppress(ConnectionResetError):
            puller.setblocking(True)
            assert puller.recv(1) == b""


async def test_nothing_is_mapped(ends: Ends) -> None:
    connection = connection_on(ends[0])
    assert connection.map(0, ARENA_NBYTES).address == 0
    with pytest.raises(LookupError, match="pull"):
        connection.map(0, 1, writable=True)
    with pytest.raises(ProtocolError, match="process 4242 at 10.1.2.3 named 1 bytes"):
        connection.map(ARENA_NBYTES, 1)
    with pytest.raises(RuntimeError, match="moved arrays are pulled"):
        await connection.open_writable()
    assert "process 4242 at 10.1.2.3, open" in repr(connection)
    connection.abort()


async def test_pull(ends: Ends) -> None:
    connection = connection_on(ends[0])
    destination = (ctypes.c_char * 10)()
    await connection.pull(RemoteRegion(1, ARENA_NBYTES, 0), ctypes.addressof(destination), destination)
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await connection.pull(RemoteRegion(1, 0, 10), ctypes.addressof(destination), destination)
    connection.abort()
    with pytest.raises(ConnectionLost, match="is closed"):
        await connection.pull(RemoteRegion(1, 0, 10), ctypes.addressof(destination), destination)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_abort_in_a_forked_child_harms_nobody(ends: Ends) -> None:
    connection, recorder = connection_on(ends[0]), Recorder()
    connection.start(recorder)
    child = os.fork()
    if child == 0:
        connection.abort()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ends[1].sendall(b"\x03\0\0\0abc")
    assert await recorder.wait_frames(1) == [b"abc"]
    assert recorder.lost == []
    connection.abort()
    await recorder.wait_lost()
