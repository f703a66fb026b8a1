"""Granting leases and giving them back, without the frames that carry either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.rpc.sessions import DEPTH, Held, Pair, echo_plain
from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc import leasing
from zcactor.rpc import session as session_module
from zcactor.rpc.leasing import LockedLeases
from zcactor.rpc.parts import Part
from zcactor.transport.frames import held_here


def test_granting_is_done_under_the_lock_and_can_be_taken_back() -> None:
    leases, lock = LeaseTable(), threading.RLock()
    granting = LockedLeases(leases, lock)
    granting.grant(5, "kept")
    granting.grant(5, "kept")
    assert leases.total == 2
    granting.withdraw(5)
    granting.release(5, 1)
    granting.withdraw(5)  # the end of the connection has released it
    assert leases.total == 0
    with pytest.raises(ProtocolError, match="holds 0"):
        granting.release(5, 1)
    assert not held_here(lock)


async def test_releases_go_by_the_connection_that_stays(pair: Pair) -> None:
    stays, goes = pair.a, pair.b
    goes.successor = stays
    released: list[int] = []
    stays._note_release = released.append
    replaced = [goes.is_replaced]
    goes.release(5)
    goes.release_later(6)
    assert released == [5, 6]
    assert not goes.has_releases
    stays.closed = ConnectionError("it has ended")
    replaced.append(goes.is_replaced)
    stays.closed = None
    assert replaced == [True, False]


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


async def test_a_release_does_not_wait_with_those_that_may(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_RELEASE_DELAY", 1000.0)
    for object_id in (1, 2):
        pair.a.leases.grant(object_id, object())
    pair.b.release_later(1)
    await pair.settle()
    assert pair.a.leases.total == 2
    pair.b.release(2)
    await pair.settle()
    assert pair.a.leases.total == 0


async def test_releases_of_many_bytes_do_not_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "_RELEASE_DELAY", 1000.0)
    monkeypatch.setattr(
        pair.b.connection, "peer", msgspec.structs.replace(pair.b.connection.peer, arena_nbytes=64 << 20)
    )
    most = 1 << 20
    for object_id in range(1, 7):
        pair.a.leases.grant(object_id, object())

    async def left(count: int) -> None:
        await pair.settle()
        assert pair.a.leases.total == count

    pair.b.release_later(1, most)
    await left(6)  # a frame may take it
    pair.b.release_later(2, 1)
    await left(4)
    pair.b.release_later(3, most)
    pair.b.send_releases()  # as a frame of any kind does
    pair.b.release_later(4, most)
    pair.b.release_later(5)
    await left(3)  # bytes that were given back count no more
    pair.b.release_later(6, (64 << 20) // 4 + 1)
    await left(0)  # more than a fourth of the arena


async def test_a_thread_sends_the_releases_that_it_has_collected(pair: Pair) -> None:
    for object_id in (1, 2, 3):
        pair.a.leases.grant(object_id, object())
    scheduled: list[Callable[[], None]] = []
    pair.b._on_loop = scheduled.append  # type: ignore[method-assign, assignment]
    seen: list[Any] = []

    def method() -> None:
        due: list[Any] = []
        leasing.collecting[threading.get_ident()] = due
        pair.b.release(1)
        pair.b.release(2)
        del leasing.collecting[threading.get_ident()]
        seen.append(list(due))
        for session in due:
            session.send_releases()
        seen.append(pair.b.has_releases)
        pair.b.release(3)
        seen.append(len(scheduled))

    thread = threading.Thread(target=method)
    thread.start()
    thread.join()
    await pair.settle()
    assert seen == [[pair.b], False, 1], "once for a session, and the last one by the loop"
    assert pair.a.leases.total == 1
    scheduled.pop()()
    await pair.settle()
    assert pair.a.leases.total == 0


async def test_collected_releases_after_the_end_are_told_of_by_the_loop(pair: Pair) -> None:
    due: list[Any] = []
    leasing.collecting[threading.get_ident()] = due
    pair.a.release(3)
    del leasing.collecting[threading.get_ident()]
    pair.b.connection.abort()
    await pair.settle()
    (session,) = due
    session.send_releases()
    assert pair.hubs[0].late_releases == 0
    await pair.settle()
    assert pair.hubs[0].late_releases == 1


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
    pair.b.release(5)  # without a frame of its own: the next frame, a CREDIT, carries it
    for i in range(DEPTH):
        pair.call(b"\xc1%d" % i)
    await pair.settle()
    assert pair.a.leases.total == 0


async def test_a_release_after_the_end_is_told_of(pair: Pair) -> None:
    """The peer may keep the object that it had leased: the hub gets the late release."""
    pair.b.connection.abort()
    await pair.settle()
    for _ in range(3):
        pair.a.release(3)
    await pair.settle()
    assert pair.hubs[0].late_releases == 1


async def test_releases_that_come_by_a_connection_that_the_peer_has_lost_are_not_taken(pair: Pair) -> None:
    pair.a.leases.grant(5, Held(5))
    await pair.settle()
    pair.b.release(5)
    pair.b._send_releases()
    table = pair.a.leases
    pair.a.disown("the peer has lost it", leases=True)
    assert table.total == 0
    await pair.settle()
    assert pair.hubs[0].lost == [(None, [])], "they would have ended it as a defect of the peer"


async def test_what_was_taken_can_be_put_back(pair: Pair) -> None:
    assert pair.b.hold_releases()
    for object_id in (5, 6, 5):
        pair.b.release(object_id)
    taken = pair.b.take_releases()
    assert sorted(taken) == [(5, 2), (6, 1)]
    assert not pair.b.has_releases
    pair.b.put_releases_back(taken)
    assert sorted(pair.b.take_releases()) == [(5, 2), (6, 1)]


async def test_a_frame_takes_so_many_along(pair: Pair) -> None:
    assert pair.b.hold_releases()
    for object_id in range(300):
        pair.b.release(object_id)
    assert [len(pair.b.take_releases()) for _ in range(4)] == [128, 128, 44, 0]
