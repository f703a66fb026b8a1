"""Copies of many bytes."""

from __future__ import annotations

import numpy as np
import pytest

from zcactor.native import hot
from zcactor.objectstore import bulk_copy

MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [0, 1, 5, 1000, 4096, 8 * MIB - 1, 9 * MIB + 1, 32 * MIB, 33 * MIB + 17])
@pytest.mark.parametrize("share", [0, 1000])
def test_all_bytes_and_no_others(monkeypatch: pytest.MonkeyPatch, share: int, nbytes: int) -> None:
    if share:
        monkeypatch.setattr(bulk_copy, "_SHARE_NBYTES", share)
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8)
    target = np.full(nbytes + 2, 7, np.uint8)
    bulk_copy.copy_in_bulk(hot.address(target) + 1, hot.address(source) + 3, nbytes)
    assert np.array_equal(target[1:-1], source[3:])
    assert target[0] == target[-1] == 7
