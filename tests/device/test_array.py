"""Arrays on a GPU: views as NumPy has them, fills and copies in order, and what is refused."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.device.helpers import array_on, held, opened, seen, settle
from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same
from zcactor.device.array import DeviceArray, _is_whole, array_over, empty_array
from zcactor.device.streams import GpuStream, streams
from zcactor.errors import DeviceError, OutOfMemory

INDEX = st.one_of(st.integers(-5, 5), st.slices(5), st.none(), st.just(Ellipsis))


def test_facts() -> None:
    with opened("devices=2") as store:
        array = empty_array(store.gpu(1), (3, 4), np.dtype("f4"))
        assert (array.shape, array.dtype, array.strides, array.ndim) == ((3, 4), np.dtype("f4"), (16, 4), 2)
        assert (array.size, array.itemsize, array.nbytes, len(array)) == (12, 4, 48, 3)
        assert array.device == "cuda:1" and array.uuid.endswith("01") and not array.readonly
        assert repr(array) == "<zcactor.gpu.DeviceArray of shape (3, 4), float32, on cuda:1>"
        with pytest.raises(TypeError, match="no length"):
            len(empty_array(store.gpu(0), (), np.dtype("f4")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_shapes(dtype: Any) -> None:
    with opened() as store:
        for shape in ((), (0,), (5,), (3, 4), (2, 0, 3)):
            values = filled(shape, dtype)
            assert_same(seen(array_on(store.gpu(0), values)), values)
            assert_same(seen(array_on(store.gpu(0), values).copy()), values)


@pytest.mark.slow
@given(st.lists(INDEX, max_size=4))
def test_indexes(keys: list[Any]) -> None:
    values = np.arange(5 * 4 * 3, dtype="i2").reshape(5, 4, 3)
    with opened() as store:
        array = array_on(store.gpu(0), values)
        try:
            expected = values[tuple(keys)]
        except IndexError:
            with pytest.raises(IndexError):
                array[tuple(keys)]
        else:
            assert_same(seen(array[tuple(keys)]), np.asarray(expected))


def test_other_views() -> None:
    values = np.arange(24, dtype="i4").reshape(2, 3, 4)
    with opened() as store:
        array = array_on(store.gpu(0), values)
        assert_same(seen(array.T), values.T)
        assert_same(seen(array.transpose(1, 0, 2)), values.transpose(1, 0, 2))
        assert_same(seen(array.transpose((2, 0, 1))), values.transpose(2, 0, 1))
        for shape in ((24,), (4, 6), (-1, 2)):
            assert_same(seen(array.reshape(shape)), values.reshape(shape))
            assert_same(seen(array.reshape(*shape)), values.reshape(shape))
        assert_same(seen(array.reshape(24)), values.reshape(24))
        assert_same(seen(array.view("u1")), values.view("u1"))
        assert_same(seen(array.view_of_bytes()), values.reshape(-1).view("u1"))
        assert_same(seen(array[::-1, 1:].copy()), values[::-1, 1:])
        large = empty_array(store.gpu(0), (3000, 3000), np.dtype("f8"))
        calls: list[Callable[[], object]] = [
            lambda: large.T.reshape(-1),
            lambda: array.reshape(5),
            lambda: large[:, ::2].view("u1"),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="copy|reshape|contiguous"):
                call()
        with pytest.raises(ValueError, match="not contiguous"):
            array.T.view_of_bytes()


@pytest.mark.parametrize("key", [True, np.True_, [0], np.array([0]), 1.5, "x", (0, [1])])
def test_indexes_that_are_no_views(key: Any) -> None:
    with opened() as store, pytest.raises(TypeError, match="ints, slices, None"):
        empty_array(store.gpu(0), (3, 4), np.dtype("f4"))[key]


def test_fills() -> None:
    with opened() as store:
        array = empty_array(store.gpu(0), (4, 6), np.dtype("f8"))
        array.fill(1.5)
        array[1:3, ::2].fill(7)
        array[..., -1].fill(np.float32(2))
        expected = np.full((4, 6), 1.5)
        expected[1:3, ::2] = 7
        expected[..., -1] = 2
        assert_same(seen(array), expected)
        array.view_of_bytes()[1:18].view("V17").fill(b"q" * 17)  # neither aligned nor of a width that GPUs fill
        expected.reshape(-1).view("u1")[1:18] = ord("q")
        assert_same(seen(array), expected)
        empty_array(store.gpu(0), (0, 3), np.dtype("f8")).fill(1)


def outcome_of(filled: Callable[[Any], bytes], value: Any) -> Any:
    """The bytes of an array that a value fills, with the types of the warnings, or the type of the error."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            return filled(value), {each.category for each in told}
        except Exception as error:
            return type(error)


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u8", "f2", "f8", "c8", "M8[s]", "S3", "U2", "V4", [("a", "i1"), ("b", "f8")]]
)
def test_values_become_elements_by_the_rules_of_numpy(dtype: Any, size: int) -> None:
    values: list[Any] = [
        1, -1, 300, 1 << 70, 1.9, np.nan, 1 + 2j, "ab", "7", b"abcd", True, None, (1, 2.5), object(), [5], [1, 2],
        np.int64(300), np.datetime64("2026-01-01"),
    ]  # fmt: skip
    with opened() as store:
        array = empty_array(store.gpu(0), (size,), np.dtype(dtype))

        def on_gpu(value: Any) -> bytes:
            array.fill(value)
            return seen(array).tobytes()

        def on_host(value: Any) -> bytes:
            return np.full((), value, dtype).tobytes() * size

        for value in values:
            assert outcome_of(on_gpu, value) == outcome_of(on_host, value), value


def test_overlapping_copies() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(100, dtype="u1"))
        array[10:].copy_from(array[:-10])
        assert_same(seen(array), np.r_[np.arange(10), np.arange(90)].astype("u1"))


def test_copies_between_gpus() -> None:
    with opened("devices=2") as store:
        values = np.arange(12, dtype="c8").reshape(3, 4)
        here, there = array_on(store.gpu(0), values), empty_array(store.gpu(1), (4, 3), values.dtype)
        there.copy_from(here.T)
        assert_same(seen(there), values.T)
    with opened("devices=2,peer=none") as store:
        there = empty_array(store.gpu(1), (2,), np.dtype("u1"))
        there.copy_from(array_on(store.gpu(0), np.array([5, 6], "u1")))
        assert_same(seen(there), np.array([5, 6], "u1"))


@pytest.mark.parametrize("waits", ["yes", "no"])
def test_order_over_streams(waits: str) -> None:
    with opened(f"waits={waits}") as store:
        gpu = store.gpu(0)
        first, second = GpuStream(gpu), GpuStream(gpu)
        array = array_on(gpu, np.zeros(100, "u1"))
        with held(store.driver, first.ptr):
            token = streams.set({0: first.ptr})
            for value in (1, 2, 3):
                array.fill(value)
            streams.set({0: second.ptr})
            copied = array.copy()
            streams.set({0: first.ptr})
            array.fill(9)
            streams.reset(token)
            settle(store.driver)
        first.synchronize()
        second.synchronize()
        assert (seen(copied) == 3).all() == (waits == "yes")


def test_memory_that_is_dropped_while_it_is_read() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream, array = GpuStream(gpu), array_on(gpu, np.full(1000, 5, "u1"))
        with held(store.driver, stream.ptr):
            token = streams.set({0: stream.ptr})
            copied = array.copy()
            streams.reset(token)
            address = array.address
            del array
            again = empty_array(gpu, (1000,), np.dtype("u1"))
            assert again.address == address
            again.fill(1)
            settle(store.driver)
        stream.synchronize()
        assert (seen(copied) == 5).all() and (seen(again) == 1).all()


def test_read_only_arrays() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(4))
        part = array[1:]
        array._holder.sealed = True  # type: ignore[attr-defined] # as passing it does
        for each in (array, part):
            assert each.readonly and "read-only" in repr(each)
            with pytest.raises(ValueError, match=r"write to x.copy\(\)"):
                each.fill(1)
            with pytest.raises(ValueError, match="read-only"):
                each.copy_from(np.arange(4))
        mine = part.copy()
        mine.fill(8)
        assert_same(seen(mine), np.full(3, 8))
        assert_same(seen(array), np.arange(4))


def test_what_is_refused() -> None:
    with opened("memory=64MiB") as store:
        array = array_on(store.gpu(0), np.arange(4.0))
        for wrong in (np.arange(4), np.arange(5.0), np.arange(4.0).reshape(2, 2), array[:2]):
            with pytest.raises(ValueError, match="must be the same"):
                array.copy_from(wrong)
        with pytest.raises(TypeError, match="not list"):
            array.copy_from([1.0, 2.0, 3.0, 4.0])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"zc\.gpu\.to_host"):
            np.asarray(array)
        with pytest.raises(TypeError, match="no iterator"):
            list(array)
        for looks in (lambda: array == array, lambda: array != 0, lambda: np.arange(4.0) == array, lambda: bool(array)):
            with pytest.raises(TypeError, match=r"zc\.gpu\.to_host"):
                looks()
        assert len({array, array[:2]}) == 2 and array is not array[...]
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(array)
        with pytest.raises(ValueError, match="text"):
            array.fill("text")
        with pytest.raises(OutOfMemory, match="GPU 0"):
            empty_array(store.gpu(0), (1 << 30,), np.dtype("u1"))


@pytest.mark.parametrize("call", ["copy", "fill", "event", "record", "create", "map", "reserve", "wait"])
def test_each_failure_leaks_nothing(call: str) -> None:
    with opened(f"fail={call}") as store:
        gpu = store.gpu(0)

        def work() -> None:
            stream = GpuStream(gpu)
            array = empty_array(gpu, (100,), np.dtype("f4"))
            with held(store.driver):  # the other stream has to wait for the fill
                array.fill(3)
                token = streams.set({0: stream.ptr})
                try:
                    copied = array.copy()
                finally:
                    streams.reset(token)
            assert (seen(copied) == 3).all()

        with pytest.raises(DeviceError, match=f"^{call} on GPU 0 failed"):
            work()
        work()
        GpuStream(gpu).synchronize()
        assert store.used == 0
        assert type(empty_array(gpu, (), np.dtype("u1"))) is DeviceArray


@pytest.mark.parametrize(
    ("shape", "strides", "whole"),
    [
        ((9,), (1,), True), ((3, 3), (3, 1), True), ((3, 3), (1, -3), True), ((1, 9, 1), (0, 1, 7), True),
        ((3, 3), (2, 2), False), ((3, 3), (4, 0), False), ((8,), (1,), False),
    ],
)  # fmt: skip
def test_whether_elements_are_all_bytes(shape: tuple[int, ...], strides: tuple[int, ...], whole: bool) -> None:
    with opened() as store:
        block = empty_array(store.gpu(0), (9,), np.dtype("u1")).holder
        assert _is_whole(array_over(block, 0, shape, np.dtype("u1"), strides)) is whole
