"""Arrays of NumPy in the native part."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from zcactor.native import hot


class Owner:
    """The owner of some memory."""


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_over_memory_of_an_owner(shape: tuple[int, ...], order: Any) -> None:
    memory = np.arange(12, dtype=np.int32)
    owner = Owner()
    alive = weakref.ref(owner)
    made = hot.array_over(owner, hot.address(memory), np.empty(shape, np.int32, order))
    assert made.base is owner and made.shape == shape and made.dtype == np.int32
    assert made.flags.c_contiguous and made.flags.aligned and not made.flags.writeable and not made.flags.owndata
    assert made.ravel().tolist() == memory[: made.size].tolist()
    memory[:] = 7
    assert (made == 7).all(), "it shows the memory"
    with pytest.raises(ValueError, match="WRITEABLE"):
        made.flags.writeable = True
    view = made[...]
    del owner, made
    gc.collect()
    assert alive() is not None, "a view keeps the owner"
    del view
    gc.collect()
    assert alive() is None


def test_an_array_over_memory_needs_an_address_and_an_array() -> None:
    with pytest.raises(TypeError):
        hot.array_over(None, "here", np.empty(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hot.array_over(None, 0, [1, 2])


@pytest.mark.parametrize("dtype", [np.float64, np.dtype([("a", "i4"), ("b", "f8")])])
def test_references_of_dtypes_do_not_grow(dtype: Any) -> None:
    import sys

    like = np.empty(3, dtype)
    counts = []
    for _ in range(3):
        for _ in range(100):
            hot.array_over(like, hot.address(like), like)
        counts.append((sys.getrefcount(like), sys.getrefcount(like.dtype)))
    assert counts[0] == counts[2]
