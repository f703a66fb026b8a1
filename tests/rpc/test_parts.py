"""Parts are plain values."""

from __future__ import annotations

from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part


def test_a_part_is_a_value() -> None:
    part = Part(RegionKind.ARRAY, "holder", 64, 128)
    assert part == Part(RegionKind.ARRAY, "holder", 64, 128)
    assert part != Part(RegionKind.REF, "holder", 64, 128)
    kind, holder, offset, nbytes, authenticate = part
    assert (kind, holder, offset, nbytes, authenticate) == (RegionKind.ARRAY, "holder", 64, 128, 0)
    assert part._fields == ("kind", "holder", "offset", "nbytes", "authenticate")
