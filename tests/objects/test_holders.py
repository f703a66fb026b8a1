"""Stand-ins for a peer's objects: a lease that goes back, and the bytes where they are mapped."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.api.handle import ActorHold
from zcactor.api.passing import RefHolder
from zcactor.errors import ProtocolError
from zcactor.objects.holders import granted, reached
from zcactor.objectstore.lease import Lease
from zcactor.objectstore.ref import Region, RegionKind
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
