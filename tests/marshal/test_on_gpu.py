"""Classes and values that may be arrays on GPUs."""

from __future__ import annotations

import gc
from weakref import ref

import numpy as np

from tests.device.foreigners import Interfaced, Packed
from tests.device.helpers import array_on, opened
from zcactor.marshal.on_gpu import is_on_gpu, may_be_on_gpu


class Plain:
    """A class of a program."""


def test_classes() -> None:
    assert [may_be_on_gpu(each) for each in (Packed, Interfaced, int, Plain, np.ndarray, np.ma.MaskedArray)] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
    made = [type(f"Made{number}", (), {}) for number in range(5000)]
    assert not any(may_be_on_gpu(each) for each in (*made, *made))
    kept = ref(made.pop())
    gc.collect()
    assert kept() is None


def test_values() -> None:
    with opened() as devices:
        array = array_on(devices.gpu(0), np.arange(3))
        assert is_on_gpu(array) and is_on_gpu(Packed(array)) and is_on_gpu(Interfaced(4096, (3,), "<i4"))
        array.hand_over()
        assert is_on_gpu(array)
    assert not any(is_on_gpu(each) for each in (5, "text", Plain(), np.arange(3)))
