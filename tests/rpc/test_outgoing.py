"""Frames that wait for credit, and messages of more than one frame."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from tests.rpc.sessions import DEPTH, Held, Pair, echo_all, echo_plain, until
from zcactor.errors import ConnectionLost
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.call import Call
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Kind, Status
from zcactor.rpc.parts import Part


async def test_credits_hold_calls_back(pair: Pair) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(100)]
    assert pair.a.credits.available == 0
    assert pair.hubs[0].counters.frames_sent < DEPTH
    await until(lambda: all(call.done for call in calls), lambda: echo_all(pair))
    assert [call.payload for call in calls] == [b"\xc1%d" % i for i in range(100)]


async def test_what_waits_stays_in_order_when_its_turn_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame leaves the backlog when it is written, not before."""
    calls = [pair.call(b"\xc1%d" % i) for i in range(2 * DEPTH)]
    backlog, outgoing = list(pair.a._backlog), pair.a._outgoing
    assert backlog

    def refuse(_: int) -> Any:
        raise ConnectionLost("the transport knows of the end")

    with monkeypatch.context() as patched:
        patched.setattr(pair.a.connection.native_out, "declines", True)
        patched.setattr(outgoing, "_reserve", refuse)
        outgoing.credits_returned(1)
    assert list(pair.a._backlog) == backlog
    outgoing.credits_returned(0)
    assert list(pair.a._backlog) == backlog, "there is no credit"
    await until(lambda: all(call.done for call in calls), lambda: echo_all(pair))
    assert [incoming.payload for incoming in pair.hubs[1].received] == [call.payload for call in calls]


async def test_a_frame_that_fails_when_its_turn_comes_gives_its_credit_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [pair.call(b"\xc1%d" % i) for i in range(2 * DEPTH)]
    backlog, outgoing = list(pair.a._backlog), pair.a._outgoing
    assert backlog

    def refuse(_: int) -> Any:
        raise MemoryError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(pair.a.connection.native_out, "declines", True)
        patched.setattr(outgoing, "_reserve", refuse)
        with pytest.raises(MemoryError, match="injected"):
            outgoing.credits_returned(1)
    assert (list(pair.a._backlog), pair.a.credits.available) == (backlog, 1)
    assert pair.a.credits.take(), "the peer has not granted it"
    await until(lambda: all(call.done for call in calls), lambda: echo_all(pair))


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


async def test_credits_between_the_frames_of_a_message(pair: Pair) -> None:
    """A message may wait for credits after some of its frames.

    A frame that needs no credit overtakes the rest of the message, and leaves the frames that went ahead to it.
    """
    while pair.a.credits.available > 1:
        pair.call(b"\xc1")
    holders = [Held(1000 + i) for i in range(300)]
    pair.call(b"\xc1large", [Part(RegionKind.ARRAY, held, 0, 8) for held in holders])
    with pair.a.lock:
        pair.a._outgoing.frame(Kind.CREDIT, 0, 0, 0, 0, 0, (), b"")
    await until(lambda: [each.payload for each in pair.hubs[1].received][-1:] == [b"\xc1large"])
    *others, large = pair.hubs[1].received
    assert [part.holder[1] for part in large.parts] == [held.object_id for held in holders]
    assert not any(other.parts for other in others)


@pytest.mark.parametrize("kind", ["loopback", "local"])
async def test_messages_of_many_references_beside_those_of_other_threads(kind: str) -> None:
    """Any frames may come between those of the message.

    The native part writes small ones without the session's lock. The receiver leaves this message to Python, because it
    does not know the array's type.
    """
    pair = Pair(kind, depth=1024)
    array = np.zeros(3)
    pair.hubs[0].dtype_codes[array.dtype] = "f8"
    count, regions, threads = 10, 300, 2
    frame = pair.a._outgoing.frame

    def between(*entry: Any) -> None:
        frame(*entry)
        if entry[0] == Kind.REGIONS:
            assert pair.a.wire.call(new_call(), 2, 0, (array,))

    def new_call() -> Call:
        call = Call(pair.hubs[0].process, pair.a.loop, pair.a.thread)
        call.refs = 1
        return call

    def write(first: int) -> None:
        for number in range(first, first + count):
            held = [Held(number * 1000 + i) for i in range(regions)]
            parts = [Part(RegionKind.ARRAY, each, 0, 8) for each in held]
            pair.a.send_call(new_call(), 2, 1, 0, 0, b"\xc1%d" % number, parts)

    pair.a._outgoing.frame = between  # type: ignore[method-assign,assignment]
    writers = [threading.Thread(target=write, args=(1 + count * index,)) for index in range(threads)]
    for writer in writers:
        writer.start()

    def large() -> list[Incoming]:
        return [each for each in pair.hubs[1].received if each.code == 1]

    await until(lambda: len(large()) == count * threads)
    for writer in writers:
        writer.join()
    for each in large():
        number = int(each.payload[1:])
        assert [part.holder[1] for part in each.parts] == [number * 1000 + i for i in range(regions)]
    assert not any(each.parts for each in pair.hubs[1].received if each.code == 0)
    assert not pair.b._intake._arrivals.carried
    await pair.close()


async def test_half_of_a_message_ends_the_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection has to end: references that went ahead of their message would wait for it."""
    call = pair.call()
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    outgoing = pair.b._outgoing
    frame, frames = outgoing.frame, 0

    def second_fails(*entry: Any) -> None:
        nonlocal frames
        frames += 1
        if frames == 2:
            raise MemoryError("injected")
        frame(*entry)

    monkeypatch.setattr(outgoing, "frame", second_fails)
    with pytest.raises(MemoryError):
        pair.b.respond(incoming, Status.OK, b"\xc1", [Part(RegionKind.ARRAY, Held(i), 0, 8) for i in range(300)], 0)
    await until(lambda: bool(pair.hubs[0].lost))
    assert [calls for _, calls in pair.hubs[0].lost] == [[call]]
