"""The end of a session: a lost peer, a close, faults of the connection."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.connection import turns
from tests.rpc.sessions import DEPTH, Pair, echo
from zcactor.errors import ConnectionLost
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.messages import Status
from zcactor.transport.loopback.endpoint import LoopbackFaults


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
    pair.b.respond(pair.hubs[1].received[0], Status.OK, b"", (), 0)  # without a peer this does nothing
    pair.b.send_item(pair.hubs[1].received[0], 0, b"", (), 0)
    pair.b.release(3)
    pair.a.cancel(calls[0])
    await pair.settle()


async def test_using_a_connection_between_its_end_and_the_report(pair: Pair) -> None:
    pair.call(b"\xc1")
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    pair.b.connection.abort()  # the loop reports it in its next turn
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


@pytest.mark.parametrize("kind", ["loopback", "local"])
async def test_a_connection_that_ends_before_its_session_begins(kind: str) -> None:
    """A peer may break it between the handshake and the turn in which the session is made."""
    pair = Pair(kind, lost=True)
    await pair.settle()
    assert [lost for hub in pair.hubs for _, lost in hub.lost] == [[], []]
    with pytest.raises(ConnectionLost):
        pair.call()


async def test_aclose_of_what_was_lost_in_this_turn_of_the_loop(pair: Pair) -> None:
    """The end is not reported yet, and no peer is left to say goodbye to."""
    call = pair.call()
    pair.a.connection.abort()
    await pair.a.aclose()
    await pair.settle()
    assert [lost for _, lost in pair.hubs[0].lost] == [[call]]
    assert len(pair.hubs[1].lost) == 1 and not pair.b.goodbye


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
        pair = Pair(faults=LoopbackFaults(delay_turns=3, drop=drop, break_after=break_after))
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
