"""Calls and their answers between two sessions: order, credits and the backlog, threads, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.rpc.sessions import DEPTH, Held, Pair, echo, echo_all, until
from zcactor.errors import ConnectionLost
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc import outgoing
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.codec import encode_into
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Flags, Status
from zcactor.rpc.parts import Part
from zcactor.rpc.session import Session
from zcactor.rpc.stream import Stream

# ---------------------------------------------------------------- calls


async def test_greeting(pair: Pair) -> None:
    await pair.settle()
    assert pair.a.peer_hello == pair.hubs[1].hello()._replace(session=pair.b.number)
    assert pair.b.peer_hello == pair.hubs[0].hello()._replace(session=pair.a.number)
    assert 0 < pair.a.number < pair.b.number


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
    pair.b.respond(incoming, Status.OK, b"\xc1again", (), 0)  # ignored: each call is answered once
    await pair.settle()
    assert call.done
    assert (call.status, call.payload, call.flags) == (Status.ERROR, b"\xc1answer", 2)
    assert not pair.a.pending
    assert not pair.b.incoming
    assert pair.hubs[0].counters.calls == 1


@pytest.mark.slow
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
    await until(lambda: all(call.done for call in calls + back))
    assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(500)]
    assert [call.payload for call in back] == [b"\xc1%d" % -i for i in range(500)]
    assert [incoming.payload for incoming in pair.hubs[1].received] == [call.payload for call in calls], "in order"
    await pair.close()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads take turns as often as possible."""
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
    await until(lambda: all(call.done for some in calls for call in some))
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


async def test_cancel_of_a_call_in_the_backlog(pair: Pair) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(3 * DEPTH)]
    pair.a.cancel(calls[-1])
    calls[-1].fail(asyncio.CancelledError())
    await until(lambda: not pair.a.pending, lambda: echo_all(pair))
    assert all(call.done for call in calls)
    assert pair.a.closed is None


# ---------------------------------------------------------------- answers that cannot be sent


class Raising:
    """A stand-in for a function: raises as often as it is told to, and then calls the function."""

    def __init__(self, function: Callable[..., object], times: int = 1) -> None:
        self.function = function
        self.times = times

    def __call__(self, *args: object) -> object:
        if self.times:
            self.times -= 1
            raise MemoryError("injected")
        return self.function(*args)


class Failing(Held):
    """An object that cannot be leased."""

    def grant(self, session: Session) -> tuple[bytes, int, int]:
        raise MemoryError("injected")


def part_of(session: Session, step: str) -> Any:
    """The part of a session that has the method of a step of sending."""
    return session if step == "flush_now" else session._outgoing


def inject(monkeypatch: pytest.MonkeyPatch, session: Session, step: str, times: int = 1) -> None:
    """Make a step of sending fail `times` times."""
    if step == "encode":
        monkeypatch.setattr(outgoing, "encode_into", Raising(encode_into, times))
    elif step == "export":
        monkeypatch.setattr(session._grants, "_export_bytes", Raising(lambda *_: (0, 0), times))
    elif step != "grant":
        part = part_of(session, step)
        monkeypatch.setattr(part, f"_{step}", Raising(getattr(part, f"_{step}"), times))


STEPS = ["grant", "export", "encode", "reserve", "commit"]


@pytest.mark.parametrize("what", ["answer", "item"])
@pytest.mark.parametrize("step", STEPS)
async def test_what_cannot_be_sent_leaves_everything_as_it_was(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: str, what: str
) -> None:
    call = pair.call()
    stream = call.stream = Stream(call, lambda payload, parts, flags: payload, pair.a.cancel)
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    pair.b.release(5)  # rides with the next frame
    pair.b.release(5)
    held: list[Held] = [Held(1), Held(2)]
    parts = [Part(RegionKind.ARRAY, each, 0, 8) for each in held]
    before = pair.b.credits.available, pair.b.credits.owed
    with monkeypatch.context() as patched:
        inject(patched, pair.b, step)
        if step == "grant":
            parts.append(Part(RegionKind.ARRAY, Failing(3), 0, 8))
        with pytest.raises(MemoryError, match="injected"):
            if what == "answer":
                pair.b.respond(incoming, Status.OK, b"\xc1", parts, 0)
            else:
                pair.b.send_item(incoming, 0, b"\xc1", parts, 0)
    assert pair.b.incoming == {incoming.id: incoming}
    assert pair.b.leases.total == 0
    assert (pair.b.credits.available, pair.b.credits.owed) == before
    pair.a.leases.grant(5, "held by the peer")
    pair.a.leases.grant(5, "held by the peer")
    pair.b.respond(incoming, Status.ERROR, b"\xc1why", (), 0)
    await pair.settle()
    assert (call.status, call.payload, call.parts) == (Status.ERROR, b"\xc1why", ())
    assert pair.a.leases.total == 0, "the releases were not forgotten"
    assert not pair.a.pending
    assert not pair.b.incoming
    assert pair.a.closed is None
    assert not stream._slots


@pytest.mark.parametrize("more", [False, True])
async def test_an_answer_that_cannot_be_flushed_ends_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    call = pair.call()
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    inject(monkeypatch, pair.b, "flush_now", times=1000)
    pair.b.respond(incoming, Status.OK, b"\xc1", (), 0, more=more)
    await until(lambda: bool(pair.hubs[0].lost))
    assert [calls for _, calls in pair.hubs[0].lost] == [[call]]
    assert isinstance(pair.b.closed, ConnectionLost)
    assert "injected" in str(pair.b.closed)


@pytest.mark.parametrize("kind", ["loopback", "local"])
@pytest.mark.parametrize("seed", range(8))
async def test_every_call_ends_once_whatever_fails(monkeypatch: pytest.MonkeyPatch, kind: str, seed: int) -> None:
    """At each moment a call is pending here, or was completed once, or was reported lost once."""
    pair = Pair(kind, depth=5)
    choose = random.Random(seed)
    completed: Counter[int] = Counter()
    calls: list[Call] = []
    answering = False

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if answering and choose.random() < 0.1:
                raise MemoryError("injected")
            return function(*args)

        return call

    for step in ("reserve", "commit") + (("flush_now",) if seed == 7 else ()):
        part = part_of(pair.b, step)
        monkeypatch.setattr(part, f"_{step}", failing(getattr(part, f"_{step}")))

    def answer(incoming: Incoming) -> None:
        nonlocal answering
        parts = [Part(RegionKind.ARRAY, Failing() if choose.random() < 0.2 else Held(choose.randint(1, 9)), 0, 8)]
        answering = True
        try:
            incoming.session.respond(incoming, Status.OK, b"\xc1", parts, 0)
        except MemoryError:
            answering = False
            incoming.session.respond(incoming, Status.ERROR, b"\xc1", (), 0)
        answering = False

    for _ in range(40):
        with contextlib.suppress(ConnectionLost):
            for _ in range(choose.randint(1, 6)):
                call = pair.call(b"\xc1")
                calls.append(call)
                call.add_callback(lambda call: completed.update([call.id]))
        await asyncio.sleep(0)
        for incoming in list(pair.b.incoming.values()):
            if choose.random() < 0.7:
                answer(incoming)
        lost = Counter(call.id for _, some in pair.hubs[0].lost for call in some)
        assert all((call.id in pair.a.pending) + completed[call.id] + lost[call.id] == 1 for call in calls)

    def answer_all() -> None:
        for incoming in list(pair.b.incoming.values()):
            answer(incoming)

    await until(lambda: not pair.a.pending, answer_all)
    assert not pair.b.incoming
    await pair.close()
