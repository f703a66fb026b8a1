"""The largest elements alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.hooks.ranks import exchange
from zcactor.hooks import TopK


@pytest.mark.parametrize(
    ("fraction", "size", "count"), [(0.01, 1000, 10), (0.011, 1000, 11), (0.0001, 1000, 1), (1, 10, 10), (0.5, 3, 2)]
)
def test_how_many_elements_are_sent(fraction: float, size: int, count: int) -> None:
    grad = np.random.default_rng(0).permutation(np.arange(1, size + 1)).astype(np.float32)
    results, nbytes = exchange([TopK(fraction)], [grad])
    assert nbytes == 8 * count
    kept = np.flatnonzero(results[0])
    assert sorted(results[0][kept]) == list(range(size - count + 1, size + 1))


def test_magnitude_counts_and_ranks_add_up() -> None:
    one = np.array([0, -9, 1, 2], np.float32)
    two = np.array([0, 4, 1, -8], np.float32)
    results, _ = exchange([TopK(0.25), TopK(0.25)], [one, two])
    np.testing.assert_array_equal(results[0], [0, -9, 0, -8])
    results, _ = exchange([TopK(0.5), TopK(0.5)], [one, two])
    np.testing.assert_array_equal(results[0], [0, -5, 0, -6])


def test_what_was_left_out_comes_later() -> None:
    hook = TopK(0.25)
    grad = np.array([4, 3, 0, 0], np.float32)
    first, _ = exchange([hook], [grad])
    second, _ = exchange([hook], [grad])
    np.testing.assert_array_equal(first[0], [4, 0, 0, 0])
    np.testing.assert_array_equal(second[0], [0, 6, 0, 0])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan"), "0.1", None, True])
def test_fractions_out_of_range(fraction: Any) -> None:
    with pytest.raises(ValueError, match="fraction="):
        TopK(fraction)


def test_an_index_that_no_hook_sends() -> None:
    run = TopK(0.5).reduce("w", np.ones(4, np.float32), 2)
    next(run)
    with pytest.raises(ValueError, match="negative index"):
        run.send([[np.array([-1], np.int32), np.ones(1, np.float32)]])
