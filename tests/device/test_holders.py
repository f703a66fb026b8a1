"""The holder of an array that was handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.device.helpers import array_on, held, opened, seen
from zcactor.device.array import Gone


def test_every_use_is_refused() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(10))
        other = array.copy()
        array.hand_over()
        assert type(array.holder) is Gone and array.shape == (10,) and "handed over" in repr(array)
        uses: list[Callable[[], Any]] = [
            lambda: array.fill(1),
            lambda: array[1:].copy(),
            lambda: other.copy_from(array),
            lambda: array.readonly,
            lambda: array.device,
            lambda: seen(array),
            array.__dlpack_device__,
            array.__dlpack__,
            lambda: array.__cuda_array_interface__,
        ]
        for use in uses:
            with pytest.raises(ValueError, match="handed over"):
                use()
        assert store.used == 512
        array.take_back()
        array.take_back()
        array.fill(3)
        assert (seen(array) == 3).all()


def test_an_event_that_was_told_is_not_told_again() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(10))
        block: Any = array.holder
        with held(store.driver):
            array.fill(1)
            block.sealed, (block.told,) = True, block.work.writes()
            block.work.seal()
            told = block.told
            array.hand_over()
            array.take_back()
            assert block.told is None and not array.readonly and block.work.writes() == [told, told]
