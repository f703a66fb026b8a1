"""Copies of any strides, as rows: every element once, and few copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.device.array import rows_of


@st.composite
def views(draw: st.DrawFn) -> tuple[Any, Any]:
    """Two arrays of one shape, each a view of some strides."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))

    def view() -> Any:
        order = draw(st.permutations(range(len(shape))))
        steps = [draw(st.sampled_from([1, 1, 2, -1, -2])) for _ in shape]
        whole = np.zeros([1, *(shape[axis] * abs(steps[axis]) for axis in order)], "u2")[0, ...]
        part: Any = whole.transpose(np.argsort(order)) if shape else whole
        return part[(..., *(slice(None, None, step) for step in steps))]

    return view(), view()


@given(views())
def test_each_element_is_copied_once(pair: tuple[Any, Any]) -> None:
    into, out = pair
    out[...] = np.arange(1, out.size + 1).reshape(out.shape)
    bases = [each.ctypes.data for each in pair]
    raw = [each if each.base is None else each.base for each in pair]
    while any(each.base is not None for each in raw):
        raw = [each if each.base is None else each.base for each in raw]
    flat = [each.reshape(-1).view("u1") for each in raw]
    for rows in rows_of(into.shape, into.strides, out.strides, 2):
        assert rows.count == 1 or min(rows.strides) >= rows.nbytes
        for row in range(rows.count):
            to = bases[0] - raw[0].ctypes.data + rows.destination + row * rows.strides[0]
            from_ = bases[1] - raw[1].ctypes.data + rows.source + row * rows.strides[1]
            assert not flat[0][to : to + rows.nbytes].any()
            flat[0][to : to + rows.nbytes] = flat[1][from_ : from_ + rows.nbytes]
    assert (into == out).all()


@pytest.mark.parametrize(
    ("shape", "into", "out", "count"),
    [
        ((), (), (), 1),
        ((1000,), (8,), (8,), 1),
        ((50, 1000), (8000, 8), (8000, 8), 1),
        ((50, 1000), (8, 400), (8, 400), 1),  # both in Fortran's order
        ((50, 100), (800, 8), (8000, 8), 1),
        ((7, 50, 100), (40_000, 800, 8), (400_000, 8000, 8), 7),
        ((1000,), (8,), (-8,), 1000),
        ((0, 5), (40, 8), (40, 8), 0),
        ((5, 1, 3), (24, 999, 8), (24, -1, 8), 1),
    ],
)
def test_the_number_of_copies(shape: tuple[int, ...], into: tuple[int, ...], out: tuple[int, ...], count: int) -> None:
    assert len(list(rows_of(shape, into, out, 8))) == count
