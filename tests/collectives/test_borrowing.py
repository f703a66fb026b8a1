"""Inputs are read-only while they are borrowed, and as before afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from zcactor.collectives.borrowing import Borrowing


def test_an_array_is_writable_again_after_the_last_borrowing() -> None:
    array = np.zeros(3)
    first, second = Borrowing(array), Borrowing(array)
    first.end()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    first.end()  # once more changes nothing
    assert not array.flags.writeable
    second.end()
    array[0] = 1


def test_an_array_that_was_read_only_stays_so() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    borrowing = Borrowing(array)
    borrowing.end()
    assert not array.flags.writeable


def test_a_view_of_memory_that_was_sealed_meanwhile_stays_read_only() -> None:
    array = np.zeros(3)
    view = array[:2]
    borrowing = Borrowing(view)
    array.flags.writeable = False
    borrowing.end()
    assert not view.flags.writeable
