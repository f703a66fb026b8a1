"""Connections by TLS: the shared suite, bytes in pieces and in large amounts, and no plain byte for a relay."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conformance.connection import (
    ARENA_NBYTES,
    ConnectedPair,
    PullingSuite,
    Recorder,
    Side,
    connect,
    finish,
    region,
    send,
    turns,
)
from tests.transport.local_arena import memfd
from tests.transport.outsiders import Relay, victim
from tests.transport.tcp_arena import tcp_side
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.tcp import pull as tcp_pull
from zcactor.transport.tcp import tls_connection
from zcactor.transport.tcp.endpoint import TcpEndpoint, parse_address
from zcactor.transport.tcp.tls_connection import TlsConnection


class TestTls(PullingSuite):
    @pytest.fixture(params=["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
    def sides(self, request: pytest.FixtureRequest, tls_folder: Path) -> Iterator[tuple[Side, Side]]:
        with tcp_side(request.param, tls=tls_folder) as left, tcp_side(request.param, tls=tls_folder) as right:
            yield left, right

    async def test_is_by_tls(self, pair: ConnectedPair) -> None:
        for connection in (pair.left, pair.right):
            assert isinstance(connection, TlsConnection)
            assert connection.sealed and "by TLS" in connection.describe()
            assert connection._sock.version() == "TLSv1.3"  # type: ignore[attr-defined]

    async def test_sealing_is_not_used_in_addition(self, tls_folder: Path) -> None:
        with tcp_side(tls=tls_folder, sealing=True) as left, tcp_side(tls=tls_folder, sealing=True) as right:
            pair = await connect(left, right)
            assert isinstance(pair.left, TlsConnection) and isinstance(pair.right, TlsConnection)
            await finish(pair)


@pytest.fixture
async def pair(tls_folder: Path) -> AsyncIterator[ConnectedPair]:
    with tcp_side(tls=tls_folder) as left, tcp_side(tls=tls_folder) as right:
        pair = await connect(left, right)
        yield pair
        await finish(pair)


def endpoint_of(side: Side) -> TcpEndpoint:
    assert isinstance(side.endpoint, TcpEndpoint)
    return side.endpoint


# ---- frames


async def test_what_openssl_holds_already_is_read(pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_connection, "READS", 1)
    recorder = Recorder()
    pair.left.start(Recorder())
    pair.right.start(recorder)
    frames = [bytes((i,)) * 10_000 for i in range(200)]
    for at in range(0, 200, 20):
        send(pair.left, frames[at : at + 20])
    assert await recorder.wait_frames(200) == frames


async def test_others_have_their_turn_while_much_comes(pair: ConnectedPair) -> None:
    pair.left.start(Recorder())

    class Reader(Recorder):
        turn = 0
        most = 0

        def frames_received(self, data: memoryview) -> None:
            super().frames_received(data)
            self.turn += 1
            self.most = max(self.most, self.turn)

    reader = Reader()
    for _ in range(10):
        send(pair.left, [b"x" * 16_000] * 10)
    pair.right.start(reader)
    while len(reader.frames) < 100:
        reader.turn = 0
        await asyncio.sleep(0)
    assert reader.most <= 3 * tls_connection.READS, "readable, hang-up and its own turn"


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[Relay, ConnectedPair, tuple[Recorder, Recorder]]]:
    """A connection through a relay that sees every byte, with both ends started."""
    with tcp_side(tls=folder) as left, tcp_side(tls=folder) as right:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        await right.endpoint.start(accepted.put_nowait)
        async with Relay(parse_address(right.endpoint.address)[2]) as relay:
            connection = await left.endpoint.connect(relay.address(right.process))
            pair, recorders = (
                ConnectedPair(connection, await accepted.get(), (left, right), accepted),
                (Recorder(), Recorder()),
            )
            pair.left.start(recorders[0])
            pair.right.start(recorders[1])
            yield relay, pair, recorders
            await finish(pair)


async def test_who_listens_on_the_way_learns_nothing(tls_folder: Path) -> None:
    marker = b"attack at dawn"
    async with watched(tls_folder) as (relay, pair, (left, right)):
        send(pair.left, [marker * 1000])
        send(pair.right, [marker * 1000])
        await left.wait_frames(1)
        await right.wait_frames(1)
        for side, seen in zip(pair.sides, relay.seen, strict=True):
            assert len(seen) > 14_000
            assert marker not in seen and b"ZCAC" not in seen and side.process not in seen


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("forged", [b"\x17\x03\x03\x00\x20" + bytes(32), b"\x03\0\0\0abc"], ids=["a record", "none"])
async def test_bytes_that_are_not_the_peers(tls_folder: Path, direction: int, forged: bytes) -> None:
    async with watched(tls_folder) as (relay, pair, recorders):
        send(pair.left, [b"good"])
        send(pair.right, [b"good"])
        for recorder in recorders:
            await recorder.wait_frames(1)
        relay.inject(direction, forged)
        assert isinstance(await recorders[1 - direction].wait_lost(), ProtocolError)
        await recorders[direction].wait_lost()
        assert recorders[1 - direction].frames == [b"good"]


# ---- bytes


async def test_bytes_do_not_go_in_the_clear(tls_folder: Path) -> None:
    with tcp_side(tls=tls_folder) as left, tcp_side(tls=tls_folder) as right:
        pair = await connect(left, right)
        marker = b"attack at dawn!!"
        right.arena[:] = marker * (ARENA_NBYTES // len(marker))
        async with Relay(parse_address(right.endpoint.address)[2]) as relay:
            puller = pair.left._puller  # type: ignore[attr-defined]
            key = next(iter(endpoint_of(right)._servers.keys()))
            puller._connect = lambda: endpoint_of(left)._connect_data(relay.address(right.process), key, None)
            await pair.left.pull(region(0, ARENA_NBYTES), left.address, left)
            assert bytes(left.arena) == bytes(right.arena)
            assert len(relay.seen[1]) > ARENA_NBYTES and marker not in relay.seen[1]
        await finish(pair)


async def test_object_in_pieces(pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_pull, "PARALLEL_NBYTES", 10_000)
    monkeypatch.setattr(tcp_pull, "PIECE_NBYTES", 1001)
    monkeypatch.setattr(tls_connection, "PIECE_NBYTES", 300)
    pair.sides[1].arena[:] = os.urandom(ARENA_NBYTES)
    side = pair.sides[0]
    await pair.left.pull(region(0, ARENA_NBYTES), side.address, side)
    assert bytes(side.arena) == bytes(pair.sides[1].arena)


@pytest.mark.slow
async def test_a_large_object(tls_folder: Path) -> None:
    nbytes = tcp_pull.PARALLEL_NBYTES + 12_345
    with tcp_side(nbytes=nbytes, tls=tls_folder) as left, tcp_side(nbytes=nbytes, tls=tls_folder) as right:
        pair = await connect(left, right)
        block = os.urandom(1 << 20)
        for at in range(0, nbytes, 1 << 20):
            right.arena[at : at + (1 << 20)] = (at.to_bytes(8, "little") + block[8:])[: nbytes - at]
        await pair.left.pull(region(0, nbytes), left.address, left)
        assert left.arena == right.arena
        assert len(pair.left._puller._streams) > 1  # type: ignore[attr-defined]
        await finish(pair)


async def test_data_sockets_are_replaced_before_their_keys_wear_out(
    pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection.TlsChannel, "lasts", 2500)
    side, puller = pair.sides[0], pair.left._puller  # type: ignore[attr-defined]
    opened = []
    connect_data = puller._connect

    async def counting() -> object:
        opened.append(1)
        return await connect_data()

    puller._connect = counting
    for _ in range(9):
        await pair.left.pull(region(0, 1000), side.address, side)
    assert len(opened) == 3


async def test_owner_refuses(pair: ConnectedPair) -> None:
    endpoint_of(pair.sides[1]).authorize = lambda *_: False
    side = pair.sides[0]
    with pytest.raises(ObjectLost):
        await pair.left.pull(region(3, 10), side.address, side)


async def test_arena_that_is_smaller_than_announced(tls_folder: Path) -> None:
    with memfd(4096) as fd, tcp_side(tls=tls_folder) as left, mmap.mmap(fd, 4096) as arena:
        tls = endpoint_of(left)._tls
        process = secrets.token_bytes(16)
        right = Side(
            TcpEndpoint("127.0.0.1", process, bytes(range(32)), fd, ARENA_NBYTES, tls=tls), process, bytearray()
        )
        pair = await connect(left, right)
        arena[:3] = b"end"
        with pytest.raises(ConnectionLost):
            await pair.left.pull(region(4000, 200), left.address, left)
        await pair.left.pull(region(0, 3), left.address, left)
        assert bytes(left.arena[:3]) == b"end"
        await finish(pair)


async def test_owner_lets_go_of_its_arena_whatever_happens(tls_folder: Path) -> None:
    def mappings() -> int:
        return sum("test-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())

    nbytes = 32 << 20  # more bytes than are on the way at once
    with tcp_side(nbytes=nbytes, tls=tls_folder) as left, tcp_side(nbytes=nbytes, tls=tls_folder) as right:
        pair = await connect(left, right)
        before = mappings()
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        endpoint_of(right).authorize = lambda *_: loop.call_soon_threadsafe(asked.set) is not None
        pull = asyncio.create_task(pair.left.pull(region(0, nbytes), left.address, left))
        await asked.wait()
        await turns()
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        server = next(iter(endpoint_of(right)._servers.values()))
        while server._channels:
            await asyncio.sleep(0)
        while mappings() != before:
            await asyncio.sleep(0)
        await pair.left.pull(region(5000, 100), left.address, left)
        while mappings() != before:
            await asyncio.sleep(0)
        await finish(pair)


# ---- a process that is killed

VICTIM = """
import asyncio, os, pathlib, signal, sys
from tests.transport.outsiders import await_death
from tests.transport.tcp_arena import tcp_side

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with tcp_side(tls=pathlib.Path(sys.argv[1])) as side:
    side.endpoint.authorize = lambda process, object_id, offset, nbytes: object_id == 1 or die()
    asyncio.run(await_death(side))
"""


@pytest.mark.slow
async def test_peer_is_killed_during_a_pull(tls_folder: Path) -> None:
    with victim(VICTIM, str(tls_folder)) as (process, address), tcp_side(tls=tls_folder) as side:
        connection, recorder = await side.endpoint.connect(address), Recorder()
        connection.start(recorder)
        assert await recorder.wait_frames(1) == [b"hello"]
        await connection.pull(region(0, ARENA_NBYTES), side.address, side)
        with pytest.raises(ConnectionLost):
            await connection.pull(RemoteRegion(2, 0, ARENA_NBYTES), side.address, side)
        cause = await recorder.wait_lost()
        assert isinstance(cause, ConnectionLost)
        assert str(process.pid) in str(cause)
        await turns()
