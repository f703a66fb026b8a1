"""Leases on the objects of messages: granted with the message, all of them or none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rpc.sessions import DEPTH, Held, Pair, echo_plain
from zcactor.errors import ObjectLost
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.table import LeaseTable
from zcactor.rpc.call import Call, CallState
from zcactor.rpc.grants import Grants
from zcactor.rpc.parts import Part


async def test_regions_travel_and_are_leased(pair: Pair) -> None:
    held = Held(9)
    call = pair.call(b"\xc1", [Part(RegionKind.ARRAY, held, 64, 128, 1), Part(RegionKind.REF, held, 0, 0)])
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    assert [tuple(part) for part in incoming.parts] == [
        (RegionKind.ARRAY, ("lease", 9), 64, 128, 1),
        (RegionKind.REF, ("lease", 9), 0, 0, 0),
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
    """With credit or without: the call sends no frame and keeps no lease, and the next message is whole."""
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


class Sender:
    """The granting side of a session, without a session."""

    def __init__(self) -> None:
        self.process = b"o" * 16
        self.peer_process = b"p" * 16
        self.leases = LeaseTable()
        self.connection = SimpleNamespace(maps=True)

    def pin(self, holder: object) -> int:
        return self.leases.pin(holder)


def part_of(object_id: int, nbytes: int = 8) -> Part:
    return Part(RegionKind.ARRAY, Held(object_id), 64, nbytes)


class Returned:
    """An object of the peer's own on its way home: no lease is granted for it."""

    def __init__(self, object_id: int) -> None:
        self.object_id = object_id

    def grant(self, session: Any) -> tuple[bytes, int, int]:
        return session.peer_process, self.object_id, 0


def test_only_bytes_of_ours_get_a_key() -> None:
    sender = Sender()
    asked = []

    def export_bytes(object_id: int, offset: int, nbytes: int) -> tuple[int, int]:
        asked.append((object_id, offset, nbytes))
        return 11, 22

    grants = Grants(sender, sender.process, export_bytes)
    regions = grants.export([part_of(1), part_of(2, nbytes=0), Part(RegionKind.ARRAY, Returned(3), 64, 8)])
    assert asked == [(1, 64, 8)]
    assert [(region.id, region.seal, region.rkey) for region in regions] == [(1, 11, 22), (2, 0, 0), (3, 0, 0)]
    assert sender.leases.total == 2
    grants.take_back(regions)
    assert sender.leases.total == 0


def test_what_has_no_key_is_not_leased() -> None:
    sender = Sender()

    def export_bytes(object_id: int, offset: int, nbytes: int) -> tuple[int, int]:
        if object_id == 2:
            raise MemoryError("injected")
        return 11, 22

    with pytest.raises(MemoryError, match="injected"):
        Grants(sender, sender.process, export_bytes).export([part_of(1), part_of(2)])
    assert sender.leases.total == 0


def test_the_end_may_have_taken_leases_back_before() -> None:
    sender = Sender()
    grants = Grants(sender, sender.process, None)
    regions = grants.export([part_of(1)])
    sender.leases.end()
    grants.take_back(regions)
    assert sender.leases.total == 0


def test_an_object_of_the_peers_with_the_id_of_one_of_ours() -> None:
    """Each process has ids of its own: a message that is not sent takes back only leases that it has granted."""
    sender = Sender()
    grants = Grants(sender, sender.process, None)
    grants.export([part_of(7)])
    grants.take_back(grants.export([Part(RegionKind.ARRAY, Returned(7), 64, 8)]))
    assert sender.leases.total == 1
