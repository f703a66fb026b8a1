"""Integers and floats of 8 bits with a scale a block."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.hooks.ranks import exchange
from zcactor.hooks import FP8, Int8
from zcactor.hooks.blocks import float8_values, to_float8

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


@pytest.mark.parametrize("kind", TYPES)
def test_float8_values_are_those_of_ml_dtypes(kind: str) -> None:
    expected = np.arange(256, dtype=np.uint8).view(TYPES[kind]).astype(np.float32)
    ours = float8_values(kind)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(ours[finite], expected[finite])
    assert np.isnan(ours[~finite]).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@given(st.data())
def test_float8_bits_are_those_of_ml_dtypes(kind: str, data: st.DataObject) -> None:
    most = LARGEST[kind]
    drawn = data.draw(arrays(np.float32, st.integers(0, 40), elements=st.floats(-most, most, width=32)))
    small = (drawn / np.float32(2**20)).astype(np.float32)
    for values in (drawn, small):
        np.testing.assert_array_equal(to_float8(values, kind), values.astype(TYPES[kind]).view(np.uint8))


@pytest.mark.parametrize("kind", TYPES)
def test_float8_ties_go_to_even(kind: str) -> None:
    codes = np.arange(int(to_float8(np.array([LARGEST[kind]], np.float32), kind)[0]), dtype=np.uint8)
    values = float8_values(kind)
    between = ((values[codes].astype(np.float64) + values[codes + 1]) / 2).astype(np.float32)
    assert (to_float8(between, kind) % 2 == 0).all()


def test_a_nan_stays_one() -> None:
    assert np.isnan(float8_values("e4m3")[to_float8(np.array([np.nan], np.float32), "e4m3")]).all()


@pytest.mark.parametrize(("size", "block", "nbytes"), [(17226, 256, 17498), (16, 16, 20), (17, 16, 25), (1, 256, 5)])
def test_bytes_of_a_gradient(size: int, block: int, nbytes: int) -> None:
    grads = [np.ones(size, np.float32)] * 2
    for hook in (Int8, lambda block: FP8("e5m2", block=block)):
        assert exchange([hook(block=block) for _ in grads], grads)[1] == nbytes


@pytest.mark.parametrize("stochastic", [True, False])
def test_an_error_is_less_than_a_step_of_its_block(stochastic: bool) -> None:
    grad = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.repeat(10.0 ** np.arange(-5, 5), 100)
    grad = grad.astype(np.float32)
    results, _ = exchange([Int8(block=100, stochastic=stochastic)], [grad])
    steps = np.abs(grad).reshape(10, 100).max(axis=1) / 127
    assert (np.abs(results[0] - grad).reshape(10, 100) <= steps[:, None] * (1.001 if stochastic else 0.501)).all()


def test_stochastic_rounding_is_right_on_average_and_repeats() -> None:
    grad = np.concatenate([[1.0], np.full(4000, 0.5 / 127 + 3 / 127)]).astype(np.float32)
    first, _ = exchange([Int8(block=4001, error_feedback=False)], [grad])
    again, _ = exchange([Int8(block=4001, error_feedback=False)], [grad])
    other, _ = exchange([Int8(block=4001, error_feedback=False, seed=1)], [grad])
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])
    assert abs(first[0][1:].mean() * 127 - 3.5) < 0.05


def test_each_step_rounds_anew() -> None:
    hook = Int8(block=64, error_feedback=False)
    grad = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    one, two = (exchange([hook], [grad])[0][0] for _ in range(2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("make", [Int8, FP8])
def test_blocks_of_zeros_and_of_the_least_numbers(make: Any) -> None:
    grad = np.zeros(600, np.float32)
    grad[300:] = np.float32(1e-45)
    results, _ = exchange([make()], [grad])
    assert np.isfinite(results[0]).all()
    assert (results[0][:256] == 0).all()


@pytest.mark.parametrize("make", [Int8, FP8])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan(make: Any, value: float) -> None:
    grad = np.ones(10, np.float32)
    grad[3] = value
    with pytest.raises(ValueError, match="cannot encode infinity or NaN"):
        next(make().reduce("w", grad, 2))


@pytest.mark.parametrize("block", [0, -1, 2.0, True, None])
def test_blocks_that_are_none(block: Any) -> None:
    with pytest.raises(ValueError, match="block="):
        Int8(block=block)
    with pytest.raises(ValueError, match="block="):
        FP8(block=block)


def test_other_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="kind='e3m4'.*'e4m3', 'e5m2'"):
        FP8("e3m4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed=-1"):
        Int8(seed=-1)
    with pytest.raises(ValueError, match="stochastic=1"):
        Int8(stochastic=1)  # type: ignore[arg-type]
