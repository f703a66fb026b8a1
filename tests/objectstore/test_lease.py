"""Leases: read-only views, the last of which gives the right back."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from zcactor.objectstore.lease import Lease

OWNER, OTHER = b"o" * 16, b"x" * 16


class Arena:
    """A stand-in for a mapped arena."""

    def __init__(self) -> None:
        self.bytes = np.arange(64, dtype=np.uint8)
        self.released: list[int] = []

    def lease(self, *, writable: bool = False) -> Lease:
        """A lease on bytes 16 to 32."""
        address = int(self.bytes.ctypes.data) + 16
        return Lease(OWNER, 7, 4096 + 16, 16, address, mapping=self, release=self.released.append, writable=writable)


class Session:
    """The part of a session that a grant needs."""

    def __init__(self, peer: bytes) -> None:
        self.peer_process = peer
        self.pinned: list[Any] = []

    def pin(self, holder: object) -> int:
        """Record a pinned object."""
        self.pinned.append(holder)
        return 99


def test_array_over_a_lease_is_its_bytes_and_read_only() -> None:
    arena = Arena()
    array = np.asarray(arena.lease())
    assert array.tolist() == list(range(16, 32))
    view = array[4:].view("u4").reshape(3, 1)
    for each in (array, view):
        assert not each.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            each.flags.writeable = True
    arena.bytes[16] = 200
    assert array[0] == 200


def test_lease_on_a_moved_array_is_writable_until_it_is_shared() -> None:
    arena = Arena()
    lease = arena.lease(writable=True)
    array = np.asarray(lease)
    array[0] = 100
    assert arena.bytes[16] == 100
    lease.writable = False
    array.flags.writeable = False
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    assert not np.asarray(lease).flags.writeable


def test_released_once_with_the_last_view() -> None:
    arena = Arena()
    lease = arena.lease()
    first = np.asarray(lease)
    second = np.asarray(lease)[3:]
    del lease, first
    gc.collect()
    assert arena.released == []
    element = second[0]
    del second
    assert arena.released == [7]
    assert element == 19


def test_lease_in_a_cycle_is_released_by_the_collector() -> None:
    arena = Arena()
    holder: dict[str, Any] = {"array": np.asarray(arena.lease())}
    holder["self"] = holder
    del holder
    gc.collect()
    assert arena.released == [7]


def test_mapping_is_kept() -> None:
    arena = Arena()
    lease = arena.lease()
    assert lease.mapping is arena
    assert (lease.owner, lease.id, lease.offset, lease.nbytes) == (OWNER, 7, 4112, 16)


def test_grant_to_the_owner_leases_nothing() -> None:
    lease, session = Arena().lease(), Session(OWNER)
    assert lease.grant(session) == (OWNER, 7, 0)
    assert session.pinned == []


def test_grant_to_a_third_process_pins() -> None:
    lease, session = Arena().lease(), Session(OTHER)
    assert lease.grant(session) == (OWNER, 7, 99)
    assert session.pinned == [lease]
