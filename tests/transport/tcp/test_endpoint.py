"""TCP endpoints: the shared suite, and the peers that they let in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

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
from tests.transport.local_arena import TOKEN, memfd
from tests.transport.outsiders import ANSWERS, STRANGERS, Relay, rest, victim
from tests.transport.tcp_arena import tcp_side
from zcactor.errors import AuthenticationError, ConnectionLost, ObjectLost, ProtocolError, VersionMismatch
from zcactor.node.agent_main import raise_descriptor_limit
from zcactor.transport.base import Connection
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.frames import LENGTH_PREFIX
from zcactor.transport.stream import handshake_io, record_layer
from zcactor.transport.stream import listener as door
from zcactor.transport.stream.handshake import (
    HELLO_NBYTES,
    Handshake,
    HandshakeStatus,
    Introduction,
    Purpose,
    preamble,
    refusal,
)
from zcactor.transport.stream.listener import PER_SOURCE
from zcactor.transport.stream.record_layer import RECORD_NBYTES
from zcactor.transport.tcp import pull
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.data import REQUEST, Answer
from zcactor.transport.tcp.endpoint import _LINK, TcpEndpoint, _packed, parse_address

PATIENCE = 40.0
"""Seconds after which a test counts as hanging: a watchdog, no statement about speed."""
STRANGER_HELLO = preamble() + Introduction(b"s" * 16, 1, 0, 4, 64).encode()
"""The hello of a stranger who does everything but prove the token."""


class TestTcp(PullingSuite):
    flows = True

    @pytest.fixture(params=["127.0.0.1", "::1"])
    def sides(self, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
        with tcp_side(request.param) as left, tcp_side(request.param) as right:
            yield left, right


class TestSealedTcp(PullingSuite):
    """A connection is sealed if either side wants it."""

    @pytest.fixture(params=[(True, True), (True, False), (False, True)], ids=["both", "connector", "acceptor"])
    def sides(self, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
        with tcp_side(sealing=request.param[0]) as left, tcp_side(sealing=request.param[1]) as right:
            yield left, right

    async def test_is_sealed(self, pair: ConnectedPair) -> None:
        assert isinstance(pair.left, TcpConnection) and isinstance(pair.right, TcpConnection)
        assert pair.left.sealed and pair.right.sealed


@contextlib.contextmanager
def behind_a_wall(side: Side) -> Iterator[Side]:
    """Have peers find nobody at the address of `side`."""
    endpoint = endpoint_of(side)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        endpoint._link = lambda key: _LINK.pack(key, _packed("127.0.0.1"), nobody.getsockname()[1])  # type: ignore[method-assign]
        yield side


def ask_each_other(pair: ConnectedPair) -> None:
    """Do what frames do otherwise."""
    for one, other in ((pair.left, pair.right), (pair.right, pair.left)):
        assert isinstance(one, TcpConnection)
        one.ask_to_dial = one._puller.ask = other.dial


class TestOwnerBehindAWall(PullingSuite):
    """The left side cannot dial the right one, which has dialled it."""

    flows = True
    sealing = False

    @pytest.fixture
    def sides(self) -> Iterator[tuple[Side, Side]]:
        with tcp_side(sealing=self.sealing) as left, tcp_side() as right, behind_a_wall(right):
            yield left, right

    @pytest.fixture
    async def pair(self, sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConnectedPair]:
        monkeypatch.setattr(pull, "PAUSE", 0.0)
        left, right = sides
        turned = await connect(right, left)
        pair = ConnectedPair(turned.right, turned.left, sides, turned.accepted)
        ask_each_other(pair)
        yield pair
        await finish(pair)

    async def test_says_so(self, pair: ConnectedPair, source: bytes) -> None:
        left, right = pair.left, pair.right
        assert isinstance(left, TcpConnection) and isinstance(right, TcpConnection)
        assert "the peer opens" not in left.describe()
        await left.pull(region(0, 100), pair.sides[0].address, pair.sides[0])
        assert "refused" in left.describe() and "the peer opens" not in right.describe()


class TestSealedOwnerBehindAWall(TestOwnerBehindAWall):
    flows = False
    sealing = True


@pytest.fixture
async def pair() -> AsyncIterator[ConnectedPair]:
    with tcp_side() as left, tcp_side() as right:
        pair = await connect(left, right)
        yield pair
        await finish(pair)


@pytest.fixture
async def endpoint() -> AsyncIterator[TcpEndpoint]:
    """A listening endpoint that aborts every connection."""
    with tcp_side() as side:
        endpoint = endpoint_of(side)
        await endpoint.start(lambda connection: connection.abort())
        yield endpoint
        await endpoint.aclose()
        await turns()


def endpoint_of(side: Side) -> TcpEndpoint:
    assert isinstance(side.endpoint, TcpEndpoint)
    return side.endpoint


def stranger(token: bytes = TOKEN) -> TcpEndpoint:
    return TcpEndpoint("127.0.0.1", secrets.token_bytes(16), token, None, 0)


def call(endpoint: TcpEndpoint) -> socket.socket:
    """A bare socket that is connected to `endpoint`."""
    _, host, port = parse_address(endpoint.address)
    sock = socket.create_connection((host, port))
    sock.setblocking(False)
    return sock


async def authenticated(endpoint: TcpEndpoint, purpose: Purpose, process: bytes) -> socket.socket:
    """A bare socket that has done the handshake."""
    sock = call(endpoint)
    hello = Introduction(process, os.getpid(), 0, 16, 1024, purpose)
    await handshake_io.introduce(sock, Handshake(TOKEN, hello, accepting=False), endpoint.process.hex())
    return sock


# ---- addresses


@pytest.mark.parametrize(("host", "written"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0:0::1", "[::1]")])
async def test_address(host: str, written: str) -> None:
    with tcp_side(host) as side:
        assert side.endpoint.address == ""
        await side.endpoint.start(lambda _: None)
        process, place, port = parse_address(side.endpoint.address)
        assert side.endpoint.address == f"{side.process.hex()}@{written}:{port}"
        assert (process, place) == (side.process.hex(), written.strip("[]"))
        with pytest.raises(RuntimeError, match="listens already"):
            await side.endpoint.start(lambda _: None)
        await side.endpoint.aclose()


async def test_port_of_ones_choice(endpoint: TcpEndpoint) -> None:
    port = parse_address(endpoint.address)[2]
    await endpoint.aclose()
    again = TcpEndpoint("127.0.0.1", bytes(16), TOKEN, None, 0, port=port)
    await again.start(lambda _: None)
    assert again.address.endswith(f"@127.0.0.1:{port}")
    with pytest.raises(OSError, match="in use"):
        await TcpEndpoint("127.0.0.1", bytes(16), TOKEN, None, 0, port=port).start(lambda _: None)
    await again.aclose()


NAME = "a" * 32


@pytest.mark.parametrize(
    "address",
    ["", NAME, f"{NAME}@", f"{NAME}@127.0.0.1", f"{NAME}@127.0.0.1:", f"{NAME}@127.0.0.1:0", f"{NAME}@127.0.0.1:65536",
     f"{NAME}@127.0.0.256:80", f"{NAME}@localhost:80", f"{NAME}@::1:80", f"{NAME}@[::1:80", f"{NAME}@[127.0.0.1]x:80",
     f"{NAME[1:]}@127.0.0.1:80", f"{NAME.upper()}@127.0.0.1:80", f"{NAME}@127.0.0.1:80\n"],
)  # fmt: skip
async def test_malformed_address(address: str) -> None:
    with pytest.raises(ConnectionLost, match="is no address of a process") as lost:
        await stranger().connect(address)
    assert repr(address) in str(lost.value)


async def test_nobody_there(endpoint: TcpEndpoint) -> None:
    await endpoint.aclose()
    with pytest.raises(ConnectionLost, match=f"{endpoint.address} cannot be reached over TCP: Connection refused"):
        await stranger().connect(endpoint.address)


async def test_peer_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{NAME}@127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionLost, match=f"{address} did not answer"):
            await stranger().connect(address)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        TcpEndpoint("127.0.0.1", b"short", TOKEN, None, 0)
    with pytest.raises(ValueError, match="descriptor and a size"):
        TcpEndpoint("127.0.0.1", bytes(16), TOKEN, None, 4096)
    with pytest.raises(ValueError, match="localhost"):
        TcpEndpoint("localhost", bytes(16), TOKEN, None, 0)
    for wildcard in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="wildcard"):
            TcpEndpoint(wildcard, bytes(16), TOKEN, None, 0)


async def test_address_of_another_machine() -> None:
    elsewhere = TcpEndpoint("203.0.113.7", bytes(16), TOKEN, None, 0)
    assert "cannot listen at 203.0.113.7" in str(elsewhere.viability())
    with pytest.raises(OSError, match="assign"):
        await elsewhere.start(lambda _: None)


# ---- the peers that are let in


async def test_wrong_token(endpoint: TcpEndpoint) -> None:
    with pytest.raises(AuthenticationError, match="refused this process"):
        await stranger(secrets.token_bytes(32)).connect(endpoint.address)


async def test_impostor_at_the_address(endpoint: TcpEndpoint) -> None:
    with pytest.raises(AuthenticationError, match="in the place of"):
        await stranger().connect(f"{NAME}@{endpoint.address.split('@')[1]}")


VERSION_3 = bytes.fromhex("5a434143 0300 03 0b".replace(" ", ""))


async def test_connector_of_another_version(endpoint: TcpEndpoint) -> None:
    with call(endpoint) as sock:
        sock.send(VERSION_3 + bytes(200))
        assert await rest(sock) in (refusal(HandshakeStatus.VERSION), b"")  # a reset may overtake the reason


async def test_acceptor_of_another_version() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8 + HELLO_NBYTES)
        writer.write(VERSION_3 + bytes((HandshakeStatus.VERSION,)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    with pytest.raises(VersionMismatch, match="protocol 3 "):
        await stranger().connect(f"{NAME}@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()
    await turns()


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS.keys())
async def test_strangers(endpoint: TcpEndpoint, opening: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        with call(endpoint) as sock:
            with contextlib.suppress(BlockingIOError):
                sock.send(opening)
            assert await rest(sock) in ANSWERS
    while endpoint.pending:
        await asyncio.sleep(0)
    assert len(caplog.records) == 1


@pytest.mark.slow
async def test_a_thousand_half_open_handshakes(endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SILENT", 1000.0)
    monkeypatch.setattr(handshake_io, "ADMITTED_WITHIN", 0.0)
    raise_descriptor_limit()
    with contextlib.ExitStack() as crowd:
        for _ in range(PER_SOURCE):
            crowd.enter_context(call(endpoint))
        while endpoint.pending < PER_SOURCE:
            await asyncio.sleep(0)
        for _ in range(1000 - PER_SOURCE):
            assert await rest(crowd.enter_context(call(endpoint))) == refusal(HandshakeStatus.FULL)
        assert endpoint.pending == PER_SOURCE
        with pytest.raises(ConnectionLost):
            await stranger().connect(endpoint.address)
        crowd.close()
        while endpoint.pending:
            await asyncio.sleep(0)
    monkeypatch.undo()
    (await stranger().connect(endpoint.address)).abort()


async def test_hosts_have_places_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers from some addresses do not hold up connectors from another."""
    monkeypatch.setattr(door, "SILENT", 1000.0)
    with contextlib.ExitStack() as crowd:
        async with TcpEndpoint("127.0.0.9", b"e" * 16, TOKEN, None, 0) as endpoint:
            await endpoint.start(lambda connection: connection.abort())
            _, host, port = parse_address(endpoint.address)
            for last in (2, 3, 4):
                for _ in range(PER_SOURCE):
                    sock = crowd.enter_context(socket.socket())
                    sock.bind((f"127.0.0.{last}", 0))
                    sock.connect((host, port))
            while endpoint.pending < 3 * PER_SOURCE:
                await asyncio.sleep(0)
            (await stranger().connect(endpoint.address)).abort()
            crowd.close()


async def test_silent_strangers_make_place(endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "SILENT", 0.0)
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(call(endpoint)) for _ in range(128)]
        while endpoint.pending < PER_SOURCE:
            await asyncio.sleep(0)
        (await stranger().connect(endpoint.address)).abort()
        assert await rest(strangers[0]) == refusal(HandshakeStatus.FULL)  # the true connector tries again after that


async def heard(endpoint: TcpEndpoint, count: int, messages: int, missing: int) -> None:
    """Wait until so many peers have sent so many whole messages, and owe so many bytes of the next one."""
    async with asyncio.timeout(PATIENCE):
        while sum(
            (place.messages, place.patience and place.patience.missing) == (messages, missing)
            for place in endpoint._listener._pending.values()  # type: ignore[union-attr]
        ) < count:  # fmt: skip
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sent", "messages", "missing", "told"),
    [
        (b"Z", 0, 7, refusal(HandshakeStatus.FULL)),
        (preamble(), 1, 72, refusal(HandshakeStatus.FULL)),
        (preamble() + bytes(71), 1, 1, refusal(HandshakeStatus.FULL)),
        (STRANGER_HELLO, 2, 64, bytes((HandshakeStatus.FULL,))),
        (STRANGER_HELLO + bytes(63), 2, 1, bytes((HandshakeStatus.FULL,))),
    ],
    ids=["a byte", "preamble", "most of a hello", "hello", "most of a proof"],
)
async def test_bytes_keep_no_place(
    endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch, sent: bytes, messages: int, missing: int, told: bytes
) -> None:
    monkeypatch.setattr(door, "SILENT", 0.0)
    with contextlib.ExitStack() as crowd:
        strangers = [crowd.enter_context(call(endpoint)) for _ in range(PER_SOURCE)]
        for sock in strangers:
            sock.send(sent)
        await heard(endpoint, PER_SOURCE, messages, missing)
        (await stranger().connect(endpoint.address)).abort()
        assert (await rest(strangers[0])).endswith(told)


async def test_who_is_in_time_keeps_its_place(
    endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "SILENT", 1000.0)
    with contextlib.ExitStack() as crowd:
        for _ in range(PER_SOURCE):
            crowd.enter_context(call(endpoint)).send(preamble())
        await heard(endpoint, PER_SOURCE, 1, 72)
        assert await rest(crowd.enter_context(call(endpoint))) == refusal(HandshakeStatus.FULL)
        assert endpoint.pending == PER_SOURCE
        assert not caplog.records, "they are peers that come all at once"


async def test_addresses_that_are_known_have_places_of_their_own(
    endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strangers at many addresses, each of which sends a byte from time to time, do not keep connected peers out."""
    monkeypatch.setattr(door, "SILENT", 1000.0)
    listener: Any = endpoint._listener
    (await stranger().connect(endpoint.address)).abort()
    while endpoint.pending:
        await asyncio.sleep(0)
    assert list(listener._known) == ["127.0.0.1"]
    strangers = door.MAX_PENDING
    with contextlib.ExitStack() as crowd:
        for number in range(strangers):
            sock = crowd.enter_context(socket.socket())
            sock.bind((f"127.0.1.{1 + number // PER_SOURCE}", 0))
            sock.connect(("127.0.0.1", parse_address(endpoint.address)[2]))
            sock.send(b"Z")
        await heard(endpoint, strangers, 0, 7)
        with socket.socket() as another:
            another.bind(("127.0.1.9", 0))
            another.connect(("127.0.0.1", parse_address(endpoint.address)[2]))
            another.setblocking(False)
            assert await rest(another) == refusal(HandshakeStatus.FULL)
        (await stranger().connect(endpoint.address)).abort()


def test_the_number_of_known_addresses_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "KNOWN", 2)
    listener = door.Listener.__new__(door.Listener)
    listener._known = {}
    for source in ("a", "b", "a", None, "c"):
        listener._met(source)
    assert list(listener._known) == ["a", "c"]


async def test_silence_ends(endpoint: TcpEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.02)
    for sent in (b"", preamble() + bytes(30)):
        with call(endpoint) as sock:
            sock.send(sent)
            assert await rest(sock) == b""


async def test_purpose_of_another_transport(endpoint: TcpEndpoint) -> None:
    with await authenticated(endpoint, Purpose.WRITABLE_ARENA, b"s" * 16) as sock:
        assert await rest(sock) == b""


# ---- connections


async def test_sockets_notice_within_seconds_that_a_host_is_gone(pair: ConnectedPair) -> None:
    wanted = {
        socket.TCP_NODELAY: 1,
        socket.TCP_KEEPIDLE: 2,
        socket.TCP_KEEPINTVL: 1,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_USER_TIMEOUT: 60_000,
    }
    for connection in (pair.left, pair.right):
        sock = connection._sock  # type: ignore[attr-defined]
        assert {option: sock.getsockopt(socket.IPPROTO_TCP, option) for option in wanted} == wanted
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_truncated_frame(pair: ConnectedPair) -> None:
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    send(pair.left, [b"whole"])
    buffer, offset = pair.left.reserve(20)
    buffer[offset : offset + 20] = b"\x64\0\0\0" + bytes(16)
    pair.left.commit(20)
    await pair.left.aclose()
    assert isinstance(await right.wait_lost(), ConnectionLost)
    assert right.frames == [b"whole"]


async def test_smaller_numbers_hold() -> None:
    sides = [
        Side(TcpEndpoint("127.0.0.1", process, TOKEN, None, 0, depth, limit), process, bytearray())
        for process, depth, limit in [(b"a" * 16, 100, 40_000), (b"b" * 16, 300, 10_000)]
    ]
    pair = await connect(*sides)
    assert pair.left.recv_depth == pair.right.recv_depth == 100
    assert pair.left.eager_limit == pair.right.eager_limit == 10_000
    with pytest.raises(ProtocolError):
        await pair.left.pull(region(0, 1), 0, None)
    await finish(pair)


async def test_endpoint_that_goes_on_by_other_means() -> None:
    class Talking(TcpEndpoint):
        heard = b""

        async def _make_connection(self, sock: socket.socket, hello: Introduction, *, accepting: bool) -> Connection:
            await handshake_io.send_all(sock, b"B" if accepting else b"A")
            self.heard = await handshake_io.receive_exactly(sock, 1)
            return await super()._make_connection(sock, hello, accepting=accepting)

    sides = [
        Side(Talking("127.0.0.1", process, TOKEN, None, 0), process, bytearray()) for process in (b"a" * 16, b"b" * 16)
    ]
    pair = await connect(*sides)
    assert [endpoint_of(side).__dict__["heard"] for side in sides] == [b"B", b"A"]
    recorder = Recorder()
    pair.right.start(recorder)
    send(pair.left, [b"over TCP after all"])
    await recorder.wait_frames(1)
    await finish(pair)


# ---- sealed connections


@contextlib.asynccontextmanager
async def relayed(
    change: Callable[[int, int, bytes], bytes] | None = None, *, sealing: bool = True
) -> AsyncIterator[tuple[Relay, tuple[Side, Side], asyncio.Queue[Connection]]]:
    """Two sides, of which the right one listens, and a relay between them."""
    with tcp_side(sealing=sealing) as left, tcp_side(sealing=sealing) as right:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        await right.endpoint.start(accepted.put_nowait)
        async with Relay(parse_address(right.endpoint.address)[2]) as relay:
            if change is not None:
                relay.change = change
            yield relay, (left, right), accepted
        await right.endpoint.aclose()
        await turns()


@contextlib.asynccontextmanager
async def watched(
    change: Callable[[int, int, bytes], bytes] | None = None, *, sealing: bool = True
) -> AsyncIterator[tuple[Relay, ConnectedPair, tuple[Recorder, Recorder]]]:
    """A connection through a relay that sees every byte, with both ends started."""
    async with relayed(change, sealing=sealing) as (relay, sides, accepted):
        left = await sides[0].endpoint.connect(relay.address(sides[1].process))
        pair, recorders = ConnectedPair(left, await accepted.get(), sides, accepted), (Recorder(), Recorder())
        pair.left.start(recorders[0])
        pair.right.start(recorders[1])
        yield relay, pair, recorders
        pair.left.abort()
        pair.right.abort()
        await turns()


@pytest.mark.parametrize("sealing", [True, False])
async def test_who_listens_on_the_way(sealing: bool) -> None:
    marker = b"attack at dawn"
    async with watched(sealing=sealing) as (relay, pair, (left, right)):
        for size in (0, 10, 1000, 30_000):
            send(pair.left, [marker + bytes(size)] * 3)
            send(pair.right, [bytes(size) + marker] * 3)
        assert all(marker in frame for frame in await left.wait_frames(12) + await right.wait_frames(12))
        for seen in relay.seen:
            assert (marker not in seen) is sealing
            assert len(seen) > 12 * len(marker) + 3 * 31_000


async def test_a_sealed_connection_outlives_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte is sent for a new key: the bytes on the way are the records alone."""
    monkeypatch.setattr(record_layer, "USES_PER_KEY", 3)
    async with watched() as (relay, pair, (left, right)):
        before = [len(seen) for seen in relay.seen]
        for number in range(50):
            send(pair.left, [b"%3d" % number])
            send(pair.right, [b"%3d" % number])
            await left.wait_frames(number + 1)
            await right.wait_frames(number + 1)
        assert left.frames == right.frames == [b"%3d" % number for number in range(50)]
        assert not left.lost and not right.lost
        record = RECORD_NBYTES + LENGTH_PREFIX + 3
        assert [len(seen) - at for seen, at in zip(relay.seen, before, strict=True)] == [50 * record] * 2


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("how", ["forged", "too long", "empty", "repeated", "sent back"])
async def test_records_that_are_not_the_peers(direction: int, how: str) -> None:
    async with watched() as (relay, pair, recorders):
        other = await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)
        other_end, heard = await pair.accepted.get(), Recorder()
        other_end.start(heard)
        started = [len(seen) for seen in relay.seen]
        send(pair.left, [b"sealed"])
        send(pair.right, [b"sealed"])
        for recorder in recorders:
            await recorder.wait_frames(1)
        record = [bytes(seen[at:]) for seen, at in zip(relay.seen, started, strict=True)]
        relay.inject(
            direction,
            {
                "forged": b"\x06\0\0\0" + bytes(22),
                "too long": b"\x01\0\x10\0",
                "empty": bytes(4),
                "repeated": record[direction],
                "sent back": record[1 - direction],
            }[how],
        )
        victim = recorders[1 - direction]
        assert isinstance(await victim.wait_lost(), ProtocolError)
        assert isinstance(await recorders[direction].wait_lost(), ConnectionLost)
        assert victim.frames == [b"sealed"]
        send(other, [b"untouched"])
        assert await heard.wait_frames(1) == [b"untouched"]
        other.abort()
        other_end.abort()


@pytest.mark.parametrize("after", [0, 3, 4, 5, 30, 63])
async def test_record_that_is_changed_on_its_way(after: int) -> None:
    end: list[int] = []

    def change(direction: int, at: int, data: bytes) -> bytes:
        if direction == 0 and end and at <= end[0] + after < at + len(data):
            place = end[0] + after - at
            return data[:place] + bytes((data[place] ^ 1,)) + data[place + 1 :]
        return data

    async with watched(change) as (relay, pair, (_, right)):
        end.append(len(relay.seen[0]))
        send(pair.left, [b"x" * 40])
        for _ in range(3):
            send(pair.left, [b"y" * 40])
        assert isinstance(await right.wait_lost(), ProtocolError)
        assert right.frames == []


@pytest.mark.parametrize("direction", [0, 1])
@pytest.mark.parametrize("first", range(5))
async def test_connection_that_ends_after_any_byte_of_the_handshake(direction: int, first: int) -> None:
    whole = (8 + HELLO_NBYTES + 64, 9 + HELLO_NBYTES + 32 + 33)[direction]
    for cut in range(first, whole + 60, 5):  # also within the first frames after the handshake

        def change(where: int, at: int, data: bytes, cut: int = cut) -> bytes:
            if where == direction and at + len(data) > cut:
                relay.hang_up()
                return data[: max(0, cut - at)]
            return data

        async with relayed(change) as (relay, (left, right), accepted):
            try:
                connection = await left.endpoint.connect(relay.address(right.process))
            except ConnectionLost:
                pass
            else:
                assert cut >= whole
                connection.abort()
            while endpoint_of(right).pending:
                await asyncio.sleep(0)
            while not accepted.empty():
                assert cut >= whole
                accepted.get_nowait().abort()


async def test_sealing_cannot_be_turned_off_on_the_way() -> None:
    flag = 8 + HELLO_NBYTES - 3

    def change(direction: int, at: int, data: bytes) -> bytes:
        place = flag + direction - at
        return data[:place] + b"\0" + data[place + 1 :] if 0 <= place < len(data) else data

    async with relayed(change) as (relay, (left, right), accepted):
        with pytest.raises(AuthenticationError):
            await left.endpoint.connect(relay.address(right.process))
        assert accepted.empty()


@pytest.mark.parametrize("missing", ["connector", "acceptor"])
async def test_cryptography_is_missing_on_one_side(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    with tcp_side(sealing=missing == "acceptor") as left, tcp_side(sealing=missing == "connector") as right:
        without = endpoint_of(left if missing == "connector" else right)
        without._exchange = lambda: None
        await right.endpoint.start(lambda connection: connection.abort())
        place = "here" if missing == "connector" else "there"
        with pytest.raises(AuthenticationError, match=rf"pip install 'zcactor\[cluster\]' {place}"):
            await left.endpoint.connect(right.endpoint.address)
        while endpoint_of(right).pending:
            await asyncio.sleep(0)
        assert f"'zcactor[cluster]' {'there' if missing == 'connector' else 'here'}" in caplog.text
        await right.endpoint.aclose()


def test_sealing_is_not_viable_without_cryptography() -> None:
    endpoint = TcpEndpoint("127.0.0.1", bytes(16), TOKEN, None, 0, sealing=True)
    assert endpoint.viability() is None
    endpoint._exchange = lambda: None
    assert str(endpoint.viability()).endswith("pip install 'zcactor[cluster]'")


@pytest.mark.parametrize("opening", STRANGERS.values(), ids=STRANGERS.keys())
async def test_strangers_where_frames_are_sealed(opening: bytes) -> None:
    with tcp_side(sealing=True) as side:
        await side.endpoint.start(lambda connection: connection.abort())
        with call(endpoint_of(side)) as sock:
            with contextlib.suppress(BlockingIOError):
                sock.send(opening)
            assert await rest(sock) in ANSWERS
        await side.endpoint.aclose()


# ---- pulls


async def test_owner_refuses(pair: ConnectedPair) -> None:
    asked: list[tuple[object, int, int, int]] = []
    threads: set[int] = set()

    def authorize(*request: object) -> bool:
        asked.append(request)  # type: ignore[arg-type]
        threads.add(threading.get_ident())
        return False

    endpoint_of(pair.sides[1]).authorize = authorize
    side, recorder = pair.sides[0], Recorder()
    pair.right.start(recorder)
    for _ in range(3):
        with pytest.raises(ObjectLost):
            await pair.left.pull(region(3, 10), side.address, side)
    assert asked == [(recorder, 1, 3, 10)] * 3
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    endpoint_of(pair.sides[1]).authorize = lambda *_: True
    pair.sides[1].arena[3:13] = b"0123456789"
    await pair.left.pull(region(3, 10), side.address, side)
    assert bytes(side.arena[:10]) == b"0123456789"


async def test_object_in_pieces(pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "PARALLEL_NBYTES", 10_000)
    monkeypatch.setattr(pull, "PIECE_NBYTES", 1001)
    pair.sides[1].arena[:] = os.urandom(ARENA_NBYTES)
    side = pair.sides[0]
    await pair.left.pull(region(0, ARENA_NBYTES), side.address, side)
    assert bytes(side.arena) == bytes(pair.sides[1].arena)


async def test_peer_that_does_not_listen_cannot_be_pulled_from(endpoint: TcpEndpoint) -> None:
    with tcp_side() as left, tcp_side() as right:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        await right.endpoint.start(accepted.put_nowait)
        connection = await left.endpoint.connect(right.endpoint.address)
        other = await accepted.get()
        await connection.pull(region(0, 10), left.address, left)
        with pytest.raises(ConnectionLost):
            await other.pull(region(0, 10), right.address, right)
        connection.abort()
        other.abort()
        await right.endpoint.aclose()
        await turns()


async def test_data_socket_without_a_connection(endpoint: TcpEndpoint, pair: ConnectedPair) -> None:
    key = next(iter(endpoint_of(pair.sides[1])._servers.keys()))
    for process, shown in [(pair.sides[0].process, bytes(16)), (b"s" * 16, key)]:
        with await authenticated(endpoint_of(pair.sides[1]), Purpose.DATA, process) as sock:
            sock.send(shown)
            assert await rest(sock) == bytes((HandshakeStatus.AUTH,))
    with await authenticated(endpoint_of(pair.sides[1]), Purpose.DATA, pair.sides[0].process) as sock:
        sock.send(key)
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(sock, 10) == bytes((HandshakeStatus.OK,))
        sock.send(b"\xff" * REQUEST.size)
        assert await loop.sock_recv(sock, 10) == bytes((Answer.REFUSED,))
        sock.send(b"garbage" * 5)
        assert await loop.sock_recv(sock, 10) == bytes((Answer.REFUSED,))
        pair.right.abort()
        assert await rest(sock) == b""


# ---- a process that is killed

VICTIM = """
import asyncio, os, signal
from tests.transport.outsiders import await_death
from tests.transport.tcp_arena import tcp_side

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

with tcp_side() as side:
    side.endpoint.authorize = lambda process, object_id, offset, nbytes: object_id == 1 or die()
    asyncio.run(await_death(side))
"""


@pytest.mark.slow
async def test_peer_is_killed_during_a_pull() -> None:
    with victim(VICTIM) as (process, address), tcp_side() as side:
        connection, recorder = await side.endpoint.connect(address), Recorder()
        connection.start(recorder)
        assert await recorder.wait_frames(1) == [b"hello"]
        await connection.pull(region(0, ARENA_NBYTES), side.address, side)
        fatal = RemoteRegion(2, 0, ARENA_NBYTES)
        with pytest.raises(ConnectionLost):
            await connection.pull(fatal, side.address, side)
        cause = await recorder.wait_lost()
        assert isinstance(cause, ConnectionLost)
        assert str(process.pid) in str(cause)
        with pytest.raises(ConnectionLost):
            await connection.pull(region(0, 10), side.address, side)


async def test_owner_that_announces_more_than_it_has() -> None:
    with tcp_side() as side, memfd(ARENA_NBYTES) as fd:
        liar = TcpEndpoint("127.0.0.1", secrets.token_bytes(16), TOKEN, fd, 2 * ARENA_NBYTES)
        accepted: list[Connection] = []
        await liar.start(accepted.append)
        connection = await side.endpoint.connect(liar.address)
        connection.start(Recorder())
        for offset, nbytes in ((ARENA_NBYTES, 64), (ARENA_NBYTES - 32, 64)):
            with pytest.raises(ConnectionLost, match="did not send 64 bytes"):
                await connection.pull(region(offset, nbytes), side.address, side)
        with pytest.raises(ProtocolError, match="arena"):
            await connection.pull(region(2 * ARENA_NBYTES - 1, 2), side.address, side)
        await connection.pull(region(0, 64), side.address, side)  # bytes that exist still come
        for one in (connection, *accepted):
            one.abort()
        await liar.aclose()
        await turns()


async def test_ports_that_are_given() -> None:
    with tcp_side() as first, tcp_side() as second, tcp_side() as third, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        one, two, three = (endpoint_of(side) for side in (first, second, third))
        one.ports = two.ports = range(port, port + 1)
        await one.start(lambda connection: connection.abort())
        assert parse_address(one.address)[2] == port
        with pytest.raises(OSError, match=rf"each of the ports {port}-{port} is in use at 127.0.0.1;.*ZCACTOR_PORTS"):
            await two.start(lambda connection: connection.abort())
        three.ports = range(port, port + 20)
        await three.start(lambda connection: connection.abort())
        assert port < parse_address(three.address)[2] < port + 20
        for endpoint in (one, three):
            await endpoint.aclose()
        await turns()
