"""Raw files: their shapes, and sizes that match no shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.loading.samples import assert_read, refused

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_raw(tmp_path: Path) -> None:
    path = tmp_path / "raw.npy"  # the suffix does not matter
    data = np.arange(24, dtype=">i2")
    path.write_bytes(b"head" + data.tobytes())
    assert_read(zc.load(path, dtype=">i2", offset=4), data)
    assert_read(zc.load(path, dtype=">i2", offset=4, shape=24), data)
    assert_read(zc.load(path, dtype=">i2", offset=np.int64(4), shape=(4, -1)), data.reshape(4, 6))
    assert_read(zc.load(path, dtype=">i2", offset=4, shape=[-1, 3, 2]), data.reshape(4, 3, 2))
    pairs = [("a", "u1"), ("b", ">i2", (2,)), ("c", "S1")]
    assert_read(zc.load(path, dtype=pairs, offset=4), np.frombuffer(data.tobytes(), pairs))
    assert_read(zc.load(path, dtype=">i2", offset=52), np.zeros(0, ">i2"))
    assert_read(zc.load(path, dtype=">i2", offset=50, shape=()), np.array(23, ">i2"))


async def test_empty_raw_files(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert_read(zc.load(path, dtype="f4"), np.zeros(0, "f4"))
    assert_read(zc.load(path, dtype="f4", shape=(-1, 3)), np.zeros((0, 3), "f4"))
    assert_read(zc.load(path, dtype="f4", shape=(3, 0)), np.zeros((3, 0), "f4"))


async def test_raw_files_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(50))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "f8"}, "multiple of 8 bytes was expected .* 50 found"),
        ({"dtype": "f8", "offset": 3}, "multiple of 8 bytes was expected .* 47 found after offset 3"),
        ({"dtype": "u1", "shape": 51}, "51 bytes were expected .* 50 found"),
        ({"dtype": "u1", "shape": (7, 7)}, "49 bytes were expected .* 50 found"),
        ({"dtype": "u2", "shape": (5, 5), "offset": 2}, "50 bytes were expected .* 48 found after offset 2"),
        ({"dtype": "u1", "shape": (-1, 7)}, "multiple of 7 bytes was expected .* 50 found"),
        ({"dtype": "u1", "shape": (-1, -1)}, "negative"),
        ({"dtype": "u1", "shape": (-2, -1)}, "negative"),
        ({"dtype": "u1", "shape": -3}, "negative"),
        ({"dtype": "u1", "shape": (0, -1)}, "inferred"),
        ({"dtype": "S0"}, "inferred"),
        ({"dtype": "S0", "shape": 3}, "0 bytes were expected .* 50 found"),
        ({"dtype": "u1", "offset": 51}, "offset 51 is not within its 50 bytes"),
        ({"dtype": "u1", "offset": -1}, "offset -1 is not within its 50 bytes"),
        ({"dtype": "u1", "shape": (1 << 70, 0)}, "no array of that shape"),
        ({"dtype": "u1", "shape": 1 << 62}, "4,611,686,018,427,387,904 bytes were expected"),
        ({"dtype": ("u1", (2,))}, "shape of its own"),
    ]
    for arguments, match in cases:
        refused(ValueError, match, path, **arguments)
