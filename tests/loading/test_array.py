"""One array in the store: bytes behind it in the file, and a store that has no room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.loading.samples import CAPACITY, MIB, assert_read, saved

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_follows_an_npy_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "two.npy"
    path.write_bytes(saved(np.arange(4)) + saved(np.ones(2)))
    assert_read(zc.load(path), np.arange(4))


@pytest.mark.slow
async def test_a_store_that_is_full(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(MIB))
    np.savez(tmp_path / "b.npz", small=np.ones(1000), large=np.ones(MIB))
    np.ones(MIB).tofile(tmp_path / "c")
    np.save(tmp_path / "fits.npy", np.ones(1000))
    kept = zc.empty(CAPACITY - MIB, "u1"), zc.load(tmp_path / "fits.npy")
    used = zc.stats().store_used
    cases: list[tuple[str, dict[str, Any]]] = [("a.npy", {}), ("b.npz", {}), ("c", {"dtype": "f8"})]
    for name, arguments in cases:
        with pytest.raises(zc.OutOfMemory) as caught:
            zc.load(tmp_path / name, **arguments)
        assert caught.value.requested == 8 * MIB
        assert zc.stats().store_used == used
    assert kept[1].sum() == 1000
