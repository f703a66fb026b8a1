"""Regions that travel between two sessions: leases, releases, owners that are gone, third processes."""

from __future__ import annotations

import asyncio
import secrets
import threading

import pytest

from tests.rpc.sessions import DEPTH, Held, Pair, echo_plain
from zcactor.errors import ObjectLost, ProtocolError
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.call import Call
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Status
from zcactor.rpc.parts import Part
from zcactor.rpc.protocol import CallState


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
