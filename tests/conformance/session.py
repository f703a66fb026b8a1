"""The suite that every path of a `Session` must pass.

A path joins by a subclass that has the fixture ``connections``: two connected ends that are not started. Where they
map the arenas it is of `MappingSuite`, and the processes are named as the ``stores`` are; else of `SessionSuite`.
After every case the two ends are held against the model of `tests.conformance.talk`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.conformance.connection import turns
from tests.conformance.talk import (
    ACTOR,
    DEPTH,
    STORE_NBYTES,
    WATCHDOG,
    Held,
    Hub,
    Promise,
    Talk,
    parts_of,
    plain,
)
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Store
from zcactor.rpc.codec import encode_hello_into, encode_into, frame_size
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Kind, Status
from zcactor.rpc.session import Session

__all__ = ["MappingSuite", "Peer", "SessionSuite"]


class Peer:
    """Writes frames by hand to a session, and takes in none."""

    def __init__(self, near: Any, far: Any, hub: Any) -> None:
        self.near, self.far, self.hub = near, far, hub
        self.session = Session(hub, near, asyncio.get_running_loop())
        self.opened: list[Promise] = []
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
        flags: int = 0,
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
        written = encode_into(
            buffer, offset, kind, flags, code, credits, 2, message_id, extra, regions, releases, payload
        )
        self.far.commit(written)
        if flush:
            self.far.flush()

    def raw(self, data: bytes) -> None:
        buffer, offset = self.far.reserve(len(data) + 4)
        buffer[offset : offset + len(data) + 4] = struct.pack("<I", len(data)) + data
        self.far.commit(len(data) + 4)
        self.far.flush()

    def open_call(self) -> Promise:
        """A call of the session's; its number is 1."""
        call = Promise(self.hub.process, self.session.loop, self.session.thread)
        call.refs = 1
        self.session.send_call(call, ACTOR, 0, 0, 0, b"\x90", ())
        self.opened.append(call)
        return call


NONE = b"\xc0"
"""A plain answer."""


def several(*steps: Callable[[Peer], object]) -> Callable[[Peer], None]:
    def all_of_them(peer: Peer) -> None:
        for step in steps:
            step(peer)

    return all_of_them


def answer(payload: bytes = b"", **fields: Any) -> Callable[[Peer], None]:
    """The answer to the session's call."""
    return lambda peer: peer.frame(Kind.RESPONSE, message_id=1, payload=payload, **fields)


def frames(peer: Peer, count: int) -> None:
    for i in range(count):
        peer.frame(Kind.RELEASE, flush=i == count - 1)


VIOLATIONS: dict[str, Callable[[Peer], object]] = {
    "answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77),
    "answer twice": several(Peer.open_call, answer(), answer()),
    "call twice": several(*2 * [lambda peer: peer.frame(Kind.CALL, message_id=5)]),
    "item of nothing": lambda peer: peer.frame(Kind.ITEM, message_id=5),
    "item of a call": several(Peer.open_call, lambda peer: peer.frame(Kind.ITEM, message_id=1)),
    "release of nothing": lambda peer: peer.frame(Kind.RELEASE, releases=[(5, 1)]),
    "too many credits": lambda peer: peer.frame(Kind.CREDIT, credits=100),
    "too many frames": lambda peer: frames(peer, 41),
    "not a frame": lambda peer: peer.raw(bytes(range(64))),
    "a short frame": lambda peer: peer.raw(b"x"),
    "a cut frame": lambda peer: peer.raw(b"\x24\0\0\0ZCA1" + bytes(20)),
    "unknown status": several(Peer.open_call, answer(code=99)),
    # the same in frames that the native part takes in by itself
    "plain answer to nothing": lambda peer: peer.frame(Kind.RESPONSE, message_id=77, payload=NONE),
    "plain answer twice": several(Peer.open_call, answer(NONE), answer(NONE)),
    "plain call twice": several(*2 * [lambda peer: peer.frame(Kind.CALL, message_id=5, payload=b"\x90")]),
    "plain answer with too many credits": several(Peer.open_call, answer(NONE, credits=60000)),
    "plain answer with a release of nothing": several(Peer.open_call, answer(NONE, releases=[(5, 1)])),
    "plain call with too many credits": lambda peer: peer.frame(Kind.CALL, message_id=5, payload=b"\x90", credits=100),
}
"""What no correct peer does, by name."""


# ---------------------------------------------------------------- the suite


def abort_near(talk: Talk) -> None:
    talk.a.connection.abort()


def abort_far(talk: Talk) -> None:
    talk.b.connection.abort()


def break_the_protocol(talk: Talk) -> None:
    """A release of nothing, which the caller refuses."""
    talk.b.release(99)


ENDS = [abort_near, abort_far, break_the_protocol]


class SessionSuite:
    """What every path of a session must do.

    Fixtures of a subclass:
        connections: see the module.
    """

    maps = False
    """Whether arrays of the stores go by reference."""

    @pytest.fixture
    def stores(self) -> tuple[Store | None, Store | None]:
        if not self.maps:
            return None, None
        return Store(STORE_NBYTES, secrets.token_bytes(16)), Store(STORE_NBYTES, secrets.token_bytes(16))

    @pytest.fixture
    async def talk(self, connections: tuple[Any, Any], stores: Any) -> AsyncIterator[Talk]:
        talk = Talk(connections, stores)
        yield talk
        await talk.check()
        await talk.close()

    # ---- calls and answers

    async def test_calls_and_answers(self, talk: Talk) -> None:
        values = [None, True, -5, 1 << 40, 2.5, "text", b"bytes", "\u00e4" * 300, b"x" * 3000]
        calls = [talk.call(value, number) for number, value in enumerate(values)]
        for incoming in await talk.received(len(values)):
            talk.answer(incoming, plain(incoming)[0])
            talk.answer(incoming, "again")  # ignored: a call is answered once
        await talk.check()
        assert [call.result() for call in calls] == values
        assert [plain(incoming)[1] for incoming in talk.hubs[1].received] == list(range(len(values))), "in order"

    async def test_errors(self, talk: Talk) -> None:
        statuses = [int(status) for status in (Status.ERROR, Status.NO_SUCH_ACTOR, Status.CANCELLED)]
        calls = [talk.call(status) for status in statuses]
        for incoming in await talk.received(3):
            talk.answer(incoming, "why", status=plain(incoming)[0])
        await talk.check()
        assert [call.status for call in calls] == statuses

    async def test_more_calls_than_credits(self, talk: Talk) -> None:
        def echo(incoming: Incoming) -> None:
            talk.answer(incoming, plain(incoming)[0])

        talk.hubs[1].answer = echo
        calls = [talk.call(number) for number in range(20 * DEPTH)]
        await talk.check()
        assert [call.result() for call in calls] == list(range(20 * DEPTH))
        assert [plain(incoming)[0] for incoming in talk.hubs[1].received] == list(range(20 * DEPTH))

    async def test_what_is_not_answered_stays_open(self, talk: Talk) -> None:
        calls = [talk.call(number) for number in range(DEPTH // 2)]
        for incoming in (await talk.received(DEPTH // 2))[::2]:
            talk.answer(incoming)
        await talk.check()
        assert [call.done for call in calls] == [True, False] * (DEPTH // 4)

    async def test_cancel(self, talk: Talk) -> None:
        first, second, third = (talk.call(number) for number in range(3))
        talk.a.cancel(first)
        talk.a.cancel(first)
        await talk.received(3)
        await talk.until(lambda: talk.hubs[1].cancelled)
        assert talk.hubs[1].cancelled == talk.hubs[1].received[:1]
        for incoming, status in zip(talk.hubs[1].received, (Status.CANCELLED, Status.OK, Status.OK), strict=True):
            talk.answer(incoming, status=status)
        await talk.check()
        talk.a.cancel(second)  # too late: does nothing
        await talk.check()
        assert (first.status, second.status, third.status) == (Status.CANCELLED, Status.OK, Status.OK)
        assert len(talk.hubs[1].cancelled) == 1

    # ---- streams

    async def test_stream(self, talk: Talk) -> None:
        call = talk.call(stream=True)
        (incoming,) = await talk.received(1)
        granted: list[int] = []
        incoming.stream = SimpleNamespace(credit=granted.append)
        for number in range(9):
            talk.b.send_item(incoming, number, msgspec.msgpack.encode(number), (), 0)
        assert [await call.stream.next() for _ in range(9)] == list(range(9))
        await talk.until(lambda: granted)
        talk.answer(incoming, status=Status.STREAM_END)
        with pytest.raises(StopAsyncIteration):
            await call.stream.next()
        await talk.check()
        assert granted == [8]

    async def test_items_with_leases_of_a_stream_that_is_left(self, talk: Talk) -> None:
        call = talk.call(stream=True)
        (incoming,) = await talk.received(1)
        for number in range(4):
            talk.b.send_item(incoming, number, NONE, parts_of(Held(number + 1)), 0)
        await talk.check()
        assert talk.b.leases.total == 4
        call.stream = None
        talk.a.cancel(call)
        await talk.until(lambda: incoming.cancelled)
        talk.answer(incoming, status=Status.CANCELLED)
        await talk.check()
        assert talk.b.leases.total == 0

    # ---- leases

    async def test_releases(self, talk: Talk) -> None:
        call = talk.call(parts=parts_of(Held(5), Held(6), Held(5)))
        (incoming,) = await talk.received(1)
        await talk.check()
        assert talk.a.leases.total == 3
        talk.answer(incoming, parts=parts_of(Held(7), Held(7)))
        await talk.check()
        assert talk.b.leases.total == 2
        talk.drop(incoming, call)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    async def test_more_leases_than_a_frame_holds(self, talk: Talk) -> None:
        call = talk.call(parts=parts_of(*(Held(1000 + number) for number in range(300))))
        (incoming,) = await talk.received(1)
        talk.answer(incoming)
        await talk.check()
        assert talk.a.leases.total == 300
        talk.drop(incoming, call)
        await talk.check()

    async def test_an_argument_that_cannot_be_leased(self, talk: Talk) -> None:
        lost = Held(3)
        lost.lost = True
        with pytest.raises(ObjectLost):
            talk.call(parts=parts_of(Held(1), Held(2), lost))
        await talk.check()
        assert talk.a.leases.total == 0

    async def test_pins_and_late_parts(self, talk: Talk) -> None:
        third = secrets.token_bytes(16)
        call = talk.call(parts=parts_of(Held(3, third), Held(4)))
        (incoming,) = await talk.received(1)
        unblocked: list[Incoming] = []
        incoming.host = SimpleNamespace(unblocked=unblocked.append)
        assert incoming.blockers == 1
        talk.hubs[1].arrive()
        await talk.until(lambda: unblocked)
        await talk.check()
        assert talk.a.leases.total == 2, "a pin, and an object of ours"
        talk.answer(incoming, parts=parts_of(Held(3, third)))
        await talk.until(lambda: talk.hubs[0].late)
        assert not call.done
        talk.hubs[0].arrive()
        await talk.until(lambda: call.done)
        await talk.check()
        talk.drop(incoming, call)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    @pytest.mark.parametrize("rounds", [20, pytest.param(400, marks=pytest.mark.slow)])
    async def test_threads_pass_and_answer_at_once(self, talk: Talk, rounds: int) -> None:
        """Frames of several threads, with references, while the loop sends, receives and gives leases back."""
        home = asyncio.get_running_loop()
        before = sys.getswitchinterval()
        answering = threading.Lock()

        def answer_all() -> None:
            while talk.hubs[1].received:
                with answering:
                    some, talk.hubs[1].received[:] = talk.hubs[1].received[:], []
                for incoming in some:
                    if self.maps:
                        talk.answer(incoming, talk.array(1.0, 1))
                    else:
                        talk.answer(incoming, parts=parts_of(Held(9)))
                    talk.drop(incoming)

        def ask(count: int) -> list[Promise]:
            return [
                talk.call(talk.array(2.0), number) if self.maps else talk.call(parts=parts_of(Held(8)))
                for number in range(count)
            ]

        sys.setswitchinterval(1e-6)
        try:
            for _ in range(rounds):
                asking = [home.run_in_executor(None, ask, 10) for _ in range(2)]
                pool: list[asyncio.Future[None]] = []
                while not all(task.done() for task in asking) or any(not call.done for call in talk.calls):
                    assert talk.a.closed is None and talk.b.closed is None, (talk.a.closed, talk.b.closed)
                    if talk.hubs[1].received and len(pool) < 2:
                        pool.append(home.run_in_executor(None, answer_all))
                    pool = [task for task in pool if not task.done()]
                    await asyncio.sleep(0)
                await asyncio.gather(*pool, *asking)
                talk.drop(*talk.calls)
                assert all(call.ends == 1 for call in talk.calls)
                talk.calls.clear()
        finally:
            sys.setswitchinterval(before)
        await talk.check()
        assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)

    # ---- the end

    @pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
    @pytest.mark.parametrize(
        "point",
        ["greeting", "called", "received", "backlog", "answered", "stream", "leased", "late argument", "late result"],
    )
    async def test_loss(self, talk: Talk, point: str, end: Callable[[Talk], None]) -> None:
        third = secrets.token_bytes(16)
        if point == "called":
            talk.call(1)
        elif point == "backlog":
            for number in range(3 * DEPTH):
                talk.call(number)
        elif point in ("late argument", "late result"):
            call = talk.call(parts=parts_of(Held(3, third)))
            (incoming,) = await talk.received(1)
            if point == "late result":
                talk.hubs[1].arrive()
                talk.answer(incoming, parts=parts_of(Held(4, third)))
                await talk.until(lambda: talk.hubs[0].late)
        elif point != "greeting":
            call = talk.call(7, parts=parts_of(Held(3)) if point == "leased" else (), stream=point == "stream")
            (incoming,) = await talk.received(1)
            if point == "stream":
                talk.b.send_item(incoming, 0, NONE, parts_of(Held(5)), 0)
            elif point == "answered":
                talk.answer(incoming, 8)
            elif point == "leased":
                talk.answer(incoming, 8, parts=parts_of(Held(4)))
                await talk.until(lambda: call.done)
        end(talk)
        with contextlib.suppress(ConnectionLost):
            talk.call("between its end and the report")
        await talk.until(lambda: talk.hubs[0].lost and talk.hubs[1].lost)
        for hub in talk.hubs:
            hub.arrive()
        await talk.check()
        assert all(call.done for call in talk.calls)
        assert not talk.unfinished
        with pytest.raises(ConnectionLost if end is not break_the_protocol else (ConnectionLost, ProtocolError)):
            talk.call("too late")

    @pytest.mark.parametrize("name", VIOLATIONS)
    async def test_violations_end_the_connection(self, connections: tuple[Any, Any], name: str) -> None:
        near, far = connections
        hub = Hub(far.peer.process, None)
        peer = Peer(near, far, hub)
        peer.hello()
        with contextlib.suppress(ConnectionLost):  # a path may refuse what comes after the end
            VIOLATIONS[name](peer)
        async with asyncio.timeout(WATCHDOG):
            while not hub.lost:
                await asyncio.sleep(0)
        session = peer.session
        assert isinstance(session.closed, ProtocolError)
        assert [type(cause) for cause in hub.lost] == [ProtocolError]
        assert [call.ends for call in peer.opened] == [1] * len(peer.opened), "once, by an answer or by the end"
        assert not session.pending
        assert not session.incoming
        assert session.leases.total == 0
        far.abort()
        await turns(10)


class MappingSuite(SessionSuite):
    """The same where arrays of the stores go by reference."""

    maps = True

    async def test_arrays_by_reference(self, talk: Talk) -> None:
        for value in range(3):  # the first may bring the dtype
            mine = talk.array(value)
            call = talk.call(mine, value)
            incoming = (await talk.received(value + 1))[-1]
            await talk.check()
            assert talk.a.leases.total == 1
            talk.answer(incoming, talk.array(value + 0.5, 1))
            await talk.check()
            assert talk.b.leases.total == 1
            if call.decoded:
                assert set(np.unique(call.value)) == {value + 0.5}
            talk.drop(incoming, call)
            await talk.check()
            assert (talk.a.leases.total, talk.b.leases.total) == (0, 0)
