"""The owner's answers to requests for bytes: exact, checked, and ended with the owner's connection."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conformance.connection import ARENA_NBYTES, turns
from tests.transport.local_arena import memfd
from zcactor.transport.tcp import crew, serve
from zcactor.transport.tcp import data as tcp_data
from zcactor.transport.tcp.data import PADDING_NBYTES, REQUEST, Answer, Channel
from zcactor.transport.tcp.serve import DataServer

PROCESS = b"p" * 16
CONTENT = os.urandom(ARENA_NBYTES)


@dataclass
class Owner:
    """An arena with `CONTENT`, and the requests that the server asked about."""

    fd: int
    asked: list[tuple[object, int, int, int]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    waits: threading.Event | None = None

    def authorize(self, receiver: object, object_id: int, offset: int, nbytes: int) -> bool:
        """Answer the server's question, after `waits`."""
        self.asked.append((receiver, object_id, offset, nbytes))
        if self.waits is not None:
            self.waits.wait()
        return object_id not in self.lost

    def server(self) -> DataServer:
        """A server for `PROCESS`."""
        return DataServer(PROCESS, self.fd, ARENA_NBYTES, self.authorize)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with memfd() as fd, mmap.mmap(fd, ARENA_NBYTES) as arena:
        arena[:] = CONTENT
        yield Owner(fd)


async def adopted(server: DataServer) -> socket.socket:
    """The puller's end of a data socket that `server` serves."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    near.setblocking(False)
    server.adopt(far)
    return near


async def receive(sock: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        part = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(received))
        assert part, f"it ended after {len(received)} of {nbytes} bytes"
        received += part
    return received


async def closed(server: DataServer) -> None:
    done = asyncio.Event()
    server.close(done.set)
    await done.wait()


async def test_bytes_and_their_order(owner: Owner) -> None:
    server = owner.server()
    with await adopted(server) as sock:
        wanted = [(0, 1), (4095, 2), (ARENA_NBYTES - 1, 1), (100, 30_000), (0, ARENA_NBYTES)]
        sock.send(b"".join(REQUEST.pack(7, offset, nbytes) for offset, nbytes in wanted))
        for offset, nbytes in wanted:
            assert await receive(sock, 1 + nbytes) == bytes((Answer.OK,)) + CONTENT[offset : offset + nbytes]
        assert owner.asked == [(None, 7, offset, nbytes) for offset, nbytes in wanted]
        await closed(server)


BEYOND = [
    (0, 0),
    (0, ARENA_NBYTES + 1),
    (ARENA_NBYTES, 1),
    (1, ARENA_NBYTES),
    (2**64 - 1, 2**64 - 1),
    (2**64 - 1, 1),
    (0, 2**64 - 1),
]


async def test_what_is_refused_harms_nobody(owner: Owner) -> None:
    server = owner.server()
    owner.lost.add(8)
    with await adopted(server) as sock:
        for offset, nbytes in BEYOND:
            sock.send(REQUEST.pack(7, offset, nbytes))
            assert await receive(sock, 1) == bytes((Answer.REFUSED,))
        assert owner.asked == []
        sock.send(REQUEST.pack(8, 0, 10))
        assert await receive(sock, 1) == bytes((Answer.REFUSED,))
        sock.send(REQUEST.pack(7, 0, 10))
        assert await receive(sock, 11) == bytes((Answer.OK,)) + CONTENT[:10]
        await closed(server)


async def test_without_an_arena() -> None:
    server = DataServer(PROCESS, None, 0, lambda *_: True)
    with await adopted(server) as sock:
        sock.send(REQUEST.pack(7, 0, 1))
        assert await receive(sock, 1) == bytes((Answer.REFUSED,))
        await closed(server)


@pytest.mark.parametrize("garbage", [b"", b"x", b"GET / HTTP/1.1\r\n", os.urandom(1000), b"\xff" * 24 * 50])
async def test_garbage(owner: Owner, garbage: bytes) -> None:
    before = len(os.listdir("/proc/self/fd"))
    server = owner.server()
    with await adopted(server) as sock, await adopted(server) as other:
        sock.send(garbage)
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.get_running_loop().sock_recv(sock, 1000):
                assert set(part) == {Answer.REFUSED}
        other.send(REQUEST.pack(7, 5, 10))
        assert await receive(other, 11) == bytes((Answer.OK,)) + CONTENT[5:15]
        await closed(server)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_peer_that_goes_away_in_the_middle(owner: Owner) -> None:
    server = owner.server()
    sock = await adopted(server)
    sock.send(REQUEST.pack(7, 0, ARENA_NBYTES) * 100)
    await receive(sock, 1000)
    sock.close()
    with await adopted(server) as other:
        other.send(REQUEST.pack(7, 0, 10))
        assert await receive(other, 11) == bytes((Answer.OK,)) + CONTENT[:10]
        await closed(server)


async def test_closing_waits_for_who_reads_the_arena(owner: Owner) -> None:
    server, done, owner.waits = owner.server(), asyncio.Event(), threading.Event()
    with await adopted(server) as busy, await adopted(server) as idle:
        busy.send(REQUEST.pack(7, 0, 10))
        while not owner.asked:
            await asyncio.sleep(0)
        server.close(done.set)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(idle, 1) == b""
        await turns(50)
        assert not done.is_set()
        owner.waits.set()
        await done.wait()
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(busy, 1) == b""
        near, far = socket.socketpair()
        with near, far, pytest.raises(OSError, match="no further data socket"):
            server.adopt(near)


async def test_closing_with_nothing_to_wait_for_is_done_at_once(owner: Owner) -> None:
    done = asyncio.Event()
    owner.server().close(done.set)
    assert done.is_set()


async def test_no_more_than_so_many(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_CHANNELS", 2)
    server = owner.server()
    with await adopted(server) as first, await adopted(server):
        near, far = socket.socketpair()
        with near, far, pytest.raises(OSError, match="no further data socket"):
            server.adopt(near)
        first.close()
        while server.full:
            await asyncio.sleep(0)
        await closed(server)


async def test_out_of_threads(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    server = owner.server()
    monkeypatch.setattr(crew, "_crew", crew.Crew())  # a crew without a resting thread
    monkeypatch.setattr(threading.Thread, "start", refuse)
    near, far = socket.socketpair()
    with near, far, pytest.raises(OSError, match="no thread is left"):
        server.adopt(near)
    await closed(server)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_forked_child_lets_go(owner: Owner) -> None:
    server = owner.server()
    with await adopted(server) as sock:
        child = os.fork()
        if child == 0:
            server.abandon()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sock.send(REQUEST.pack(7, 0, 10))
        assert await receive(sock, 11) == bytes((Answer.OK,)) + CONTENT[:10]
        await closed(server)


# ---- threads


async def test_many_idle_sockets_take_no_threads(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LINGER", 0.01)
    monkeypatch.setattr(crew, "REST", 0.01)
    monkeypatch.setattr(crew, "_crew", crew.Crew())
    threads = set(threading.enumerate())
    servers = [owner.server() for _ in range(20)]
    socks = [await adopted(server) for server in servers]
    for _ in range(2):
        for sock in socks:
            sock.send(REQUEST.pack(7, 5, 10))
            assert await receive(sock, 11) == bytes((Answer.OK,)) + CONTENT[5:15]
        while len(set(threading.enumerate()) - threads) > 1:  # one thread waits for all of the sockets
            await asyncio.sleep(0)
    for server, sock in zip(servers, socks, strict=True):
        await closed(server)
        sock.close()
    while set(threading.enumerate()) - threads:
        await asyncio.sleep(0)


async def test_socket_without_a_request_is_closed(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LINGER", 0.01)
    monkeypatch.setattr(tcp_data, "PATIENCE", 0.01)
    monkeypatch.setattr(serve, "_waiting", serve.Waiting())
    before = len(os.listdir("/proc/self/fd"))
    server = owner.server()
    with await adopted(server) as sock:
        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        while server._channels:
            await asyncio.sleep(0)
    await closed(server)
    while len(os.listdir("/proc/self/fd")) > before:  # fewer when leftovers of earlier tests end meanwhile
        await asyncio.sleep(0)


async def test_no_thread_for_a_socket_that_had_lain_idle(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "LINGER", 0.0)
    parked = threading.Event()
    really = serve.until_readable

    def until_readable(*args: Any) -> None:
        really(*args)
        parked.set()

    monkeypatch.setattr(serve, "until_readable", until_readable)
    server = owner.server()
    with await adopted(server) as sock:
        await asyncio.to_thread(parked.wait)
        monkeypatch.setattr(crew, "run", none_left)
        sock.send(REQUEST.pack(7, 5, 10))
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        while server._channels:
            await asyncio.sleep(0)


def none_left(_: object) -> None:
    """Fail as `crew.run` does when the system has no thread."""
    raise crew.NoThread("can't start new thread")


async def test_descriptors_after_a_channel_that_cannot_be_made(owner: Owner) -> None:
    def refuse(_: socket.socket) -> Channel:
        raise OSError("no memory for its buffers")

    server = DataServer(PROCESS, owner.fd, ARENA_NBYTES, owner.authorize, refuse)
    near, far = socket.socketpair()
    with near, far:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="no memory"):
            server.adopt(near)
        assert len(os.listdir("/proc/self/fd")) <= before


async def test_bytes_are_sent_from_where_they_are_mapped(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is not looked at: it has other bytes. Where there are few, the file is sent."""
    monkeypatch.setattr(serve, "MAPPED_NBYTES", 17)
    content = os.urandom(1000)
    memory = ctypes.create_string_buffer(content, 1000)

    class Held:
        """A stand-in for a block of 1,000 bytes at 4096."""

        address, offset = ctypes.addressof(memory), 4096

    def fail(*_: object) -> None:
        raise AssertionError("the bytes are mapped, and were sent from the file")

    monkeypatch.setattr(Channel, "send_file", fail)
    server = DataServer(PROCESS, owner.fd, ARENA_NBYTES, lambda *_: Held())
    with await adopted(server) as sock:
        for offset, nbytes in ((4096, 1000), (4099, 17), (5000, 96)):
            sock.send(REQUEST.pack(7, offset, nbytes))
            expected = content[offset - 4096 : offset - 4096 + nbytes]
            before = bytes((Answer.PADDED,)) + bytes(PADDING_NBYTES)
            assert await receive(sock, len(before) + nbytes) == before + expected
        monkeypatch.undo()
        sock.send(REQUEST.pack(7, 4099, 16))
        assert await receive(sock, 17) == bytes((Answer.OK,)) + CONTENT[4099:4115]
        await closed(server)


async def test_what_is_leased_is_held_while_it_is_sent(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        """A stand-in for a block."""

    held: list[Held] = [Held()]
    alive = weakref.ref(held[0])
    seen: list[bool] = []

    class Looking(Channel):
        def send_file(self, fd: int, offset: int, nbytes: int) -> None:
            seen.append(alive() is not None)
            super().send_file(fd, offset, nbytes)

    server = DataServer(PROCESS, owner.fd, ARENA_NBYTES, lambda *_: held.pop(), Looking)
    with await adopted(server) as sock:
        sock.send(REQUEST.pack(7, 5, 10))
        assert await receive(sock, 11) == bytes((Answer.OK,)) + CONTENT[5:15]
        await closed(server)
    assert seen == [True]
