"""Regions: their wire layout and the check of their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.objectstore.ref import REGION_NBYTES, REGION_STRUCT, Region, RegionKind, check_bounds

U64 = 2**64 - 1
OWNER = bytes(range(16))


def region(offset: int, nbytes: int, kind: int = RegionKind.ARRAY) -> Region:
    return Region(kind, OWNER, 7, offset, nbytes, 0)


def test_wire_layout_is_56_bytes_in_the_schemas_order() -> None:
    assert REGION_STRUCT.size == REGION_NBYTES == 56
    packed = REGION_STRUCT.pack(OWNER, 1, 2, 3, 4, 3, 1, 5, 6)
    assert packed[:16] == OWNER
    assert [int.from_bytes(packed[at : at + 8], "little") for at in range(16, 48, 8)] == [1, 2, 3, 4]
    assert packed[48:] == b"\x03\1\5\0\6\0\0\0"


@pytest.mark.parametrize(
    ("offset", "nbytes", "arena"),
    [(0, 0, 0), (0, 10, 10), (10, 0, 10), (3, 7, 10), (0, U64, U64), (U64, 0, U64), (1, U64 - 1, U64)],
)
def test_inside(offset: int, nbytes: int, arena: int) -> None:
    check_bounds(region(offset, nbytes), arena)


@pytest.mark.parametrize(
    ("offset", "nbytes", "arena"),
    [
        (0, 1, 0),
        (1, 0, 0),
        (0, 11, 10),
        (11, 0, 10),
        (4, 7, 10),
        (U64, 1, U64),
        (1, U64, 10),
        (U64, U64, 10),
        (-1, 1, 9),
    ],
)
def test_outside_names_value_and_limit(offset: int, nbytes: int, arena: int) -> None:
    with pytest.raises(ProtocolError, match=f"{nbytes} bytes at offset {offset}, .* arena of {arena} bytes"):
        check_bounds(region(offset, nbytes), arena)


@pytest.mark.parametrize("kind", RegionKind)
def test_known_kinds(kind: RegionKind) -> None:
    check_bounds(region(0, 0, kind), 0)


@pytest.mark.parametrize("kind", [-1, 5, 255])
def test_unknown_kind(kind: int) -> None:
    with pytest.raises(ProtocolError, match=f"kind {kind}"):
        check_bounds(region(0, 0, kind), 0)


@given(st.integers(0, U64), st.integers(0, U64), st.integers(0, U64))
def test_agrees_with_unbounded_arithmetic(offset: int, nbytes: int, arena: int) -> None:
    if offset + nbytes <= arena:
        check_bounds(region(offset, nbytes), arena)
    else:
        with pytest.raises(ProtocolError):
            check_bounds(region(offset, nbytes), arena)
