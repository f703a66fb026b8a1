"""Arrays in the store, made there or by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.actors import Plain
from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same, assert_same_dtype

SHAPES: list[Any] = [(), 0, 5, (3, 4), [2, 0, 3], (np.int64(2), 3)]


@pytest.mark.slow
async def test_like_numpys_own_for_every_dtype() -> None:
    async with zc.init():
        for dtype in DTYPES:
            for shape in SHAPES:
                array = zc.empty(shape, dtype)
                expected = np.empty(shape, dtype)
                assert type(array) is np.ndarray
                assert array.shape == expected.shape
                assert_same_dtype(array.dtype, expected.dtype)
                assert array.flags.c_contiguous
                assert array.flags.writeable
                assert array.ctypes.data % 64 == 0
                assert zc.in_store(array)
                assert_same(zc.zeros(shape, dtype), np.zeros(shape, dtype))
                assert_same(zc.asarray(filled(expected.shape, dtype)), filled(expected.shape, dtype))
                try:
                    ones = np.ones(shape, dtype)
                except (TypeError, ValueError) as error:
                    with pytest.raises(type(error)):
                        zc.ones(shape, dtype)
                else:
                    assert_same(zc.ones(shape, dtype), ones)
        used = zc.stats().store_used
        assert zc.zeros((1000, 1000), "u1").nbytes + used <= zc.stats().store_used + 4096 * 2


@pytest.mark.slow
async def test_full() -> None:
    async with zc.init():
        cases: list[tuple[Any, Any, Any]] = [
            ((2, 3), 7, None), (3, 1.5, "f4"), (3, 2, "M8[s]"), (3, 5, "m8[ms]"), (2, "ab", None), (2, b"abc", "S2"),
            ((2, 3), [1, 2, 3], None), ((2, 3), [[1], [2]], "c8"), (2, (1, 2.5), [("a", "i4"), ("b", "f8")]),
            (2, 1.9, "i4"),
            (3, np.datetime64("2026-01-01"), None), (2, True, None), ((), 3, "u2"), (0, 3, None), (2, np.nan, "f2"),
        ]  # fmt: skip
        for shape, value, dtype in cases:
            assert_same(zc.full(shape, value, dtype), np.full(shape, value, dtype))
        assert zc.stats().bytes_copied == 0


@pytest.mark.slow
async def test_errors() -> None:
    async with zc.init(config=zc.Config(store_capacity=1 << 20, gpu="off")):
        makers: list[Any] = [
            zc.empty,
            zc.zeros,
            zc.ones,
            lambda shape, dtype=float, **more: zc.full(shape, 1, dtype, **more),
        ]
        for make in makers:
            for dtype in (object, [("a", object)], np.dtypes.StringDType()):
                with pytest.raises(TypeError, match="plain bytes"):
                    make(3, dtype)
            with pytest.raises(zc.DeviceUnavailable, match="GPUs are switched off"):
                make(3, device="cuda")
            with pytest.raises(ValueError, match="negative"):
                make(-1)
            with pytest.raises(ValueError, match="negative"):
                make((2, -3))
            with pytest.raises(TypeError):
                make(2.5)
            for shape in (1 << 20, (1 << 40, 1 << 40), 1 << 62):
                with pytest.raises(zc.OutOfMemory):
                    make(shape)
        with pytest.raises(TypeError, match="plain bytes"):
            zc.full(2, object())
        for value in ([object()], np.array(["a"], np.dtypes.StringDType())):
            with pytest.raises(TypeError, match="plain bytes"):
                zc.asarray(value)
        with pytest.raises(zc.OutOfMemory):
            zc.asarray(np.zeros(1 << 20))
        with pytest.raises(ValueError, match="broadcast"):
            zc.full((2, 2), [1, 2, 3])
        assert zc.stats().store_used == 0


@pytest.mark.slow
async def test_asarray_copies_only_what_is_outside() -> None:
    async with zc.init():
        array = zc.ones((100, 100))
        for inside in (array, array[3:, ::2], array.T, np.frombuffer(array.data)):
            assert zc.in_store(inside)
            assert np.shares_memory(zc.asarray(inside), array)
        assert zc.stats().bytes_copied == 0
        with zc.numpy_allocator(False):
            ours = np.ones((100, 100))
        for outside in (
            ours[::2],
            [1, 2],
            3.5,
            array[:50].astype("f4").T,
            np.broadcast_to(np.ones(3), (1 << 50, 3)),
        ):
            assert not zc.in_store(outside)
            copied = zc.asarray(outside)
            assert zc.in_store(copied)
            assert_same(
                copied[:2] if copied.ndim else copied, np.asarray(outside)[:2] if copied.ndim else np.asarray(outside)
            )
        assert zc.stats().copies["zc.asarray"].count == 5
        assert zc.asarray(array, "i4").dtype == "i4"
        assert type(zc.asarray(array.view(np.matrix))) is np.ndarray
        for other in (None, [1], "a", np.ones(3), np.float64(1)):
            assert not zc.in_store(other)


async def test_asarray_refuses_a_mask() -> None:
    async with zc.init():
        masked: Any = np.ma.masked_equal(np.arange(4.0), 1)
        with pytest.raises(TypeError, match=r"zc.asarray: .* not have the mask .*; pass x.filled\(value\)"):
            zc.asarray(masked)
        assert_same(zc.asarray(masked.filled(9)), np.array([0, 9, 2, 3.0]))


def test_without_a_runtime() -> None:
    for make in (zc.empty, zc.zeros, zc.ones):
        with pytest.raises(zc.NotInitialized):
            make(3)
    with pytest.raises(zc.NotInitialized):
        zc.asarray([1])
    assert not zc.in_store(np.ones(3))


@pytest.mark.slow
async def test_arrays_outlive_the_runtime() -> None:
    async with zc.init():
        array = zc.full(1000, 3.0)
    assert array.sum() == 3000
    array[0] = 1
    assert zc.in_store(array)


@pytest.mark.slow
async def test_an_array_of_an_earlier_runtime_arrives_with_its_own_bytes() -> None:
    async with zc.init():
        array = zc.full(1 << 17, 5.0)
        plain = await Plain.spawn()
        await plain.echo(array)
    async with zc.init():
        others = [zc.full(1 << 17, 42.0) for _ in range(2)]
        assert not zc.in_store(array) and zc.in_store(others[0])
        plain = await Plain.spawn()
        for _ in range(3):  # the first call makes the dtype known, and the native part can send the next ones
            assert set(np.unique(await plain.echo(array))) == {5.0}
