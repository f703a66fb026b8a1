"""Stand-ins for a peer's objects: a lease that goes back, and the bytes where they are mapped."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.handle import ActorHold
from zcactor.api.passing import RefHolder
from zcactor.errors import ProtocolError
from zcactor.objects.holders import Holdings, granted, reached
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.ref import Region, RegionKind
from zcactor.rpc.call import Call
from zcactor.transport.mapping import Mapped

US, THEM = b"u" * 16, b"t" * 16


def session(released: list[int]) -> Any:
    connection = SimpleNamespace(
        peer=SimpleNamespace(arena_nbytes=1000), mapping=None, writable_mapping=None,
        map=lambda offset, nbytes, writable=False: Mapped(5000 + offset, nbytes, None, None),
    )  # fmt: skip
    return SimpleNamespace(connection=connection, release=released.append)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"),
    [(RegionKind.ARRAY, Lease), (RegionKind.MOVED, Lease), (RegionKind.REF, RefHolder), (RegionKind.ACTOR, ActorHold)],
)
def test_what_was_granted_goes_back_once(kind: RegionKind, expected: type) -> None:
    released: list[int] = []
    region = Region(kind, THEM, 7, 100, 50, 0, 0, 0, 0)
    holder = granted(US, session(released), region)
    assert type(holder) is expected
    assert released == []
    del holder
    gc.collect()
    assert released == [7]


def test_bytes_are_where_the_arena_is_mapped() -> None:
    ours = session([])
    region = Region(RegionKind.ARRAY, THEM, 7, 100, 50, 0, 0, 0, 0)
    part = reached(ours, region, granted(US, ours, region))
    assert (part.offset, part.nbytes) == (100, 50)
    assert isinstance(part.holder, Lease) and part.holder.address == 5100


@pytest.mark.slow
def test_bytes_outside_of_the_arena_are_refused_and_the_lease_goes_back() -> None:
    released: list[int] = []
    ours = session(released)
    region = Region(RegionKind.ARRAY, THEM, 7, 990, 50, 0, 0, 0, 0)
    with pytest.raises(ProtocolError):
        reached(ours, region, granted(US, ours, region))
    gc.collect()
    assert released == [7]


def test_holders_are_known_by_their_owner_as_long_as_something_keeps_them() -> None:
    held = Holdings()
    way: Any = SimpleNamespace(release_later=lambda *_: None)
    ref = RefHolder(THEM, 7, lambda _: None)
    lease = RemoteLease(way, Region(RegionKind.ARRAY, THEM, 8, 0, 50, 0))
    others = RefHolder(US, 7, lambda _: None)
    for each in (ref, lease, others, ref):
        held.note(each)
    assert {each.id for each in held.of(THEM)} == {7, 8}
    assert held.of(US) == [others]
    del lease, each
    gc.collect()
    assert held.of(THEM) == [ref]
    ref.taken = Call(US)
    assert held.of(THEM) == [], "it was taken over"
    del ref, others
    gc.collect()
    assert not held._holders


def test_a_holder_that_comes_after_the_promise_was_taken_over_has_it() -> None:
    held = Holdings()
    call = held.taken[THEM, 7] = Call(US)
    same, other = RefHolder(THEM, 7, lambda _: None), RefHolder(THEM, 8, lambda _: None)
    held.note(same)
    held.note(other)
    assert same.taken is call
    assert other.taken is None
