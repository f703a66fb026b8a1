"""Checks of the arguments of collectives."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zcactor.collectives import kinds


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (bool, "min max"),
        (np.int8, "sum min max prod"),
        (np.uint64, "sum min max prod"),
        (np.float32, "sum mean min max prod"),
        (np.complex64, "sum mean prod"),
        (ml_dtypes.bfloat16, "sum mean min max prod"),
        (ml_dtypes.float8_e4m3fn, "sum mean min max prod"),
        (ml_dtypes.int4, ""),
        ("U3", ""),
        ("M8[s]", ""),
        ("i4,f4", ""),
    ],
)
def test_the_ops_of_a_dtype(dtype: Any, allowed: str) -> None:
    dtype = np.dtype(dtype)
    for op in kinds.OPS:
        if op in allowed.split():
            kinds.check_op(dtype, op, "here")
        else:
            with pytest.raises(TypeError, match=f"here: there is no {op} of dtype"):
                kinds.check_op(dtype, op, "here")


def test_narrow_floats() -> None:
    narrow = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]
    assert all(kinds.is_narrow_float(np.dtype(each)) for each in narrow)
    assert not any(kinds.is_narrow_float(np.dtype(each)) for each in (np.float32, np.int8, ml_dtypes.int4, bool))


def test_rows_are_cut_as_numpy_does() -> None:
    for length in range(12):
        for size in range(1, 6):
            bounds = kinds.row_bounds(length, size, None, "here")
            pieces = np.array_split(np.arange(length), size)
            assert [b - a for a, b in itertools.pairwise(bounds)] == [len(piece) for piece in pieces]
    assert kinds.row_bounds(5, 3, [0, 5, 0], "here") == [0, 0, 5, 5]
    with pytest.raises(TypeError):
        kinds.row_bounds(5, 1, [5.0], "here")  # type: ignore[list-item]


def test_signatures_name_dtype_and_shape() -> None:
    assert kinds.described(np.dtype(np.float32), (2, 3)) == "float32, (2, 3)"
    assert kinds.described(np.dtype(np.float32), (2, 3), rows=False) == "float32, rows of (3,)"
    assert "'a'" in kinds.described(np.dtype([("a", "i4")]), (1,))
