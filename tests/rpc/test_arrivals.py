"""References that arrive with a message, ahead of it, or later than it."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rpc.sessions import Held, Hub, Pair, echo_plain
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.intake import Arrivals, hold_back, when
from zcactor.rpc.messages import Kind
from zcactor.rpc.parts import Part
from zcactor.rpc.session import Session

PEER, THIRD = b"p" * 16, b"t" * 16


class Lent(Held):
    """An object of a third process, pinned for the peer until the peer has a lease of its own."""

    def grant(self, session: Session) -> tuple[bytes, int, int]:
        return THIRD, self.object_id, session.pin(self)


@pytest.fixture
async def hub() -> Hub:
    return Hub(bytes(16))


@pytest.fixture
async def arrivals(hub: Hub) -> Arrivals:
    session: Any = SimpleNamespace(hub=hub, peer_process=PEER, loop=asyncio.get_running_loop())
    return Arrivals(partial(hub.import_region, session))


def region(object_id: int, owner: bytes = PEER) -> Region:
    return Region(RegionKind.ARRAY, owner, object_id, 0, 8, 0)


def ids(parts: Any) -> list[int]:
    return [part.holder[1] for part in parts]


async def test_regions_that_went_ahead_come_first(arrivals: Arrivals) -> None:
    arrivals.carry([region(1), region(2)], Kind.CALL, 7)
    arrivals.carry([region(3)], Kind.CALL, 7)
    parts, blocked = arrivals.take([region(4)], Kind.CALL, 7, False)
    assert ids(parts) == [1, 2, 3, 4]
    assert not blocked
    assert not arrivals.carried
    assert ids(arrivals.take([region(5)], Kind.CALL, 7, False)[0]) == [5], "they belong to one message"


async def test_what_comes_between_takes_nothing_that_went_ahead(arrivals: Arrivals) -> None:
    arrivals.carry([region(1)], Kind.CALL, 7)
    arrivals.carry([region(2)], Kind.RESPONSE, 7)
    for kind, message_id in ((Kind.CALL, 8), (Kind.ITEM, 7), (Kind.CREDIT, 0)):
        assert ids(arrivals.take([region(3)], kind, message_id, False)[0]) == [3]
    assert ids(arrivals.take([region(4)], Kind.RESPONSE, 7, False)[0]) == [2, 4]
    assert ids(arrivals.take([], Kind.CALL, 7, False)[0]) == [1]
    assert not arrivals.carried


async def test_what_comes_later_takes_its_place(arrivals: Arrivals, hub: Hub) -> None:
    arrivals.carry([region(1), region(2, THIRD)], Kind.RESPONSE, 1)
    parts, blocked = arrivals.take([region(3, THIRD), region(4)], Kind.RESPONSE, 1, False)
    assert list(blocked) == hub.late
    seen = []
    when(blocked, lambda: seen.append(ids(parts)))
    for object_id, future in reversed(list(zip((2, 3), hub.late, strict=True))):
        await asyncio.sleep(0)
        assert not seen
        future.set_result(Part(RegionKind.ARRAY, ("leased", object_id), 0, 8))
    await asyncio.sleep(0)
    assert seen == [[1, 2, 3, 4]]


async def test_a_call_waits_for_all_of_its_arguments() -> None:
    loop = asyncio.get_running_loop()
    session: Any = None
    unblocked: list[Incoming] = []
    incoming = Incoming(session, 1, 2, 3, b"")
    incoming.host = SimpleNamespace(unblocked=unblocked.append)
    futures: list[asyncio.Future[Part]] = [loop.create_future() for _ in range(2)]
    hold_back(incoming, futures)
    assert incoming.blockers == 2
    for left, future in ((1, futures[1]), (0, futures[0])):
        assert not unblocked
        future.set_result(Part(RegionKind.REF, None, 0, 0))
        await asyncio.sleep(0)
        assert incoming.blockers == left
    assert unblocked == [incoming]


async def test_a_result_waits_for_what_a_third_process_owns(pair: Pair) -> None:
    call = pair.call()
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    held = Lent(9)
    pair.b.respond(incoming, 0, b"\xc1", [Part(RegionKind.ARRAY, held, 0, 8), Part(RegionKind.REF, Held(3), 0, 0)], 0)
    other = pair.call()
    await pair.settle()
    echo_plain(pair.hubs[1].received[1])
    await pair.settle()
    assert [call.done, other.done] == [False, True], "others do not wait for it"
    pair.hubs[0].late[0].set_result(Part(RegionKind.ARRAY, ("leased", 9), 0, 8))
    await pair.settle()
    assert call.done
    assert ids(call.parts) == [9, 3]


async def test_what_does_not_come_any_more_is_no_error_of_the_loop(arrivals: Arrivals, hub: Hub) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    parts, blocked = arrivals.take([region(1), region(2, THIRD)], Kind.RESPONSE, 1, False)
    holding_the_place = parts[1]
    seen: list[Any] = []
    when(blocked, lambda: seen.append(list(parts)))
    hub.late[0].cancel()  # the process closes
    await asyncio.sleep(0)
    assert seen == [[parts[0], holding_the_place]], "the call ends, with the part that says so"
    assert not reported
