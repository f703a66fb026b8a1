"""How two processes come to RDMA, or stay with TCP: both to the same, with the reason, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.connection import Pair, Recorder, Side, connect, finish, send, turns
from tests.transport.local_arena import TOKEN
from tests.transport.verbs.sides import device_of, endpoint_of, engine_of, fake_sides, verbs_side
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport import greeting
from zcactor.transport.auth import Handshake, Hello, Purpose
from zcactor.transport.base import Connection, RemoteRegion
from zcactor.transport.sealing import SealedSocket
from zcactor.transport.tcp import parse_address
from zcactor.transport.tcp_connection import TcpConnection
from zcactor.transport.tls import load_tls
from zcactor.transport.tls_connection import TlsConnection
from zcactor.transport.verbs import endpoint as module
from zcactor.transport.verbs.base import LinkLayer
from zcactor.transport.verbs.bootstrap import Resume, encode
from zcactor.transport.verbs.connection import VerbsConnection
from zcactor.transport.verbs.fake import FakeBinding, FakeFabric
from zcactor.transport.verbs.load import Absent
from zcactor.transport.verbs.pair import QueuePairs


@pytest.fixture
def sides(fabric: FakeFabric) -> Iterator[tuple[Side, Side]]:
    with fake_sides(fabric) as sides:
        yield sides


@contextlib.asynccontextmanager
async def joined(sides: tuple[Side, Side]) -> AsyncIterator[Pair]:
    """A connection between them."""
    try:
        pair = await connect(*sides)
        yield pair
        await finish(pair)
    finally:
        for side in sides:
            await side.endpoint.aclose()


async def works(pair: Pair) -> None:
    """Frames go both ways."""
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    send(pair.left, [b"there"])
    send(pair.right, [b"back"])
    assert await right.wait_frames(1) == [b"there"]
    assert await left.wait_frames(1) == [b"back"]


async def fell_back(sides: tuple[Side, Side], left: str, right: str) -> None:
    """They connect over TCP, each end knowing its reason, and nothing of RDMA is left in use."""
    async with joined(sides) as pair:
        assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
        assert left in pair.left.rejected["verbs"]
        assert right in pair.right.rejected["verbs"]
        await works(pair)
        await turns(20)
        for side in sides:
            engine = endpoint_of(side).engine
            assert engine is None or engine.connections == 0


async def test_both_can(sides: tuple[Side, Side], fabric: FakeFabric) -> None:
    async with joined(sides) as pair:
        assert isinstance(pair.left, VerbsConnection) and isinstance(pair.right, VerbsConnection)
        assert pair.left.rejected == pair.right.rejected == {}
        await works(pair)
    assert (fabric.statistics().rnr, fabric.statistics().retries) == (0, 0)


async def test_several_peers_share_one_engine(sides: tuple[Side, Side]) -> None:
    async with joined(sides) as pair:
        again = await sides[0].endpoint.connect(sides[1].endpoint.address)
        assert again.kind == "verbs"
        assert engine_of(sides[0]).connections == engine_of(sides[1]).connections == 2
        again.abort()
        (await pair.accepted.get()).abort()


@pytest.mark.parametrize("able", [True, False])
async def test_what_goes_through_the_socket_is_sealed(fabric: FakeFabric, able: bool) -> None:
    fabric.add_nic("fake0")
    fabric.add_nic("fake1")
    name = "fake1" if able else "none"
    with (
        verbs_side(lambda: fabric.binding("fake0"), sealing=True) as left,
        verbs_side(lambda: FakeBinding(fabric, (name,)), sealing=True) as right,
    ):
        async with joined((left, right)) as pair:
            assert pair.left.kind == pair.right.kind == ("verbs" if able else "tcp")
            for connection in (pair.left, pair.right):
                if isinstance(connection, VerbsConnection):
                    assert connection._link is not None and isinstance(connection._link._sock, SealedSocket)
                else:
                    assert isinstance(connection, TcpConnection) and connection.sealed
            await works(pair)
            right.arena[:5] = b"bytes"
            await pair.left.pull(RemoteRegion(1, 0, 5), left.address, left)
            assert bytes(left.arena[:5]) == b"bytes"


async def test_tls_goes_before_rdma(fabric: FakeFabric, tls_folder: Path) -> None:
    fabric.add_nic("fake0")
    tls = load_tls(tls_folder)
    with (
        verbs_side(lambda: fabric.binding("fake0"), tls=tls) as left,
        verbs_side(lambda: fabric.binding("fake0"), tls=tls) as right,
    ):
        async with joined((left, right)) as pair:
            for connection in (pair.left, pair.right):
                assert isinstance(connection, TlsConnection) and connection.kind == "tcp"
                assert "tls is set" in connection.rejected["verbs"]
            await works(pair)


# ---- what is missing at one end


@contextlib.contextmanager
def mixed(fabric: FakeFabric, binding: Callable[[], Any], **settings: Any) -> Iterator[tuple[Side, Side]]:
    """One side with a device, and one with that binding."""
    fabric.add_nic("fake0")
    with verbs_side(lambda: fabric.binding("fake0")) as left, verbs_side(binding, **settings) as right:
        yield left, right


@pytest.mark.parametrize("turned", [False, True])
async def test_no_binding(fabric: FakeFabric, turned: bool) -> None:
    from zcactor.transport.verbs.load import bindings

    absent = bindings("none")
    assert isinstance(absent, Absent)
    with mixed(fabric, lambda: absent) as (able, other):
        reason = "none"
        if turned:
            await fell_back((other, able), reason, "the peer cannot use RDMA: ")
        else:
            await fell_back((able, other), "the peer cannot use RDMA: ", reason)
        assert endpoint_of(other).problem


@pytest.mark.parametrize("turned", [False, True])
async def test_no_device(fabric: FakeFabric, turned: bool) -> None:
    with mixed(fabric, lambda: FakeBinding(fabric, ("none",))) as sides:
        reasons = "the peer cannot use RDMA: there is no RDMA device", "there is no RDMA device"
        await fell_back(sides[::-1] if turned else sides, *(reasons[::-1] if turned else reasons))


async def test_neither_can(fabric: FakeFabric) -> None:
    def none() -> FakeBinding:
        return FakeBinding(fabric, ("none",))

    with verbs_side(none) as left, verbs_side(none) as right:
        await fell_back((left, right), "no RDMA device", "no RDMA device")


@pytest.mark.parametrize("turned", [False, True])
async def test_other_fabric(fabric: FakeFabric, turned: bool) -> None:
    fabric.add_nic("ib0", link_layer=LinkLayer.INFINIBAND)
    with mixed(fabric, lambda: fabric.binding("ib0")) as sides:
        await fell_back(sides[::-1] if turned else sides, "different fabrics", "different fabrics")


@pytest.mark.parametrize("number", [0, 1])
async def test_device_without_memory_for_a_connection(sides: tuple[Side, Side], number: int) -> None:
    for side in sides:
        assert endpoint_of(side).open_engine() is not None
    nic = device_of(sides[number]).nic
    nic.pin_limit = nic.pinned
    reasons = ["the peer cannot use RDMA: queue pairs cannot be made"] * 2
    reasons[number] = "queue pairs cannot be made"
    await fell_back(sides, *reasons)


@pytest.mark.parametrize("number", [0, 1])
async def test_cable_is_out(sides: tuple[Side, Side], fabric: FakeFabric, number: int) -> None:
    for side in sides:
        endpoint_of(side).open_engine()
    fabric.nics[f"fake{number}"].set_active(False)
    await fell_back(sides, "RETRY_EXC", "RETRY_EXC")


# ---- what fails at a step


def at_step(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, act: Callable[[Any], None], *, on: str) -> None:
    """Run `act` before method `name` of `cls` does its work, on the device of that name only."""
    original = getattr(cls, name)

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = self if isinstance(self, QueuePairs) else self.pairs
        if pairs.engine.device.name == on:
            act(pairs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, replaced)


@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_connecting_fails(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    def fail(_: QueuePairs) -> None:
        raise OSError(101, "Network is unreachable")

    at_step(monkeypatch, QueuePairs, "connect", fail, on=on)
    reasons = ["at the peer: the queue pairs cannot be connected"] * 2
    reasons[on == "fake1"] = "the queue pairs cannot be connected"
    await fell_back(sides, *reasons)


@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_proof_delivers_other_bytes(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, on: str) -> None:
    def spoil(pairs: QueuePairs) -> None:
        pairs.engine._proof[17] ^= 1

    at_step(monkeypatch, QueuePairs, "connect", spoil, on=on)  # before anyone READs it
    await fell_back(sides, "delivered other bytes", "delivered other bytes")


@pytest.mark.parametrize("on", ["fake0", "fake1"])
async def test_device_dies_at_the_proof(
    sides: tuple[Side, Side], fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    at_step(monkeypatch, VerbsConnection, "prove", lambda pairs: fabric.kill(pairs.engine.device), on=on)
    async with joined(sides) as pair:
        assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
        assert "verbs" in pair.left.rejected and "verbs" in pair.right.rejected
        await works(pair)


async def test_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests neither succeed nor fail: the time limit decides."""
    monkeypatch.setattr(module, "PROOF_SECONDS", 0.05)
    fabric = FakeFabric()
    with fake_sides(fabric) as sides:
        for side in sides:
            endpoint_of(side).open_engine()
        fabric.manual = True
        async with joined(sides) as pair:
            assert (pair.left.kind, pair.right.kind) == ("tcp", "tcp")
            assert "neither a message nor a READ got through in 0.05 s" in pair.left.rejected["verbs"]
            await works(pair)
        fabric.manual = False
        fabric.posted()
        await turns(20)


@pytest.mark.parametrize("refuses", [0, 1])
async def test_refusing_instead_of_falling_back(fabric: FakeFabric, refuses: int) -> None:
    fabric.add_nic("fake0")
    settings = [{"falls_back": number != refuses} for number in range(2)]
    with (
        verbs_side(lambda: fabric.binding("fake0"), **settings[0]) as left,
        verbs_side(lambda: FakeBinding(fabric, ("none",)), **settings[1]) as right,
    ):
        accepted: list[Connection] = []
        for side in (left, right):
            await side.endpoint.start(accepted.append)
        with pytest.raises(ConnectionLost):
            await left.endpoint.connect(right.endpoint.address)
        await turns(20)
        assert not accepted
        assert engine_of(left).connections == 0
        for side in (left, right):
            await side.endpoint.aclose()


# ---- strangers


async def authenticated(side: Side) -> socket.socket:
    """A bare socket to `side` that has done the handshake."""
    endpoint = endpoint_of(side)
    _, host, port = parse_address(endpoint.address)
    sock = socket.create_connection((host, port))
    sock.setblocking(False)
    hello = Hello(secrets.token_bytes(16), os.getpid(), 4096, 16, 1024, Purpose.PEER)
    await greeting.introduce(sock, Handshake(TOKEN, hello, accepting=False), endpoint.process.hex())
    return sock


GARBAGE = {
    "nothing": b"",
    "half a length": b"\x10\x00",
    "half a message": b"\x10\x00\x00\x00abc",
    "too long": b"\xff\xff\xff\xff",
    "rubbish": b"\x04\x00\x00\x00abcd",
    "another message": encode(Resume(1)),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_instead_of_an_offer(sides: tuple[Side, Side], what: str) -> None:
    accepted: list[Connection] = []
    side = sides[0]
    await side.endpoint.start(accepted.append)
    with await authenticated(side) as sock:
        sock.send(GARBAGE[what])
        sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.get_running_loop().sock_recv(sock, 4096):
                pass
    assert not accepted
    assert engine_of(side).connections == 0
    await side.endpoint.aclose()


async def test_garbage_instead_of_a_verdict(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer makes its offer, and then goes on with something else."""

    async def both(sock: socket.socket, reason: str) -> str:
        del reason
        await greeting.send_all(sock, encode(Resume(1)))
        raise ProtocolError("this end has had enough")

    original = module._both
    turn = 0

    async def one_of_two(sock: socket.socket, reason: str) -> str:
        nonlocal turn
        turn += 1
        return await (both if turn == 1 else original)(sock, reason)

    monkeypatch.setattr(module, "_both", one_of_two)
    for side in sides:
        await side.endpoint.start(lambda connection: connection.abort())
    with pytest.raises((ConnectionLost, ProtocolError)):
        await sides[0].endpoint.connect(sides[1].endpoint.address)
    await turns(50)
    for side in sides:
        assert engine_of(side).connections == 0
        await side.endpoint.aclose()


@pytest.mark.parametrize("step", [1, 2, 3, 4])
async def test_peer_dies_at_each_step(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    told = 0
    accepted: list[Connection] = []
    original = module._tell

    async def die(sock: socket.socket, message: Any) -> None:
        nonlocal told
        told += 1
        if told == step:
            raise ConnectionLost("this end has ended")
        await original(sock, message)

    monkeypatch.setattr(module, "_tell", die)
    for side in sides:
        await side.endpoint.start(accepted.append)
    with contextlib.suppress(ConnectionLost):
        (await sides[0].endpoint.connect(sides[1].endpoint.address)).abort()
    await turns(50)
    for connection in accepted:
        connection.abort()
    await turns(20)
    for side in sides:
        assert engine_of(side).connections == 0
        await side.endpoint.aclose()


async def test_long_reason(sides: tuple[Side, Side]) -> None:
    endpoint = endpoint_of(sides[1])
    endpoint._opened = True
    endpoint.problem = "no " * 1000
    await fell_back(sides, "the peer cannot use RDMA: no no", "no no")


# ---- the end


async def test_dispose(sides: tuple[Side, Side], fabric: FakeFabric) -> None:
    async with joined(sides):
        pass
    devices = [device_of(side) for side in sides]
    for side in sides:
        side.endpoint.dispose()
        side.endpoint.dispose()
    assert all(device.closed and len(device.ledger) == 0 for device in devices)
    assert all(nic.pinned == 0 for nic in fabric.nics.values())
