"""dtype codes and layouts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.array_utils import byte_bounds as numpys_bounds

from tests.marshal.dtypes import DTYPES
from tests.marshal.wire import assert_same_dtype
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import (
    array_address,
    byte_bounds,
    dtype_code,
    dtype_from_code,
    innermost,
    is_shareable,
    known_codes,
    packed_strides,
    root_of,
)
from zcactor.objectstore.store import Store

through_msgpack = msgspec.msgpack.decode


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_comes_back(dtype: np.dtype[Any]) -> None:
    assert is_shareable(dtype)
    code = dtype_code(dtype)
    assert dtype_code(dtype) == code  # a second time, from the cache
    assert_same_dtype(dtype_from_code(through_msgpack(msgspec.msgpack.encode(code))), dtype)


def test_dtypes_that_numpy_holds_equal_are_kept_apart() -> None:
    plain = np.dtype([("a", "i4"), ("b", "i4")])
    record = np.dtype((np.record, plain))
    aligned = np.dtype(plain.descr, align=True)
    assert plain == record == aligned
    for dtype in (plain, record, aligned, plain):
        assert_same_dtype(dtype_from_code(dtype_code(dtype)), dtype)
    assert plain not in known_codes


@pytest.mark.parametrize("dtype", [object, np.dtypes.StringDType(), [("a", object)]], ids=str)
def test_what_is_not_plain_bytes_is_not_shareable(dtype: Any) -> None:
    assert not is_shareable(np.dtype(dtype))


def test_title_that_is_no_string_is_refused() -> None:
    with pytest.raises(TypeError, match="title"):
        dtype_code(np.dtype({"names": ["a"], "formats": ["i4"], "titles": [5]}))


MALFORMED: list[Any] = [
    None, 1, 1.5, b"<i4", [], {}, [1], "", "O", "|O", "|O8", "T", "i4,i4", "3i4", "(2,)i4", "<i3", "<f7", "object",
    "int64", "<M8[fortnight]", "<i4\n", "<S-1", "<S99999999999", "<S2147483647x", "ml:", "ml:nothing", "ml:finfo",
    "ml:np",
    "ml:__name__", ["sub", "<i4", [2]], ["sub", "<i4", [-1]], ["sub", "<i4", 2**63], ["sub", "<i4", [1 << 40, 1 << 40]],
    ["sub"], ["struct"], ["what", [], 0, False], ["struct", [["a", "<i4", 0]], 2, False],
    ["struct", [["a", "|O", 0]], 8, False], ["struct", [["a", "<i4", -4]], 8, False],
    ["struct", [["a", "<i4", 2**64]], 8, False], ["struct", [["a", "<i4"]], 4, False],
    ["struct", [["a", "<i4", 0], ["a", "<i4", 0]], 4, False], ["struct", [[1, "<i4", 0]], 4, False],
    ["struct", [["a", "<i4", 1]], 8, True], ["struct", [["a", "<i4", 0]], -1, False], ["struct", 5, 4, False],
    ["struct", [["a", "<i4", 0, 7, 8]], 2**70, False],
]  # fmt: skip


@pytest.mark.parametrize("code", MALFORMED, ids=repr)
def test_malformed_code_is_a_protocol_error(code: Any) -> None:
    with pytest.raises(ProtocolError):
        dtype_from_code(code)


def test_code_that_is_nested_too_deeply_is_refused() -> None:
    code: Any = "<i4"
    for _ in range(100):
        code = ["struct", [["a", code, 0]], 4, False]
    with pytest.raises(ProtocolError, match="32 levels"):
        dtype_from_code(code)


codes = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)
structures = st.tuples(
    st.sampled_from(["struct", "rec", "sub"]), st.lists(st.lists(codes, max_size=4), max_size=3), codes, codes
)


@given(codes | structures.map(list))
@pytest.mark.slow
def test_any_value_is_a_dtype_or_a_protocol_error(code: Any) -> None:
    try:
        dtype = dtype_from_code(code)
    except ProtocolError:
        return
    assert is_shareable(dtype)


@st.composite
def views(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Views of one array with any step along each axis, in any order of the axes."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    array = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    steps = [slice(None, None, draw(st.sampled_from([1, 2, -1, -2]))) for _ in shape]
    array = array[tuple(steps)].transpose(draw(st.permutations(range(len(shape)))))
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(1, 3)), *array.shape))
    return array


@pytest.mark.slow
@given(views())
def test_bounds_and_packed_strides_are_numpys(array: np.ndarray[Any, Any]) -> None:
    assert byte_bounds(array) == numpys_bounds(array)
    copied = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes), 0, packed_strides(array))
    copied[...] = array  # the array fits without a gap
    assert copied.tolist() == array.tolist()
    if not any(stride == 0 for stride, length in zip(array.strides, array.shape, strict=True) if length > 1):
        order = [
            stride for stride, length in zip(array.copy(order="K").strides, array.shape, strict=True) if length > 1
        ]
        ours = [stride for stride, length in zip(copied.strides, array.shape, strict=True) if length > 1]
        assert ours == order


def test_root_is_found_through_any_chain_of_views() -> None:
    store = Store(1 << 20, bytes(16))
    array = store.empty((4, 6), "u1")
    block = root_of(array)
    view: Any = array[1:, ::2].T.view(np.matrix)[:, 1:].view(np.ndarray)
    assert root_of(view) is block
    assert innermost(view).base is block
    assert array_address(array) == array.ctypes.data == root_of(view).address
    assert root_of(np.zeros(3)) is None
    assert root_of(np.zeros(3)[1:]) is None
    owner = np.zeros(3)
    assert innermost(owner[1:]) is owner
    assert innermost(owner) is owner
    assert isinstance(root_of(np.frombuffer(b"abc", "u1")), bytes)
    store.close()
