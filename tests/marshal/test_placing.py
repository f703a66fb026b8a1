"""Copies in the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from zcactor.marshal.arrays import root_of
from zcactor.marshal.placing import place, placed
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(16 << 20, bytes(16), extent_nbytes=1 << 20)
    yield made
    made.close()


base = np.arange(2400, dtype=">u4").reshape(20, 30, 4)
CASES = {
    "C": (base, base.nbytes),
    "F": (np.asfortranarray(base), base.nbytes),
    "sparse": (base[::2, ::3], base.nbytes // 6),
    "negative": (base[::-1, :, ::-2].transpose(1, 2, 0), base.nbytes // 2),
    "broadcast": (np.broadcast_to(base[0], (1 << 30, 30, 4)), base[0].nbytes),
    "broadcast backwards": (np.broadcast_to(base[0, ::-1], (50, 30, 4)), base[0].nbytes),
    "window": (sliding_window_view(base.reshape(-1), 1000), base.nbytes),
    "overlapping": (as_strided(base, (100, 4), (8, 4)), 99 * 8 + 16),
    "zero-d": (base[0, 0, 0, ...], 4),
    "one": (base[3:4, 5:6, ::-1][:, :, :1], 4),
}


@pytest.mark.parametrize("case", CASES)
def test_copy_is_equal_and_takes_no_more_than_it_must(store: Store, case: str) -> None:
    array, nbytes = CASES[case]
    copies = CopyCounter()
    copied = place(store, copies, array, "test")
    assert copied.shape == array.shape
    assert copied.dtype == array.dtype
    part: Any = (slice(0, 100),) * array.ndim
    assert copied[part].tolist() == array[part].tolist()
    block = root_of(copied)
    assert block.nbytes == nbytes
    count = copies.snapshot()["test"]
    assert (count.count, count.nbytes) == (1, nbytes)
    again = placed(array, np.asarray(block))
    assert again.strides == copied.strides
    assert again[part].tolist() == array[part].tolist()
