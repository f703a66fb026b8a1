"""Values that are passed on without being opened."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import zcactor as zc
from tests.marshal.wire import Wire, address
from zcactor.errors import ProtocolError
from zcactor.marshal import move
from zcactor.marshal.packed import Packed, pack_resolved, shared
from zcactor.marshal.packing import Packing
from zcactor.marshal.values import Code
from zcactor.objectstore.ref import RegionKind


def test_packed_value_is_opened_by_its_last_receiver_only(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    array.fill(2)
    inner = Packed(*wire.left.marshaller.pack([array, (1, "a")]), status=3)
    got = wire.send([array, inner, "after"])[1]
    assert type(got) is Packed
    assert got.status == 3
    opened = wire.right.marshaller.unpack(got.payload, got.parts, got.flags)
    assert opened[1] == (1, "a")
    assert address(opened[0]) == address(array)
    assert wire.left.bytes_copied == 0


def test_what_is_passed_on_keeps_what_it_is_to_be(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    inner = Packed(*wire.left.marshaller.pack([array, {1}, zc.move(wire.left.store.empty(1000))]))
    got = wire.send([array, inner])[1]
    assert [part.authenticate for part in got.parts] == [1, 1]
    assert [part.authenticate for part in shared(got.parts)] == [1, 1]
    packing = Packing(wire.right.store, wire.right.copies, 512)
    pack_resolved(packing, got)
    assert [part.authenticate for part in packing.parts] == [1, 1]


def test_resolved_value_is_seen_as_itself(wire: Wire) -> None:
    array = wire.left.store.empty(1000)
    inner = Packed(*wire.left.marshaller.pack({"a": array}))
    packing = Packing(wire.left.store, wire.left.copies, 512)
    packed = [packing.pack(array), pack_resolved(packing, inner), pack_resolved(packing, inner)]
    parts = [wire.imported(part, wire.right) for part in packing.parts]
    got = wire.right.marshaller.unpack(msgspec.msgpack.encode(packed), parts, 0)
    assert [address(a) for a in (got[0], got[1]["a"], got[2]["a"])] == [address(array)] * 3


@pytest.mark.parametrize(
    "fields",
    [None, [], [b"", 0, 1, 0], [b"", 0, 1, 0, 0], [b"", -1, 0, 0, 0], [b"", 0, 2**63, 0, 0], ["", 0, 0, 0, 0],
     [b"", "a", 0, 0, 0],
     [b"", 1, -1, 0, 0], [b"", 0, 0, None, 0]],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("code", [Code.PACKED, Code.RESOLVED])
def test_malformed(wire: Wire, code: int, fields: Any) -> None:
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(fields)))
    with pytest.raises(ProtocolError):
        wire.right.marshaller.unpack(payload, [], 0)


def test_moved_value_with_several_receivers_is_shared(wire: Wire) -> None:
    plain = wire.left.marshaller.pack([wire.left.store.empty(1000)])[1]
    assert shared(plain) is plain
    payload, parts, flags = wire.left.marshaller.pack(move(wire.left.store.empty(1000)))
    assert [part.kind for part in parts] == [RegionKind.MOVED]
    leased = [wire.imported(part, wire.right) for part in parts]
    for ours in (parts, leased):
        passed = shared(ours)
        assert [part.kind for part in passed] == [RegionKind.ARRAY]
        assert not np.asarray(passed[0].holder).flags.writeable
    assert not wire.right.marshaller.unpack(payload, shared(leased), flags).flags.writeable
