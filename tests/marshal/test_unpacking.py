"""Incoming payloads are checked: forged, damaged and random ones are protocol errors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.marshal.test_marshaller import Holder, in_one_wire
from tests.marshal.wire import LIMIT, Wire
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import root_of
from zcactor.marshal.packed import Packed, pack_resolved
from zcactor.marshal.packing import Packing
from zcactor.marshal.values import Code
from zcactor.rpc.messages import Flags

ext = msgspec.msgpack.Ext
encode = msgspec.msgpack.encode
big = st.sampled_from([0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
codes = st.sampled_from(
    ["<f8", "|u1", "|V0", "<U1", "ml:bfloat16", ["struct", [["a", "<i4", 0]], 4, False], "|O", None, 3]
)
anything = st.recursive(
    st.none() | st.booleans() | big | st.floats() | st.text(max_size=3) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
shapes = st.lists(big | st.integers(-2, 200), max_size=70) | anything
arrays = st.tuples(big | st.integers(0, 3), codes, shapes, st.none() | shapes, big).map(list)
inlines = st.tuples(st.binary(max_size=64) | anything, codes, shapes, st.booleans() | anything, st.none() | shapes).map(
    list
)
known = st.sampled_from(
    [Code.TUPLE, Code.BIG_INT, Code.ARRAY, Code.INLINE_ARRAY, Code.SCALAR, Code.PACKED, Code.RESOLVED]
)


forged = (
    st.tuples(known | st.integers(-128, 127).filter(lambda c: c != Code.PICKLE), anything | arrays | inlines)
    | st.tuples(st.just(Code.ARRAY), arrays)
    | st.tuples(st.just(Code.INLINE_ARRAY), inlines)
    | st.tuples(st.just(Code.SCALAR), st.tuples(codes, st.binary(max_size=16)))
    | st.tuples(
        st.sampled_from([Code.PACKED, Code.RESOLVED]),
        st.tuples(st.binary(max_size=8), big, big, big | st.integers(0, 3), big),
    )
)


def hostile(wire: Wire, payload: bytes, flags: int = 0) -> Any:
    """Unpack `payload`, with two parts at hand; return its value, or the one error that it may raise."""
    if not wire.parts:
        wire.send([wire.left.store.empty(1000), wire.left.store.empty(2000, "u1")])
    parts = [wire.imported(part, wire.right) for part in wire.parts]
    try:
        return wire.right.marshaller.unpack(payload, parts, flags)
    except ProtocolError as error:
        return error


def in_bounds(wire: Wire, value: Any) -> None:
    """Check that every array in `value` lies inside its part, or has memory of its own."""
    if isinstance(value, np.ndarray):
        root = root_of(value)
        if value.size and value.itemsize and hasattr(root, "address"):
            low, high = np.lib.array_utils.byte_bounds(value)
            assert root.address <= low <= high <= root.address + root.nbytes
        assert not value.flags.writeable or value.base is not None
    elif isinstance(value, list | tuple):
        for item in value:
            in_bounds(wire, item)


def test_bytes_that_are_in_a_message_twice_are_mapped_once(wire: Wire) -> None:
    array = wire.left.store.empty(1000, "u1")
    array.fill(1)
    counters = wire.right.counters
    for value, nbytes in (
        ([array, array], 1000),
        ({"a": (array, array.reshape(10, 100)), "b": Holder("a", array, [array])}, 1000),
        ([array, array[:600]], 1600),
        (array, 1000),
    ):
        before = counters.bytes_mapped
        wire.send(value)
        assert counters.bytes_mapped - before == nbytes
    inner = Packed(*wire.left.marshaller.pack([array]))
    packing = Packing(wire.left.store, wire.left.copies, LIMIT)
    packed = [packing.pack(array), pack_resolved(packing, inner)]
    parts = [wire.imported(part, wire.right) for part in packing.parts]
    before = counters.bytes_mapped
    wire.right.marshaller.unpack(encode(packed), parts, 0)
    assert counters.bytes_mapped - before == 1000


@pytest.mark.slow
@settings(in_one_wire, max_examples=300)
@given(forged, st.integers(0, 3))
def test_forged_extensions_are_protocol_errors(wire: Wire, one: tuple[int, Any], flags: int) -> None:
    code, content = one
    in_bounds(wire, hostile(wire, encode([ext(code, encode(content))]), flags & Flags.SPILLED))
    in_bounds(wire, hostile(wire, encode(ext(code, encode(content)))))


@pytest.mark.slow
@settings(in_one_wire, max_examples=300)
@given(st.binary(max_size=64), st.integers(0, 7))
def test_random_bytes_are_protocol_errors(wire: Wire, payload: bytes, flags: int) -> None:
    assume(bytes([Code.PICKLE]) not in payload)
    in_bounds(wire, hostile(wire, payload, flags))


@pytest.mark.slow
@settings(in_one_wire, max_examples=300)
@given(st.data())
def test_damaged_messages_are_protocol_errors(wire: Wire, data: st.DataObject) -> None:
    wire.send([1, (2, "a" * 40), np.arange(5), np.float32(1), {"k": wire.left.store.empty(100)}, 2**70, b"x" * 20])
    payload = bytearray(wire.payload)
    if data.draw(st.booleans()):
        del payload[data.draw(st.integers(0, len(payload) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4)) if payload else 0):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != Code.PICKLE))
    in_bounds(wire, hostile(wire, bytes(payload)))


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff\x00",
        b"\xc9\xff\xff\xff\xff\x03", b"\xdc\xff\xff" * 1000, b"\x91" * 100_000, b"\x81" * 100_000, b"\xc1", b"",
        b"\x91", b"\xc7\x00\x03", b"\xc7\x00\x01", b"\xc7\x01\x01\xc0", b"\x01\x01",
    ],
    ids=lambda payload: payload[:6].hex() or "empty",
)  # fmt: skip
def test_forged_lengths_and_depths(wire: Wire, payload: bytes) -> None:
    assert isinstance(hostile(wire, payload), ProtocolError)
    nested = payload
    for _ in range(3):
        nested = encode(ext(Code.TUPLE, nested))
    assert isinstance(hostile(wire, nested), ProtocolError)


def test_deeply_nested_tuples(wire: Wire) -> None:
    payload = encode([])
    for _ in range(2000):
        payload = encode([ext(Code.TUPLE, payload)])
    assert isinstance(hostile(wire, payload), ProtocolError)


def test_part_that_is_no_bytes(wire: Wire) -> None:
    wire.send([wire.left.store.empty(1000)])
    part = wire.parts[0]._replace(holder=object())
    for flags in (0, Flags.SPILLED):
        with pytest.raises(ProtocolError, match="which has none"):
            wire.right.marshaller.unpack(wire.payload, [part], flags)
