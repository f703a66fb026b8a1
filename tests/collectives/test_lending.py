"""`zcactor.collectives.lending`: arrays that are lent are read-only meanwhile, and as before afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from zcactor.collectives.lending import alias
from zcactor.marshal.sharing import closable
from zcactor.native import hot


def test_an_array_is_writable_again_after_the_last_loan() -> None:
    array = np.zeros(3)
    assert hot.lend(array)
    assert hot.lend(array)
    assert hot.lent(array)
    hot.give_back(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    hot.give_back(array)
    array[0] = 1
    assert not hot.lent(array)
    with pytest.raises(ValueError, match="was not lent"):
        hot.give_back(array)


def test_an_array_that_was_read_only_is_not_lent() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not hot.lend(array)
    assert not array.flags.writeable


def test_a_view_of_memory_that_was_sealed_meanwhile_stays_read_only() -> None:
    array = np.zeros(3)
    view = array[:2]
    hot.lend(view)
    array.flags.writeable = False
    hot.give_back(view)
    assert not view.flags.writeable


@pytest.mark.parametrize("loans", [1, 2])
def test_an_array_that_is_passed_on_meanwhile_stays_read_only(loans: int) -> None:
    array = np.zeros(3)
    for _ in range(loans):
        hot.lend(array)
    hot.keep(array)
    assert not hot.lent(array)
    for _ in range(loans):
        hot.give_back(array)
        assert not array.flags.writeable
    assert not hot.lend(array)


def test_an_array_that_takes_a_result() -> None:
    array = np.zeros(6)
    view, before = array.reshape(2, 3), sys.getrefcount(array)
    hot.claim(array)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert hot.claimed(array) and hot.claimed(view[0]) and hot.lent(array)
    for again in (array, np.broadcast_to(0.0, 3)):
        with pytest.raises(ValueError, match="writable, and not lent"):
            hot.claim(again)
    hot.give_back(array)
    array[0] = 1
    assert not hot.claimed(view)
    assert sys.getrefcount(array) == before
    hot.lend(array)
    with pytest.raises(ValueError, match="writable, and not lent"):
        hot.claim(array)
    hot.give_back(array)


@pytest.mark.parametrize("function", [hot.lend, hot.claim, hot.claimed, hot.lent, hot.keep])
def test_what_is_no_array_is_refused(function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="not list"):
        function([])


def test_arrays_that_can_be_closed() -> None:
    """Nobody else can write to their memory."""
    owner = np.zeros(12)
    alone = np.zeros(12).reshape(3, 4)
    assert closable(owner) and closable(alone) and closable(np.frombuffer(b"abc", np.uint8))
    assert not closable(owner[:3]) and not closable(owner.reshape(3, 4)) and not closable(np.asarray(owner.data))
    read_only = owner[:3]
    read_only.flags.writeable = False
    assert not closable(read_only), "its owner is open"
    hot.lend(owner)
    assert not closable(owner[:3]), "its owner becomes writable again"
    hot.give_back(owner)
    read_only, owner.flags.writeable = owner[:3], False
    read_only.flags.writeable = False
    assert closable(read_only)


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # since NumPy 2.5
@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(10), lambda: np.ones((2, 5)).reshape(-1), lambda: np.ones(20)[10:], lambda: np.ones((3, 4)).T,
        lambda: np.ones(10)[::-2], lambda: np.array(1.0), lambda: np.ones((0, 3)), lambda: np.ones(4, ">f8"),
    ],
)  # fmt: skip
def test_an_alias_keeps_the_header_and_opens_nothing(make: Callable[[], Any]) -> None:
    array = make()
    before, values = closable(array), array.copy()
    other = alias(array)
    assert closable(array) == before or not array.flags.c_contiguous
    array.shape = (1, *array.shape)
    assert other.shape == values.shape and other.dtype == values.dtype and (other == values).all()
    del array
    assert (other == values).all()
