"""Every dtype and every kind of NumPy operation in the heap: results equal those in NumPy's own memory, to the bit."""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same
from tests.objectstore.heap_arrays import LEAST, MIB, Array, dirty, figures, lies_in, using
from zcactor.objectstore.store import Store


@pytest.mark.parametrize("least", [1, LEAST])
def test_every_dtype(store: Store, least: int) -> None:
    codes = ["M8[s]" if code == "M" else "m8[s]" if code == "m" else "S9" if code == "S" else "U5" if code == "U" else
             "V7" if code == "V" else code for code in np.typecodes["All"]]  # fmt: skip
    dtypes = [np.dtype(code) for code in codes if code != "O"] + DTYPES
    for dtype in dtypes:
        count = -(-LEAST // max(dtype.itemsize, 1)) + 3
        expected = filled((count,), dtype)
        with using(store.heap, least):
            array = expected.copy()
            zeros = np.zeros(count, dtype)
            twice = np.concatenate([array, array[::-1]])
        assert lies_in(store, array) and lies_in(store, zeros), dtype
        assert lies_in(store, twice) == (twice.nbytes >= least), dtype  # NumPy may have dropped the padding
        assert_same(array, expected)
        assert zeros.tobytes() == bytes(zeros.nbytes)
        assert_same(twice, np.concatenate([expected, expected[::-1]]))
        del array, zeros, twice
        assert figures(store) == (0, 0, 0)


def test_ml_dtypes_compute(store: Store) -> None:
    expected = (np.arange(LEAST) % 50).astype(ml_dtypes.bfloat16)
    with using(store.heap):
        doubled = expected + expected
    assert lies_in(store, doubled)
    assert (doubled.astype("f4") == expected.astype("f4") * 2).all()


def test_objects_and_strings_of_any_length(store: Store) -> None:
    with using(store.heap):
        objects = np.array([str(index) for index in range(LEAST)], object)
        nothing = np.empty(LEAST, object)
        fields = np.zeros(LEAST, [("a", object), ("b", "f8")])
        strings = np.array([f"a text that is not short: {index}" for index in range(LEAST)], np.dtypes.StringDType())
        assert all(lies_in(store, array) for array in (objects, nothing, fields, strings))
        objects[::2] = None
        gc.collect()
        joined = np.concatenate([objects, objects])
        pairs = strings + "!"
    assert joined[1::2].tolist() == [str(index) for index in range(1, LEAST, 2)] * 2
    assert set(nothing.tolist()) == {None}
    assert set(fields["a"].tolist()) == {0}
    assert pairs[LEAST - 1] == f"a text that is not short: {LEAST - 1}!"
    marker = object()
    before = _references(marker)
    with using(store.heap):
        nothing[:] = marker
        grown = np.full(LEAST, marker, object)
        grown.resize(2 * LEAST, refcheck=False)
    assert _references(marker) == before + 2 * LEAST
    del grown, nothing
    assert _references(marker) == before
    del objects, fields, strings, joined, pairs
    gc.collect()
    assert figures(store) == (0, 0, 0)


def _references(value: object) -> int:
    return sys.getrefcount(value)


class Sub(np.ndarray[Any, Any]):
    """A subclass with an attribute of its own."""

    name = "sub"

    def __array_finalize__(self, other: Any) -> None:
        self.name = getattr(other, "name", "none")


def _saved(folder: Path) -> Path:
    np.save(folder / "saved.npy", np.arange(300_000.0).reshape(300, 1000))
    return folder / "saved.npy"


GRID: Array = np.random.default_rng(1).normal(size=(300, 400))
OPERATIONS: dict[str, Callable[[Path], Any]] = {
    "resize": lambda _: np.resize(GRID, (700, 500)),
    "frombuffer": lambda _: np.frombuffer(GRID.tobytes(), "u4") // 2,
    "memmap": lambda folder: np.memmap(_saved(folder), np.uint8, "r")[128:].copy(),
    "memmap view": lambda folder: np.load(_saved(folder), mmap_mode="r")[::2] + 1,
    "load": lambda folder: np.load(_saved(folder)),
    "fromfile": lambda folder: np.fromfile(_saved(folder), "u1"),
    "fromiter": lambda _: np.fromiter((index * 0.5 for index in range(100_000)), "f8"),
    "fromiter counted": lambda _: np.fromiter((index * 0.5 for index in range(100_000)), "f8", 100_000),
    "matrix": lambda _: np.asmatrix(GRID) * np.asmatrix(GRID).T,
    "subclass": lambda _: GRID.view(Sub)[3:] * 2,
    "masked": lambda _: (np.ma.masked_less(GRID, 0) * 2).filled(-1),
    "masked sum": lambda _: np.ma.masked_less(GRID, 0).mean(axis=0),
    "sort": lambda _: np.sort(GRID, axis=None, kind="stable"),
    "sort in place": lambda _: _in_place(GRID.copy(), "sort", axis=0),
    "argsort": lambda _: np.argsort(GRID, axis=1, kind="stable"),
    "partition": lambda _: np.sort(np.partition(GRID, 50, axis=None)[:50]),
    "concatenate": lambda _: np.concatenate([GRID, GRID[::-1], GRID[:, ::-1]]),
    "stack": lambda _: np.stack([GRID, GRID], axis=2),
    "fancy": lambda _: GRID[np.arange(299, -1, -1)][:, [3, 1, 2] * 50],
    "mask": lambda _: GRID[GRID > 0],
    "nonzero": lambda _: np.nonzero(np.tile(GRID > 0, (2, 2)))[0],
    "where": lambda _: np.where(GRID > 0, GRID, 0),
    "einsum": lambda _: np.einsum("ij,kj->ik", GRID, GRID),
    "matmul": lambda _: GRID @ GRID.T,
    "elided temporaries": lambda _: ((GRID + 1) * 2 - GRID) / 3 + (GRID * 4),
    "reduce": lambda _: np.tile(GRID, (1, 1, 3)).sum(axis=0),
    "cumsum": lambda _: GRID.cumsum(axis=1),
    "fft": lambda _: np.fft.fft2(GRID),
    "svd": lambda _: np.linalg.svd(GRID @ GRID.T, compute_uv=False),
    "inverse": lambda _: np.linalg.inv(GRID @ GRID.T + 1000 * np.eye(300)),
    "unique": lambda _: np.unique(GRID.round(2)),
    "astype": lambda _: GRID.astype("c16"),
    "byte order": lambda _: GRID.astype(">f4").byteswap(),
    "transpose": lambda _: np.asfortranarray(GRID),
    "pad": lambda _: np.pad(GRID, 40, mode="reflect"),
    "from lists": lambda _: np.array(GRID.tolist()),
    "text": lambda _: np.char.add(GRID.round(3).astype("U12"), "!"),
    "histogram": lambda _: np.histogram2d(GRID[0], GRID[1], bins=100)[0],
    "pickled": lambda _: _pickled(GRID),
    "choose": lambda _: np.choose((GRID > 0).astype(int), [GRID, -GRID]),
    "put": lambda _: _in_place(GRID.copy(), "put", range(0, 120_000, 7), 5),
    "out": lambda _: np.multiply(GRID, 3, out=np.empty_like(GRID)),
    "zero size": lambda _: np.empty((0, 1 << 40)),
    "buffered": lambda _: np.add(GRID.astype("f4"), GRID.astype("i8"), dtype="f8", casting="unsafe"),
    "random": lambda _: np.random.default_rng(3).permutation(200_000),
    "records": lambda _: np.rec.fromarrays([GRID.ravel(), GRID.ravel().astype("i4")], dtype="f8,i4"),
}  # fmt: skip
"""Results by name. The temporaries that NumPy makes for them lie in the store as well."""


def _in_place(array: Array, name: str, *args: Any, **named: Any) -> Array:
    getattr(array, name)(*args, **named)
    return array


def _pickled(array: Array) -> Any:
    return pickle.loads(pickle.dumps(array))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", OPERATIONS)
def test_numpy_computes_the_same(store: Store, tmp_path: Path, name: str) -> None:
    expected = OPERATIONS[name](tmp_path)
    for least in (1, LEAST):
        with using(store.heap, least):
            dirty(6 * MIB)
            got = OPERATIONS[name](tmp_path)
        assert type(got) is type(expected)
        assert (got.shape, got.dtype, got.strides) == (expected.shape, expected.dtype, expected.strides)
        assert got.tobytes() == expected.tobytes()
        root: Any = got
        while isinstance(root.base, np.ndarray):
            root = root.base
        # NumPy begins with a small array there and grows it: the handler below has it from then on, and keeps it.
        grows = name == "fromiter" and least == LEAST
        if root.flags.owndata and root.size:  # otherwise the array is over the bytes of another object
            assert lies_in(store, root) == (root.nbytes >= least and not grows)
        del got, root
        gc.collect()
        assert figures(store) == (0, 0, 0)
