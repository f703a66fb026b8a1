"""Two sessions talking over a connection, with hubs that record and holders that count."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.conformance.connection import turns
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.call import Call
from zcactor.rpc.codec import encode_hello_into, encode_into, frame_size
from zcactor.rpc.counters import new_counters
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import PROTOCOL_VERSION, Flags, Hello, Kind, Status
from zcactor.rpc.parts import Part
from zcactor.rpc.protocol import CallState
from zcactor.rpc.session import Session
from zcactor.rpc.stream import Stream
from zcactor.transport.base import PeerInfo
from zcactor.transport.local_connection import LocalConnection
from zcactor.transport.loopback import Faults, loopback_pair

DEPTH = 16


class Held:
    """Something that can be leased."""

    def __init__(self, object_id: int = 7, owner: bytes | None = None) -> None:
        self.object_id = object_id
        self.owner = owner
        self.grants = 0
        self.lost = False

    def grant(self, session: Session) -> tuple[bytes, int, int]:
        if self.lost:
            raise ObjectLost("its owner is gone")
        self.grants += 1
        session.leases.grant(self.object_id, self)
        return self.owner or session.process, self.object_id, 0


class Hub:
    """Records what a session tells it."""

    def __init__(self, process: bytes) -> None:
        self.process = process
        self.counters = new_counters()
        self.hosts: dict[int, Any] = {}
        self.dtype_codes: dict[Any, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.received: list[Incoming] = []
        self.cancelled: list[Incoming] = []
        self.lost: list[tuple[Exception | None, list[Call]]] = []
        self.imported: list[Region] = []
        self.late: list[asyncio.Future[Part]] = []
        self.answer: Callable[[Incoming], None] | None = None

    def share(self, array: Any, address: int, nbytes: int) -> None:
        raise AssertionError(f"{type(array)} is no array of the store")

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.process, os.getpid(), "host", "3.11.0", "worker")

    def call_received(self, incoming: Incoming) -> None:
        self.received.append(incoming)
        if self.answer is not None:
            self.answer(incoming)

    def cancel_received(self, incoming: Incoming) -> None:
        self.cancelled.append(incoming)

    def import_region(self, session: Session, region: Region) -> tuple[Part, asyncio.Future[Part] | None]:
        self.imported.append(region)
        part = Part(region.kind, ("lease", region.id), region.offset, region.nbytes)
        if region.owner == session.peer_process:
            return part, None
        future: asyncio.Future[Part] = session.loop.create_future()
        self.late.append(future)
        return Part(0, None, 0, 0), future

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        self.lost.append((cause, calls))


class Pair:
    """Two sessions; `a` calls, `b` is called."""

    def __init__(self, kind: str = "loopback", depth: int = DEPTH, faults: Faults | None = None) -> None:
        loop = asyncio.get_running_loop()
        names = secrets.token_bytes(16), secrets.token_bytes(16)
        connections: Sequence[Any]
        if kind == "loopback":
            connections = loopback_pair(processes=names, recv_depth=depth, seed=1, faults=faults or Faults())
        else:
            ends = socket.socketpair()
            for end in ends:
                end.setblocking(False)
            connections = [
                LocalConnection(
                    end,
                    PeerInfo(names[1 - i], os.getpid(), os.getuid(), 0),
                    recv_depth=depth,
                    eager_limit=16384,
                    mapping=None,
                    map_writable=no_arena,
                )
                for i, end in enumerate(ends)
            ]
        self.hubs = Hub(names[0]), Hub(names[1])
        self.a, self.b = (Session(hub, end, loop) for hub, end in zip(self.hubs, connections, strict=True))
        self.a.start()
        self.b.start()

    def call(self, payload: bytes = b"", parts: Sequence[Part] = (), *, code: int = 0) -> Call:
        call = Call(self.hubs[0].process, self.a.loop, self.a.thread)
        call.refs = 1
        self.a.send_call(call, 2, code, 0, 0, payload, parts)
        return call

    async def settle(self) -> None:
        await turns(30)

    async def close(self) -> None:
        self.a.connection.abort()
        self.b.connection.abort()
        await self.settle()


async def no_arena() -> None:
    return None


@pytest.fixture(params=["loopback", "local"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(request.param)
    yield pair
    await pair.close()


def echo(incoming: Incoming) -> None:
    incoming.session.respond(incoming, Status.OK, incoming.payload, incoming.parts, 0)


# ---------------------------------------------------------------- calls


async def test_greeting(pair: Pair) -> None:
    await pair.settle()
    assert pair.a.peer_hello == pair.hubs[1].hello()
    assert pair.b.peer_hello == pair.hubs[0].hello()


async def test_a_call_and_its_answer(pair: Pair) -> None:
    call = Call(pair.hubs[0].process, pair.a.loop, pair.a.thread)
    call.refs = 1
    pair.a.send_call(call, 5, 3, Flags.KWARGS, 1234, b"\xc1payload", ())
    assert call.state is CallState.SENT
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    assert (incoming.actor, incoming.code, incoming.flags, incoming.timeout_ns) == (5, 3, Flags.KWARGS, 1234)
    assert incoming.payload == b"\xc1payload"
    pair.b.respond(incoming, Status.ERROR, b"\xc1answer", (), 2)
    pair.b.respond(incoming, Status.OK, b"\xc1again", (), 0)  # ignored: a call is answered once
    await pair.settle()
    assert call.done
    assert (call.status, call.payload, call.flags) == (Status.ERROR, b"\xc1answer", 2)
    assert not pair.a.pending
    assert not pair.b.incoming
    assert pair.hubs[0].counters.calls == 1


@pytest.mark.parametrize("kind", ["loopback", "local"])
@pytest.mark.parametrize("depth", [3, 4, 5, 64])
async def test_many_calls_both_ways(kind: str, depth: int) -> None:
    pair = Pair(kind, depth)
    for hub in pair.hubs:
        hub.answer = echo
    calls = [pair.call(b"\xc1%d" % i) for i in range(500)]
    back = []
    for i in range(500):
        call = Call(pair.hubs[1].process, pair.b.loop, pair.b.thread)
        call.refs = 1
        pair.b.send_call(call, 2, 0, 0, 0, b"\xc1%d" % -i, ())
        back.append(call)
    async with asyncio.timeout(20):
        while not all(call.done for call in calls + back):
            await asyncio.sleep(0)
    assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(500)]
    assert [call.payload for call in back] == [b"\xc1%d" % -i for i in range(500)]
    assert [incoming.payload for incoming in pair.hubs[1].received] == [call.payload for call in calls], "in order"
    await pair.close()


async def test_credits_hold_calls_back(pair: Pair) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(100)]
    assert pair.a.credits.available == 0
    assert pair.hubs[0].counters.frames_sent < DEPTH
    async with asyncio.timeout(20):
        while not all(call.done for call in calls):
            for incoming in list(pair.b.incoming.values()):
                echo(incoming)
            await asyncio.sleep(0)
    assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(100)]


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
async def test_calls_from_threads(pair: Pair) -> None:
    pair.hubs[1].answer = echo
    home = asyncio.get_running_loop()
    calls: list[list[Call]] = [[] for _ in range(4)]

    def work(number: int) -> None:
        for i in range(200):
            calls[number].append(pair.call(b"\xc1%d %d" % (number, i)))

    await asyncio.gather(*(home.run_in_executor(None, work, number) for number in range(4)))
    async with asyncio.timeout(20):
        while not all(call.done for some in calls for call in some):
            await asyncio.sleep(0)
    for number, some in enumerate(calls):
        assert [call.payload for call in some] == [b"\xc1%d %d" % (number, i) for i in range(200)]
        received = [i.payload for i in pair.hubs[1].received if i.payload.startswith(b"\xc1%d " % number)]
        assert received == [call.payload for call in some], "each thread's calls in order"


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("more", [False, True])
async def test_answers_from_threads(pair: Pair, more: bool) -> None:
    home = asyncio.get_running_loop()

    def answer(some: Sequence[Incoming]) -> None:
        for incoming in some:
            incoming.session.respond(incoming, Status.OK, incoming.payload, (), 0, more=more)

    for _ in range(20):
        pair.hubs[1].received.clear()
        calls = [pair.call(b"\xc1%d" % i) for i in range(10 * DEPTH)]
        async with asyncio.timeout(20):
            while len(pair.hubs[1].received) < len(calls):
                await asyncio.sleep(0)
        received = pair.hubs[1].received
        threads = [home.run_in_executor(None, answer, received[i::3]) for i in range(3)]
        async with asyncio.timeout(20):
            while not all(call.done for call in calls):
                await asyncio.sleep(0)
        await asyncio.gather(*threads)
        assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(10 * DEPTH)]


# ---------------------------------------------------------------- cancelling


async def test_cancel(pair: Pair) -> None:
    first, second = pair.call(), pair.call()
    pair.a.cancel(first)
    pair.a.cancel(first)
    assert first.state is CallState.CANCELLING
    await pair.settle()
    assert pair.hubs[1].cancelled == [pair.hubs[1].received[0]]
    assert pair.hubs[1].received[0].cancelled
    first.fail(asyncio.CancelledError())
    for incoming in pair.hubs[1].received:
        pair.b.respond(incoming, Status.CANCELLED, b"", (), 0)
    await pair.settle()
    assert second.status == Status.CANCELLED
    assert not pair.a.pending
    pair.a.cancel(second)  # too late, does nothing
    await pair.settle()
    assert len(pair.hubs[1].cancelled) == 1


async def test_cancel_of_a_call_in_the_backlog(pair: Pair) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(3 * DEPTH)]
    pair.a.cancel(calls[-1])
    calls[-1].fail(asyncio.CancelledError())
    async with asyncio.timeout(20):
        while pair.a.pending:
            for incoming in list(pair.b.incoming.values()):
                echo(incoming)
            await asyncio.sleep(0)
    assert all(call.done for call in calls)
    assert pair.a.closed is None


# ---------------------------------------------------------------- leases


async def test_regions_travel_and_are_leased(pair: Pair) -> None:
    held = Held(9)
    call = pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, 64, 128), Part(RegionKind.REF, held, 0, 0)])
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    assert [tuple(part) for part in incoming.parts] == [
        (RegionKind.ARRAY, ("lease", 9), 64, 128),
        (RegionKind.REF, ("lease", 9), 0, 0),
    ]
    assert held.grants == 2
    assert pair.a.leases.total == 2
    pair.b.release(9)
    await pair.settle()
    assert pair.a.leases.total == 1
    pair.b.release(9)
    echo_plain(incoming)
    await pair.settle()
    assert pair.a.leases.total == 0
    assert call.done


def echo_plain(incoming: Incoming) -> None:
    incoming.session.respond(incoming, Status.OK, b"\xc0", (), 0)


async def test_more_regions_than_a_frame_holds(pair: Pair) -> None:
    pair.hubs[1].answer = echo_plain
    holders = [Held(1000 + i) for i in range(700)]
    call = pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, i, 1) for i, held in enumerate(holders)])
    other = pair.call(b"\xc1other")
    async with asyncio.timeout(20):
        while not (call.done and other.done):
            await asyncio.sleep(0)
    first, second = pair.hubs[1].received
    assert [part.holder for part in first.parts] == [("lease", 1000 + i) for i in range(700)]
    assert second.parts == ()
    assert pair.a.leases.total == 700
    for i in range(700):
        pair.b.release(1000 + i)
    async with asyncio.timeout(20):
        while pair.a.leases.total:
            await asyncio.sleep(0)


async def test_releases_are_batched(pair: Pair) -> None:
    held = Held(5)
    for _ in range(5):
        call = pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, 0, 8)])
        await pair.settle()
        echo_plain(pair.hubs[1].received[-1])
        await pair.settle()
        assert call.done
    sent = pair.hubs[1].counters.frames_sent
    threads = [threading.Thread(target=pair.b.release, args=(5,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        pair.b.release(5)
    for thread in threads:
        thread.join()
    await pair.settle()
    assert pair.a.leases.total == 0
    assert pair.hubs[1].counters.frames_sent - sent <= 3


async def test_releases_ride_with_an_answer(pair: Pair) -> None:
    held = Held(5)
    pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, 0, 8)])
    await pair.settle()
    sent = pair.hubs[1].counters.frames_sent
    assert pair.b.hold_releases()
    pair.b.release(5)
    echo_plain(pair.hubs[1].received[0])
    pair.b.unhold_releases()
    await pair.settle()
    assert pair.a.leases.total == 0
    assert pair.hubs[1].counters.frames_sent == sent + 1
    assert pair.b.hold_releases()
    assert not pair.b.hold_releases()


async def test_releases_ride_with_credits(pair: Pair) -> None:
    held = Held(5)
    pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, 0, 8)])
    await pair.settle()
    pair.b.hold_releases()
    pair.b.release(5)  # no frame of its own: the next one, which is a CREDIT, carries it
    for i in range(DEPTH):
        pair.call(b"\xc1%d" % i)
    await pair.settle()
    assert pair.a.leases.total == 0


async def test_a_release_too_many_ends_the_connection(pair: Pair) -> None:
    pair.b.release(99)
    await pair.settle()
    assert isinstance(pair.a.closed, ProtocolError)
    assert isinstance(pair.hubs[0].lost[0][0], ProtocolError)


async def test_an_argument_whose_owner_is_gone(pair: Pair) -> None:
    held = Held()
    held.lost = True
    before = pair.a.credits.available
    call = Call(pair.hubs[0].process, pair.a.loop, pair.a.thread)
    call.refs = 1
    with pytest.raises(ObjectLost):
        pair.a.send_call(call, 2, 0, 0, 0, b"", [Part(RegionKind.REF, held, 0, 0)])
    assert call.id not in pair.a.pending
    assert pair.a.credits.available == before
    assert call.state is not CallState.SENT


async def test_an_argument_whose_owner_is_gone_among_others(pair: Pair) -> None:
    """Neither with credit nor without: nothing is sent, no lease stays, and the next message is whole."""
    for busy in (False, True):
        pair.hubs[1].answer = echo_plain
        if busy:
            for i in range(DEPTH):
                pair.call(b"\xc1%d" % i)
        lost = Held(99)
        lost.lost = True
        parts = [Part(RegionKind.ARRAY, Held(1000 + i), 0, 8) for i in range(300)]
        call = Call(pair.hubs[0].process, pair.a.loop, pair.a.thread)
        call.refs = 1
        with pytest.raises(ObjectLost):
            pair.a.send_call(call, 2, 0, 0, 0, b"\xc1", [*parts, Part(RegionKind.REF, lost, 0, 0)])
        assert pair.a.leases.total == 0
        after = pair.call(b"\xc1after")
        async with asyncio.timeout(20):
            while not after.done:
                await asyncio.sleep(0)
        assert pair.hubs[1].received[-1].payload == b"\xc1after"
        assert pair.hubs[1].received[-1].parts == ()
        assert pair.a.closed is None


async def test_parts_of_a_third_process_block_the_call(pair: Pair) -> None:
    third = secrets.token_bytes(16)
    call = pair.call(b"\xc1", [Part(RegionKind.ARRAY, Held(3, third), 0, 8), Part(RegionKind.ARRAY, Held(4), 0, 8)])
    unblocked: list[Incoming] = []

    class Host:
        def unblocked(self, incoming: Incoming) -> None:
            unblocked.append(incoming)

    await pair.settle()
    (incoming,) = pair.hubs[1].received
    incoming.host = Host()
    assert incoming.blockers == 1
    part = Part(RegionKind.ARRAY, "leased", 0, 8)
    pair.hubs[1].late[0].set_result(part)
    await pair.settle()
    assert unblocked == [incoming]
    assert incoming.parts[0] == part
    assert incoming.parts[1].holder == ("lease", 4)
    # and an answer waits for them in the same way
    pair.b.respond(incoming, Status.OK, b"\xc1", [Part(RegionKind.ARRAY, Held(3, third), 0, 8)], 0)
    await pair.settle()
    assert not call.done
    pair.hubs[0].late[0].set_result(part)
    await pair.settle()
    assert call.done
    assert list(call.parts) == [part]  # type: ignore[unreachable]


# ---------------------------------------------------------------- streams


async def test_stream_items_and_credit(pair: Pair) -> None:
    call = pair.call()
    stream = call.stream = Stream(call, lambda payload, parts, flags: payload, pair.a.cancel)
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    granted: list[int] = []

    class Producer:
        def credit(self, count: int) -> None:
            granted.append(count)

    incoming.stream = Producer()
    for i in range(10):
        pair.b.send_item(incoming, i, b"\xc1%d" % i, (), 0)
    pair.b.respond(incoming, Status.STREAM_END, b"", (), 0)
    assert [await stream.next() for _ in range(8)] == [b"\xc1%d" % i for i in range(8)]
    await pair.settle()
    with pytest.raises(StopAsyncIteration):
        while True:
            await stream.next()


async def test_stream_credit_reaches_the_producer(pair: Pair) -> None:
    call = pair.call()
    stream = call.stream = Stream(call, lambda payload, parts, flags: payload, pair.a.cancel)
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    granted: list[int] = []

    class Producer:
        def credit(self, count: int) -> None:
            granted.append(count)

    incoming.stream = Producer()
    for i in range(9):
        pair.b.send_item(incoming, i, b"\xc1%d" % i, (), 0)
    for _ in range(9):
        await stream.next()
    await pair.settle()
    assert granted == [8]


# ---------------------------------------------------------------- the end


async def test_a_lost_peer(pair: Pair) -> None:
    first = pair.call(b"\xc1first")
    await pair.settle()
    calls = [first, *(pair.call(b"\xc1%d" % i) for i in range(3 * DEPTH))]
    pair.b.connection.abort()
    await pair.settle()
    ((cause, lost),) = pair.hubs[0].lost
    assert isinstance(cause, ConnectionLost)
    assert lost == calls
    states = [call.state for call in calls]
    assert CallState.SENT in states
    assert CallState.QUEUED in states, "those that still waited for credit were never sent"
    assert states == sorted(states, reverse=True)
    assert set(pair.hubs[1].cancelled) == set(pair.hubs[1].received)
    with pytest.raises(ConnectionLost):
        pair.call()
    pair.b.respond(pair.hubs[1].received[0], Status.OK, b"", (), 0)  # nobody is there: does nothing
    pair.b.send_item(pair.hubs[1].received[0], 0, b"", (), 0)
    pair.b.release(3)
    pair.a.cancel(calls[0])
    await pair.settle()


async def test_using_a_connection_between_its_end_and_the_report(pair: Pair) -> None:
    pair.call(b"\xc1")
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    pair.b.connection.abort()  # reported in the loop's next turn
    pair.b.respond(incoming, Status.OK, b"\xc1", (), 0)
    pair.b.send_item(incoming, 0, b"\xc1", (), 0)
    pair.b.release(1)
    call = Call(pair.hubs[1].process, pair.b.loop, pair.b.thread)
    call.refs = 1
    try:
        pair.b.send_call(call, 2, 0, 0, 0, b"\xc1", ())
    except ConnectionLost:
        assert call.id not in pair.b.pending
    await pair.settle()
    if call.state is not CallState.QUEUED:
        assert [lost for _, lost in pair.hubs[1].lost] == [[call]]
    assert len(pair.hubs[1].lost) == 1


async def test_leases_end_with_the_connection(pair: Pair) -> None:
    pair.call(b"\xc1", [Part(RegionKind.ARRAY, Held(5), 0, 8)])
    await pair.settle()
    assert pair.a.leases.total == 1
    pair.b.connection.abort()
    await pair.settle()
    assert pair.a.leases.total == 0


async def test_aclose(pair: Pair) -> None:
    call = pair.call()
    await pair.a.aclose()
    await pair.a.aclose()
    await pair.settle()
    assert pair.b.goodbye
    assert [lost for _, lost in pair.hubs[0].lost] == [[call]]
    assert len(pair.hubs[1].lost) == 1


async def test_faults_end_calls_once() -> None:
    for drop, break_after in ((0.2, None), (0.0, 7), (0.0, 1)):
        pair = Pair(faults=Faults(delay_turns=3, drop=drop, break_after=break_after))
        pair.hubs[1].answer = echo
        calls = []
        for i in range(50):
            try:
                calls.append(pair.call(b"\xc1%d" % i))
            except ConnectionLost:
                break
            await asyncio.sleep(0)
        await turns(300)
        lost = [call for _, some in pair.hubs[0].lost for call in some]
        assert len(pair.hubs[0].lost) == 1
        assert all(call.done != (call in lost) for call in calls)
        assert len(set(map(id, lost))) == len(lost)
        await pair.close()


# ---------------------------------------------------------------- peers that break the rules


class Peer:
    """Writes frames by hand to a session."""

    def __init__(self) -> None:
        self.near, self.far = loopback_pair(recv_depth=DEPTH)
        self.hub = Hub(self.far.peer.process)
        self.session = Session(self.hub, self.near, asyncio.get_running_loop())
        self.session.start()
        self.far.start(self)

    def frames_received(self, data: memoryview) -> None: ...

    def connection_lost(self, cause: Exception | None) -> None: ...

    def hello(self) -> None:
        buffer, offset = self.far.reserve(4096)
        hello = Hello(PROTOCOL_VERSION, self.near.peer.process, 1, "host", "3.11.0", "worker")
        self.far.commit(encode_hello_into(buffer, offset, hello))
        self.far.flush()

    def frame(
        self,
        kind: int,
        *,
        code: int = 0,
        credits: int = 0,
        message_id: int = 0,
        extra: int = 0,
        regions: Sequence[Region] = (),
        releases: Sequence[tuple[int, int]] = (),
        payload: bytes = b"",
        flush: bool = True,
    ) -> None:
        buffer, offset = self.far.reserve(frame_size(len(regions), len(releases), len(payload)))
        written = encode_into(buffer, offset, kind, 0, code, credits, 2, message_id, extra, regions, releases, payload)
        self.far.commit(written)
        if flush:
            self.far.flush()

    def raw(self, data: bytes) -> None:
        buffer, offset = self.far.reserve(len(data) + 4)
        buffer[offset : offset + len(data) + 4] = struct.pack("<I", len(data)) + data
        self.far.commit(len(data) + 4)
        self.far.flush()


def open_call(peer: Peer) -> Call:
    call = Call(peer.hub.process, peer.session.loop, peer.session.thread)
    call.refs = 1
    peer.session.send_call(call, 2, 0, 0, 0, b"", ())
    return call


VIOLATIONS: dict[str, Callable[[Peer], Any]] = {
    "answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77),
    "answer twice": lambda peer: (
        open_call(peer),
        peer.frame(Kind.RESPONSE, message_id=1),  # type: ignore[func-returns-value]
        peer.frame(Kind.RESPONSE, message_id=1),  # type: ignore[func-returns-value]
    ),
    "call twice": lambda peer: (peer.frame(Kind.CALL, message_id=5), peer.frame(Kind.CALL, message_id=5)),  # type: ignore[func-returns-value]
    "item of nothing": lambda peer: peer.frame(Kind.ITEM, message_id=5),
    "item of a call": lambda peer: (open_call(peer), peer.frame(Kind.ITEM, message_id=1)),  # type: ignore[func-returns-value]
    "release of nothing": lambda peer: peer.frame(Kind.RELEASE, releases=[(5, 1)]),
    "too many credits": lambda peer: peer.frame(Kind.CREDIT, credits=100),
    "too many frames": lambda peer: [peer.frame(Kind.RELEASE, flush=i == 40) for i in range(41)],  # type: ignore[func-returns-value]
    "not a frame": lambda peer: peer.raw(bytes(range(64))),
    "a short frame": lambda peer: peer.raw(b"x"),
    "a cut frame": lambda peer: peer.raw(b"\x24\0\0\0ZCA1" + bytes(20)),
    "unknown status": lambda peer: (open_call(peer), peer.frame(Kind.RESPONSE, message_id=1, code=99)),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_violations_end_this_connection_only(name: str) -> None:
    other = Pair()
    other.hubs[1].answer = echo
    peer = Peer()
    peer.hello()
    await turns(10)
    violate = VIOLATIONS[name]
    try:
        violate(peer)
    except ConnectionLost:  # the loopback refuses what comes after the end
        pass
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)
    ((cause, _),) = peer.hub.lost
    assert isinstance(cause, ProtocolError)
    call = other.call(b"\xc1unharmed")
    await other.settle()
    assert call.payload == b"\xc1unharmed"
    await other.close()


async def test_the_first_frame_must_be_a_greeting() -> None:
    peer = Peer()
    peer.frame(Kind.CALL, message_id=1)
    await turns(30)
    assert isinstance(peer.session.closed, ProtocolError)


async def test_what_is_harmless() -> None:
    peer = Peer()
    peer.hello()
    peer.frame(Kind.CANCEL, message_id=99)  # crossed with its answer
    peer.frame(Kind.STREAM_CREDIT, message_id=99, extra=8)
    peer.frame(Kind.CREDIT)
    peer.frame(Kind.GOODBYE)
    await turns(30)
    assert peer.session.closed is None
    assert peer.session.goodbye
    assert not peer.hub.cancelled
    peer.near.abort()
    await turns(10)
