"""Copies past the caches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from zcactor.native import hot


@pytest.mark.parametrize("nbytes", [0, 1, 15, 63, 64, 65, 127, 128, 1000, 4096, 70_001])
def test_the_bytes_that_were_asked_for_and_no_others(nbytes: int) -> None:
    rng, drawn = random.Random(nbytes), np.random.default_rng(nbytes)
    source = drawn.integers(0, 256, nbytes + 200, np.uint8)
    for _ in range(40):
        to, start = rng.randrange(130), rng.randrange(130)
        target = drawn.integers(0, 256, nbytes + 200, np.uint8)
        wanted = target.copy()
        wanted[to : to + nbytes] = source[start : start + nbytes]
        hot.copy(hot.address(target) + to, hot.address(source) + start, nbytes)
        assert np.array_equal(target, wanted)


def test_a_negative_number_of_bytes() -> None:
    array = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="-1 bytes cannot be copied"):
        hot.copy(hot.address(array), hot.address(array), -1)


@pytest.mark.parametrize("wrong", [("1", 2, 3), (1, 2), (1, 2, 3.5)])
def test_arguments_of_another_kind(wrong: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        hot.copy(*wrong)  # type: ignore[arg-type]
