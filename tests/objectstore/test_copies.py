"""Copies: exact for every layout, and counted."""

from __future__ import annotations

import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from zcactor.objectstore.copies import CopyCount, CopyCounter
from zcactor.objectstore.parallel import PARALLEL_NBYTES

DTYPES = [
    "u1", "<f8", ">i4", "c16", "?", "M8[ns]", "U3", "S5", "V7",
    np.dtype([("a", "i1"), ("b", "f8", (2,))], align=True),
    np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn),
]  # fmt: skip


class Kept:
    """An object that holds a copy."""


def filled(shape: tuple[int, ...], dtype: Any, order: Any = "C") -> NDArray[Any]:
    """An array of different bytes, interpreted as `dtype`."""
    array = np.zeros(shape, dtype, order)
    raw = (np.arange(array.nbytes) % 100 + 1).astype(np.uint8)
    if array.dtype == np.bool_:
        raw &= 1
    if array.dtype.kind == "U":
        return np.resize(np.array(["a", "bc", "def"], array.dtype), shape)
    flat = np.ndarray(array.size, array.dtype, raw.tobytes())
    array[...] = flat.reshape(shape)
    return array


def contents(array: NDArray[Any]) -> list[Any]:
    """The elements, comparable for every dtype."""
    return [repr(item) for item in array.reshape(-1)]


views = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from("CF"),
    st.sampled_from("CF"),
    st.sampled_from([1, 2, -1, -2]),
    st.booleans(),
)


@pytest.mark.slow
@given(views)
def test_elements_arrive_whatever_the_layout(case: tuple[Any, tuple[int, ...], Any, Any, int, bool]) -> None:
    dtype, shape, order, other_order, step, transposed = case
    source = filled(shape, dtype, order)
    if shape:
        source = source[::step]
    if transposed:
        source = source.T
    destination = np.zeros(source.shape, dtype, other_order)
    counter = CopyCounter()
    counter.copy_into(destination, source, "test")
    assert contents(destination) == contents(source)
    assert counter.snapshot() == {"test": CopyCount(1, source.nbytes)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_contiguous_arrays_arrive_whole(dtype: Any, order: Any) -> None:
    rows = PARALLEL_NBYTES // (3 * np.dtype(dtype).itemsize) + 5
    source = np.empty((rows, 3), dtype, order)
    raw = source.reshape(-1, order="A").view(np.uint8)
    raw[:] = np.resize(np.arange(251, dtype=np.uint8), raw.size)
    destination = np.zeros_like(source)
    counter = CopyCounter()
    counter.copy_into(destination, source, "large")
    assert np.array_equal(destination.reshape(-1, order="A").view(np.uint8), raw)
    assert counter.snapshot()["large"].nbytes == source.nbytes >= PARALLEL_NBYTES


@pytest.mark.slow
def test_large_arrays_of_different_layout_arrive_whole() -> None:
    source = np.arange(PARALLEL_NBYTES // 4, dtype=np.float64).reshape(-1, 8)
    counter = CopyCounter()
    for destination in (
        np.zeros(source.shape, order="F"),
        np.zeros(source.shape, ">f8"),
        np.zeros((*source.shape, 2))[..., 0],
    ):
        counter.copy_into(destination, source, "large")
        assert np.array_equal(destination, source)
    assert counter.snapshot() == {"large": CopyCount(3, 3 * source.nbytes)}


def test_what_failed_is_not_counted() -> None:
    counter = CopyCounter()
    with pytest.raises(ValueError, match="shape"):
        counter.copy_into(np.zeros(3), np.zeros(1), "wrong")
    read_only = np.zeros(PARALLEL_NBYTES, np.uint8)
    read_only.setflags(write=False)
    for part in (read_only[:8], read_only):
        with pytest.raises(ValueError, match="read-only"):
            counter.copy_into(part, part.copy(), "wrong")
    with pytest.raises(TypeError):
        counter.copy_into(np.zeros(3, np.int32), np.zeros(3), "wrong")
    with pytest.raises(ValueError, match="shape"):
        counter.copy_bytes(np.zeros(3, np.uint8), b"1234", "wrong")
    assert counter.snapshot() == {}


BUFFERS = {
    "empty": b"",
    "bytes": b"abc",
    "bytearray": bytearray(b"abcd"),
    "slice": memoryview(b"abcdef")[2:],
    "doubles": np.arange(5.0).data,
    "array": np.arange(12, dtype="<i2").reshape(3, 4),
}


@pytest.mark.parametrize("buffer", BUFFERS.values(), ids=BUFFERS)
def test_bytes_of_any_buffer(buffer: Any) -> None:
    counter = CopyCounter()
    expected = memoryview(buffer).tobytes()
    destination = np.zeros(len(expected), np.uint8)
    counter.copy_bytes(destination, buffer, "bytes")
    assert destination.tobytes() == expected
    assert counter.snapshot() == {"bytes": CopyCount(1, len(expected))}


def test_bytes_with_gaps_are_refused() -> None:
    with pytest.raises(BufferError, match="contiguous"):
        CopyCounter().copy_bytes(np.zeros(2, np.uint8), memoryview(b"abcd")[::2], "bytes")
    with pytest.raises(ValueError, match="contiguous"):
        CopyCounter().copy_bytes(np.zeros(2, np.uint8), np.zeros(4, np.uint8)[::2], "bytes")


def test_reasons_are_counted_apart_and_a_snapshot_stays() -> None:
    counter = CopyCounter()
    counter.copy_into(np.zeros(2), np.ones(2), "a")
    before = counter.snapshot()
    counter.copy_into(np.zeros(2), np.ones(2), "a")
    counter.copy_into(np.zeros(3), np.ones(3), "b")
    assert before == {"a": CopyCount(1, 16)}
    assert counter.snapshot() == {"a": CopyCount(2, 32), "b": CopyCount(1, 24)}


def test_no_count_is_lost_between_threads() -> None:
    counter = CopyCounter()

    def work() -> None:
        source, destination = np.ones(4), np.zeros(4)
        for _ in range(500):
            counter.copy_into(destination, source, "shared")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.snapshot() == {"shared": CopyCount(2000, 64000)}


def test_a_copy_is_known_while_it_and_its_source_live() -> None:
    counter = CopyCounter()
    first, second, source, other = Kept(), Kept(), np.ones(1), np.ones(1)
    assert counter.known(4096, 8) is None
    counter.remember(4096, 8, first, source)
    assert counter.known(4096, 8) is first
    assert counter.known(4096, 9) is None and counter.known(4097, 8) is None
    counter.remember(4096, 8, second, other)  # of later bytes at that address
    del first, source
    gc.collect()
    assert counter.known(4096, 8) is second
    del other
    gc.collect()
    assert counter.known(4096, 8) is None
    source = np.ones(1)
    counter.remember(4096, 8, second, source)
    assert counter.known(4096, 8) is second
    del second
    gc.collect()
    assert counter.known(4096, 8) is None


@pytest.mark.parametrize("sizes", [[], [0], [10, 0, 7], [3_000_000, 5, 4_000_000, 0, 2_500_000, 1]])
def test_many_pieces_are_copied_as_one(sizes: list[int]) -> None:
    counter = CopyCounter()
    sources = [np.random.default_rng(size).integers(0, 256, size, np.uint8) for size in sizes]
    pairs = [(np.zeros(source.size, np.uint8), source) for source in sources]
    counter.copy_all(pairs, "pieces")
    for destination, source in pairs:
        np.testing.assert_array_equal(destination, source)
    counted = counter.snapshot().get("pieces")
    assert (counted.count, counted.nbytes) == (len(sizes), sum(sizes)) if counted else not sizes
