"""The facts of other libraries' arrays on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.device.foreigners import Interfaced, Packed, Tensor, library, torch_like
from tests.device.helpers import array_on, opened
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.kinds import kind_of
from zcactor.device.recognise import Foreign, read
from zcactor.device.store import DeviceStore
from zcactor.device.streams import GpuStream, streams


def found(store: DeviceStore, value: Any) -> Foreign:
    kind = kind_of(value)
    assert kind is not None
    known = read(kind, value, store.gpus)
    assert known is not None
    return known


def facts(known: Foreign) -> tuple[Any, ...]:
    return known.address, known.shape, known.strides, known.dtype


def numbers(store: DeviceStore, dtype: Any = "f4") -> DeviceArray:
    return array_on(store.gpu(0), np.arange(12).astype(dtype).reshape(3, 4))


def test_capsules() -> None:
    with opened() as store:
        array = numbers(store)
        for versions in (True, False):
            for part in (array, array.T, array[::-1, ::2]):
                known = found(store, Packed(part, versions=versions))
                assert facts(known) == (part.address, part.shape, part.strides, part.dtype)
                assert (known.library, known.stream, known.readonly) == ("", 0, True)
        for dtype in (library("ml_dtypes").bfloat16, "?", "c16", "u1"):
            part = numbers(store, dtype)
            assert found(store, Packed(part)).dtype == part.dtype


def test_capsules_are_ordered_before_the_tasks_stream() -> None:
    with opened() as store:
        packed, stream = Packed(numbers(store)), GpuStream(store.gpu(0))
        assert found(store, packed).stream == 0
        token = streams.set({0: stream.ptr})
        assert found(store, packed).stream == stream.ptr
        streams.reset(token)
        assert packed.streams == [1, stream.ptr]


def test_interfaces() -> None:
    with opened() as store:
        known = found(store, Interfaced(4096, (3, 4), "<f4"))
        assert facts(known) == (4096, (3, 4), (16, 4), np.dtype("f4"))
        assert known.stream is None and not known.readonly
        known = found(store, Interfaced(4096, (2,), "|i1", strides=(-3,), data=(4096, True), stream=1))
        assert known.strides == (-3,) and known.stream == 0 and known.readonly
        assert found(store, Interfaced(4096, (2,), "|i1", stream=77)).stream == 77
        assert found(store, Interfaced(4096, (2,), "|i1", version=2)).stream == 0
        record = found(store, Interfaced(4096, (2,), "|V12", descr=[("a", "<i4"), ("b", "<f8")]))
        assert record.dtype == np.dtype([("a", "i4"), ("b", "f8")])
        assert read("interface", Interfaced(4096, (2,), "|i1", mask=object()), store.gpus) is None
        assert read("interface", object(), store.gpus) is None


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    with opened() as store:
        known = found(store, Tensor(4096, (2, 3), (1, 5), "float32", 4, None))
        assert facts(known) == (4096, (2, 3), (4, 20), np.dtype("f4")) and known.library == "torch"
        narrow = Tensor(4096, (2,), (1,), "bfloat16", 2, None).requires_grad_(True)
        known = found(store, narrow)
        assert known.dtype == np.dtype("u2") and known.library == "torch:bfloat16:grad"
        assert read("torch", Tensor(4096, (2,), (1,), "qint8", 1, None), store.gpus) is None


@pytest.mark.slow
def test_cupy() -> None:
    library("cupy")
    with opened("devices=2") as store:
        stream = GpuStream(store.gpu(1))
        array = empty_array(store.gpu(1), (3, 4), np.dtype("f4"))
        token = streams.set({1: stream.ptr})
        for part in (array, array.T, array[::-1, ::2], array[2, 3]):
            known = found(store, part.as_cupy())
            assert facts(known) == (part.address, part.shape, part.strides, part.dtype)
            assert (known.library, known.stream) == ("cupy", stream.ptr)
            assert known.stream_kept is stream
        streams.reset(token)
