"""Calls and their answers between two sessions: order, credits and the backlog, threads, cancelling."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.rpc.sessions import DEPTH, Pair, echo
from zcactor.rpc.call import Call
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Flags, Status
from zcactor.rpc.protocol import CallState


async def until(condition: Callable[[], bool], turn: Callable[[], object] = lambda: None) -> None:
    """Let the loop go round, with a `turn` in each round, until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            turn()
            await asyncio.sleep(0)


def echo_all(pair: Pair) -> None:
    """Answer the calls that have come."""
    for incoming in list(pair.b.incoming.values()):
        echo(incoming)


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
    await until(lambda: all(call.done for call in calls + back))
    assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(500)]
    assert [call.payload for call in back] == [b"\xc1%d" % -i for i in range(500)]
    assert [incoming.payload for incoming in pair.hubs[1].received] == [call.payload for call in calls], "in order"
    await pair.close()


async def test_credits_hold_calls_back(pair: Pair) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(100)]
    assert pair.a.credits.available == 0
    assert pair.hubs[0].counters.frames_sent < DEPTH
    await until(lambda: all(call.done for call in calls), lambda: echo_all(pair))
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
    await until(lambda: not pair.a.pending, lambda: echo_all(pair))
    assert all(call.done for call in calls)
    assert pair.a.closed is None
