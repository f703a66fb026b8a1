"""dtypes of every kind, and arrays of them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

NESTED = np.dtype([("id", "u2"), ("pos", [("x", "f4"), ("y", ">f8")], (2, 3)), ("tag", "S5"), ("at", "M8[us]")])
DTYPES: list[np.dtype[Any]] = [
    *map(np.dtype, ["?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "g", "F", "D", "G"]),
    *map(np.dtype, [">i2", ">u4", ">i8", ">f4", ">f8", ">c16", ">M8[ns]", ">U3"]),
    *map(np.dtype, ["M8[Y]", "M8[D]", "M8[25s]", "M8[ns]", "M8[as]", "m8[us]", "m8[W]", "m8", "M8"]),
    *map(np.dtype, ["S1", "S7", "U1", "U9", "V1", "V8", "V33"]),
    *map(
        np.dtype,
        [
            ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu,
            ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.float4_e2m1fn,
        ],
    ),
    *(np.dtype(each).newbyteorder(">") for each in (ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)),
    NESTED,
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype([("a", "i1"), ("b", "f8")]),
    np.dtype((np.record, [("a", "i1"), ("b", "f8")])),
    np.dtype([(("a title", "a"), "i4"), ("b", "f2")]),
    np.dtype({"names": ["b", "a"], "formats": ["i4", "u1"], "offsets": [8, 1], "itemsize": 16}),
    np.dtype({"names": ["whole", "low"], "formats": ["u4", "u2"], "offsets": [0, 0]}),
    np.dtype([("m", ml_dtypes.bfloat16, (2,)), ("n", "m8[ms]")]),
    np.dtype([("inner", np.dtype((np.record, [("r", "i2")]))), ("e", "f4", (0,))]),
]  # fmt: skip


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], order: Any = "C", seed: int = 0) -> np.ndarray[Any, Any]:
    """An array of random bytes (of valid code points where these are characters); padding is zero."""
    raw = np.random.default_rng(seed).integers(0, 255, (*shape, dtype.itemsize), np.uint8)
    random = _valid(np.ndarray(shape, dtype, raw.tobytes()))
    array = np.zeros(shape, dtype, order)
    array[...] = random
    return array


def _valid(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind == "U":
        count = array.dtype.itemsize // 4
        codes = array.copy().reshape(-1).view(array.dtype.newbyteorder("=")).view(np.uint32) % 26 + 97
        text = codes.astype(np.uint32).view(f"U{count}").reshape(array.shape)
        return text.astype(array.dtype)
    if array.dtype.kind == "b":
        return (array.view(np.uint8) % 2).view(bool)
    return array
