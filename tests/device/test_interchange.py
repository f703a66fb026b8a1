"""Arrays on GPUs as other libraries take them: the same bytes, and work in order."""

from __future__ import annotations

import gc
import sys
from typing import Any
from weakref import ref

import numpy as np
import pytest

from tests.device.foreigners import library, torch_like
from tests.device.helpers import array_on, held, opened, seen, settle
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.interchange import tensor_of
from zcactor.device.memory import GpuMemory
from zcactor.device.streams import GpuStream, streams

VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


def numbers(gpu: GpuMemory) -> DeviceArray:
    return array_on(gpu, np.arange(12, dtype="f4").reshape(3, 4))


def test_capsules() -> None:
    with opened("devices=2") as store:
        array = numbers(store.gpu(1))
        assert array.__dlpack_device__() == (2, 1)
        for part in (array, array[1:], array.T, array[::-1, ::2], array[1, 2], array[:0]):
            tensor = tensor_of(part.__dlpack__(max_version=(1, 0)))
            assert (tensor.device_type, tensor.device_id, tensor.byte_offset) == (2, 1, 0)
            assert (tensor.code, tensor.bits, tensor.lanes) == (2, 32, 1)
            assert tuple(tensor.shape[: tensor.ndim]) == part.shape
            if part.size:
                assert tensor.data == part.address
                assert tuple(4 * each for each in tensor.strides[: tensor.ndim]) == part.strides


@pytest.mark.parametrize(
    ("name", "code"), [("i2", 0), ("u8", 1), ("f2", 2), ("c8", 5), ("?", 6), ("bfloat16", 4), ("float8_e5m2", 12)]
)
def test_types_of_capsules(name: str, code: int) -> None:
    if len(name) > 2:
        name = getattr(library("ml_dtypes"), name)
    with opened() as store:
        array = empty_array(store.gpu(0), (3,), np.dtype(name))
        tensor = tensor_of(array.__dlpack__())
        assert (tensor.code, tensor.bits) == (code, 8 * array.itemsize)


def test_capsules_keep_the_bytes() -> None:
    with opened() as store:
        array = numbers(store.gpu(0))
        holder, capsule = ref(array.holder), array.__dlpack__()
        del array
        gc.collect()
        assert holder() is not None
        del capsule
        gc.collect()
        assert holder() is None


def test_what_capsules_refuse() -> None:
    with opened() as store:
        array = numbers(store.gpu(0))
        with pytest.raises(BufferError, match="to_host"):
            array.__dlpack__(dl_device=(1, 0))
        for stream in (0, -2, "1"):
            with pytest.raises(ValueError, match="handle"):
                array.__dlpack__(stream=stream)  # type: ignore[arg-type] # that is the test
        with pytest.raises(BufferError):
            empty_array(store.gpu(0), (3,), np.dtype("M8[s]")).__dlpack__()
        with pytest.raises(TypeError, match="no capsule"):
            tensor_of("text")
        copied = tensor_of(array.__dlpack__(copy=True))
        assert copied.data != array.address
        holder: Any = array.holder
        holder.sealed = True
        with pytest.raises(BufferError, match=r"as_cupy"):
            array.__dlpack__()
        if VERSIONED:
            assert tensor_of(array.__dlpack__(max_version=(1, 0))).data == array.address


def test_interface() -> None:
    with opened() as store:
        array = numbers(store.gpu(0))
        described = array[:, ::-2].__cuda_array_interface__
        assert described == {
            "version": 3,
            "shape": (3, 2),
            "typestr": "<f4",
            "data": (array.address + 12, False),
            "strides": (16, -8),
            "stream": 1,
        }
        holder: Any = array.holder
        holder.sealed = True
        stream = GpuStream(store.gpu(0))
        token = streams.set({0: stream.ptr})
        described = array[:0].__cuda_array_interface__
        streams.reset(token)
        assert described["data"] == (0, True) and described["stream"] == stream.ptr
        record = empty_array(store.gpu(0), (2,), np.dtype([("a", "i4"), ("b", "f8")]))
        assert record.__cuda_array_interface__["descr"] == [("a", "<i4"), ("b", "<f8")]


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with opened() as store:
        array = numbers(store.gpu(0))
        with pytest.raises(ImportError, match="cupy is not installed here"):
            array.as_cupy()
        with pytest.raises(ImportError, match="torch is not installed here"):
            array.as_torch()


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    with opened() as store:
        array = numbers(store.gpu(0))
        tensor = array[1:, ::2].as_torch()
        assert (tensor.address, tensor.shape, tensor.steps) == (array.address + 16, (2, 2), (4, 2))
        with pytest.raises(ValueError, match=r"copy\(\)"):
            array[::-1].as_torch()
        holder: Any = array.holder
        holder.sealed = True
        assert array.as_torch().address == array.address


@pytest.mark.slow
def test_cupy() -> None:
    library("cupy")
    with opened("devices=2") as store:
        array = numbers(store.gpu(1))
        for part in (array, array[1:], array.T, array[::-1, ::-2], array[1, 2], array[:0]):
            made = part.as_cupy()
            assert (made.shape, made.dtype, made.strides) == (part.shape, part.dtype, part.strides)
            assert made.data.ptr == part.address and made.data.device_id == 1
        holder = ref(array.holder)
        view = array.as_cupy()[1:, ::-1]
        del array, part, made
        gc.collect()
        assert holder() is not None
        del view
        gc.collect()
        assert holder() is None


@pytest.mark.parametrize("name", ["capsule", "interface"])
def test_memory_is_used_again_after_the_librarys_work(name: str) -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream = GpuStream(gpu)
        array = empty_array(gpu, (100,), np.dtype("u1"))
        token = streams.set({0: stream.ptr})
        _ = array.__dlpack__(stream=stream.ptr) if name == "capsule" else array.__cuda_array_interface__
        streams.reset(token)
        with held(store.driver, stream.ptr):
            gpu.driver.fill(0, array.address, b"a", 100, stream.ptr)  # the library does so
            del _, array
            gc.collect()
            after = gpu.arena.allocate(100).after
            assert [each.lane for each in after] == [stream.lane]


def test_later_work_comes_after_the_librarys() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream = GpuStream(gpu)
        array = empty_array(gpu, (100,), np.dtype("u1"))
        array.__dlpack__(stream=stream.ptr)
        assert array.holder.work.writes() == []
        with held(store.driver, stream.ptr):
            gpu.driver.fill(0, array.address, b"a", 100, stream.ptr)
            assert [each.lane for each in array.holder.work.writes()] == [stream.lane]


def test_the_librarys_work_comes_after_earlier_work() -> None:
    assert library_reads("yes") == 7
    assert library_reads("no") == 0


def library_reads(waits: str) -> int:
    """A byte that a library reads on a stream of its own, whose turn it is before that byte is written."""
    with opened(f"waits={waits}") as store:
        gpu = store.gpu(0)
        stream = GpuStream(gpu)
        array = array_on(gpu, np.zeros(100, "u1"))
        copied = empty_array(gpu, (100,), np.dtype("u1"))
        with held(store.driver):
            array.fill(7)
            array.__dlpack__(stream=stream.ptr)
            gpu.driver.copy(0, copied.address, array.address, 1, 100, (100, 100), stream.ptr)
            settle(store.driver)
        stream.synchronize()
        return int(seen(copied)[0])
