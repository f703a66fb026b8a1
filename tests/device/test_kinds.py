"""Arrays on GPUs, recognised by their classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.device.foreigners import Interfaced, Packed, Tensor, library, torch_like
from tests.device.helpers import array_on, opened
from zcactor.device.kinds import kind_of


def _name(value: object) -> str:
    return type(value).__name__


class Refusing:
    """An object whose form another library cannot have, as Arrow's arrays of text."""

    def __dlpack__(self) -> None:
        raise AssertionError("it is not asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise TypeError("no such form")


class Matrix(np.ndarray[Any, Any]):
    """A subclass, which has DLPack, too."""


def test_protocols() -> None:
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(4))
        assert kind_of(Packed(array)) == "dlpack"
        assert kind_of(Interfaced(array.address, (4,), "<i8")) == "interface"


@pytest.mark.parametrize(
    "value", [None, 5, "text", [1], np.arange(3), np.arange(3).view(Matrix), Refusing()], ids=_name
)
def test_what_is_none(value: object) -> None:
    assert kind_of(value) is None


def test_more_than_an_array() -> None:
    series = type("Series", (Interfaced,), {"__module__": "cudf.core.series"})
    assert kind_of(series(4096, (4,), "<i8")) is None


@pytest.mark.parametrize("error", [AttributeError, BufferError, RuntimeError, TypeError, ValueError])
def test_libraries_that_refuse(error: type[Exception]) -> None:
    class Refuses(Refusing):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise error

    assert kind_of(Refuses()) is None


def test_on_the_host() -> None:
    assert kind_of(library("pyarrow").array(["text"])) is None
    assert kind_of(library("pyarrow").array([1, 2])) is None


def test_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_like(monkeypatch)
    tensor = Tensor(0, (1,), (1,), "int32", 4, None)
    assert kind_of(tensor) == "torch"
    for name, value in (
        ("is_cuda", False),
        ("layout", "sparse"),
        ("is_quantized", True),
        ("is_conj", lambda: True),
        ("is_neg", lambda: True),
    ):
        odd = Tensor(0, (1,), (1,), "int32", 4, None)
        setattr(odd, name, value)
        assert kind_of(odd) is None
    assert kind_of(type("Parameter", (Tensor,), {})(0, (1,), (1,), "int32", 4, None)) is None


@pytest.mark.slow
def test_cupy() -> None:
    cupy = library("cupy")
    with opened() as store:
        array = array_on(store.gpu(0), np.arange(4)).as_cupy()
        assert kind_of(array) == "cupy"
        assert kind_of(type("Own", (cupy.ndarray,), {})((4,), "i8", array.data)) is None
