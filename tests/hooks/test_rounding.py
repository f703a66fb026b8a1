"""bfloat16 bits against ml_dtypes, and the sum's order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.hooks.ranks import exchange
from zcactor.hooks import BF16
from zcactor.hooks.rounding import from_bfloat16, to_bfloat16


@pytest.mark.slow
@given(arrays(np.uint32, st.integers(0, 50), elements=st.integers(0, 2**32 - 1)))
def test_bits_are_those_of_ml_dtypes(bits: np.ndarray) -> None:
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    ours = to_bfloat16(values)
    numbers = ~np.isnan(values)
    np.testing.assert_array_equal(ours[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(from_bfloat16(ours)[~numbers]).all()


@pytest.mark.slow
@given(arrays(np.uint16, 20, elements=st.integers(0, 2**16 - 1)))
def test_values_are_those_of_ml_dtypes(bits: np.ndarray) -> None:
    np.testing.assert_array_equal(from_bfloat16(bits), bits.view(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_sum_is_made_in_float32_by_rank(ranks: int) -> None:
    grads = [np.random.default_rng(rank).standard_normal(100).astype(np.float32) for rank in range(ranks)]
    expected = np.zeros(100, np.float32)
    for grad in grads:
        expected += grad.astype(ml_dtypes.bfloat16).astype(np.float32)
    results, nbytes = exchange([BF16() for _ in grads], grads)
    np.testing.assert_array_equal(results[0], expected)
    assert nbytes == 200
