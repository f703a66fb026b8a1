"""Dtypes and shapes of arrays in frames that the native part leaves to Python."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.native.ends import US, End
from tests.native.frames import frame, read
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_codes, known_dtypes
from zcactor.marshal.marshaller import Marshaller
from zcactor.native import hot
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.store import Store
from zcactor.rpc.messages import Kind


@pytest.mark.parametrize("name", ["S0", "U0", "V0"])
@pytest.mark.parametrize("beside", [[], [("b", "i4")]], ids=["alone", "strided"])
def test_elements_of_no_bytes_arrive_as_they_were_sent(end: End, name: str, beside: Any) -> None:
    array = np.zeros((4, 10), [("a", name), *beside])["a"]
    assert array.dtype.itemsize == 0
    store = Store(1 << 22, US)
    marshaller = Marshaller(store, CopyCounter(), hot.Counters(), 16384)
    payload, parts, _ = marshaller.pack_call((array,), {})
    dtype_from_code(dtype_code(array.dtype))
    assert not parts
    end.wire.feed(frame(Kind.CALL, 5, payload))
    assert end.calls == [] and len(end.others) == 1, "Python reads it"
    (received,) = marshaller.unpack(payload, (), 0)
    assert (received.dtype, received.shape, received.dtype.itemsize) == (array.dtype, array.shape, 0)
    if end.call(1, 1, array):
        *_, sent = read(end.sent())
        (received,) = marshaller.unpack(sent, (), 0)
        assert (received.dtype, received.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("shape", [[0, 1 << 62, 1 << 62], [1 << 63, 0], [1 << 60, 0, 16]])
def test_a_shape_beyond_what_numpy_counts_is_pythons_to_refuse(end: End, shape: list[int]) -> None:
    known_dtypes["<f8"] = np.dtype("<f8")
    layout = msgspec.msgpack.encode([b"", "<f8", shape, False])
    payload = msgspec.msgpack.encode([msgspec.msgpack.Ext(4, layout)])
    end.wire.feed(frame(Kind.CALL, 5, payload))
    assert end.calls == [] and len(end.others) == 1
    marshaller = Marshaller(Store(1 << 22, US), CopyCounter(), hot.Counters(), 16384)
    with pytest.raises(ProtocolError):
        marshaller.unpack(payload, (), 0)


def test_a_dtypes_name_that_is_not_ascii_is_left_to_python() -> None:
    end = End()
    array = np.zeros(3, "i2")
    before = known_codes.get(array.dtype)
    known_codes[array.dtype] = "\u20ac" * 31
    try:
        assert not end.call(1, 1, *[array] * 15)
    finally:
        del known_codes[array.dtype]
        if before is not None:
            known_codes[array.dtype] = before
        end.close()
