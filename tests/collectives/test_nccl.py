"""NCCL by CuPy: whether it is there, and what its binding is called with. No test here needs a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zcactor.collectives.nccl import CupyNccl, Element, element_of, found_nccl

REDUCED = {
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "i1": "int8",
    "u1": "uint8",
    "i4": "int32",
    "u4": "uint32",
    "i8": "int64",
    "u8": "uint64",
}


class Recorded:
    """The modules ``cupy`` and ``cupy.cuda.nccl``, whose calls are recorded."""

    def __init__(self, available: bool = True, version: int = 23203, fails: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.device: list[int] = []
        self.fails = fails
        self.cuda = SimpleNamespace(Device=self._on)
        self.available = available
        self.get_version = lambda: version
        self.get_unique_id = lambda: b"\x01" * 128
        self.groupStart = lambda: self.calls.append(("groupStart",))
        self.groupEnd = lambda: self.calls.append(("groupEnd",))

    def _on(self, index: int) -> Any:
        recorded = self

        class On:
            def __enter__(self) -> None:
                recorded.device.append(index)

            def __exit__(self, *_: object) -> None:
                recorded.device.pop()

        return On()

    def NcclCommunicator(self, *arguments: Any) -> Any:
        self.calls.append(("NcclCommunicator", *arguments, self.device[-1]))
        return _Made(self)

    def load(self, name: str) -> Any:
        """Import a module."""
        assert name in {"cupy", "cupy.cuda.nccl"}
        return self


class _Made:
    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if name == self._recorded.fails:
                raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR")
            self._recorded.calls.append((name, *arguments, *self._recorded.device))

        return call


# ---------------------------------------------------------------- choice


def test_fake_gpus_have_none() -> None:
    assert found_nccl("fake") == "NCCL does not know fake GPUs"


def test_without_cupy_there_is_none() -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    wanted = "CuPy is not installed here: install both for your CUDA, such as cupy-cuda13x and nvidia-nccl-cu13"
    assert found_nccl("cuda", load) == wanted


def test_cupy_without_nccl_has_none() -> None:
    recorded = Recorded(available=False)
    wanted = "CuPy finds no NCCL here: install that for CuPy's CUDA, such as nvidia-nccl-cu13"
    assert found_nccl("cuda", recorded.load) == wanted


def test_nccl_that_is_too_old_is_none() -> None:
    assert found_nccl("cuda", Recorded(version=20900).load) == (
        "NCCL 20900 is too old: install 2.10 or later, as nvidia-nccl-cu13 is"
    )


def test_nccl_that_loads_is_taken() -> None:
    assert isinstance(found_nccl("cuda", Recorded().load), CupyNccl)


@pytest.mark.filterwarnings("error")
def test_the_real_cupy_is_asked_without_a_warning() -> None:
    pytest.importorskip("cupy")
    found = found_nccl("cuda")
    if not importlib.import_module("cupy.cuda.nccl").available:
        assert found == "CuPy finds no NCCL here: install that for CuPy's CUDA, such as nvidia-nccl-cu13"
    else:
        assert isinstance(found, CupyNccl)


# ---------------------------------------------------------------- elements


@pytest.mark.parametrize(("dtype", "name"), REDUCED.items())
def test_numbers(dtype: str, name: str) -> None:
    assert element_of(np.dtype(dtype), "sum", "call") == Element(name, 1)


def test_bools_complex_numbers_and_bfloat16() -> None:
    assert element_of(np.dtype(bool), "max", "call") == Element("uint8", 1)
    assert element_of(np.dtype("c8"), "sum", "call") == Element("float32", 2)
    assert element_of(np.dtype("c16"), "mean", "call") == Element("float64", 2)
    assert element_of(np.dtype(ml_dtypes.bfloat16), "mean", "call") == Element("bfloat16", 1)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("i2", "sum"), ("u2", "max"), (">f4", "sum"), ("c8", "prod"), (ml_dtypes.float8_e5m2, "sum"), ("g", "sum")],
)
def test_numbers_that_nccl_lacks(dtype: Any, op: str) -> None:
    dtype = np.dtype(dtype)
    with pytest.raises(TypeError) as refused:
        element_of(dtype, op, "Group.allreduce")
    text = str(refused.value)
    assert text.startswith(f"Group.allreduce: NCCL has no {op} of dtype {dtype} on GPUs; it reduces int8, uint8, int32")
    assert text.endswith("pass zc.gpu.to_host(x), or another dtype")


@pytest.mark.parametrize(
    ("dtype", "op"), [("i4", "mean"), ("?", "sum"), ("c8", "min"), ("S3", "sum"), ("M8[s]", "max")]
)
def test_what_no_group_reduces(dtype: str, op: str) -> None:
    with pytest.raises(TypeError, match=f"there is no {op} of dtype"):
        element_of(np.dtype(dtype), op, "Group.allreduce")


def test_an_unknown_op() -> None:
    with pytest.raises(ValueError, match="there is no op 'median'; ops are sum, mean, min, max, prod"):
        element_of(np.dtype("f4"), "median", "Group.allreduce")


# ---------------------------------------------------------------- calls


def test_the_id_goes_as_it_comes() -> None:
    recorded = Recorded()
    nccl = CupyNccl(recorded, recorded)
    assert nccl.new_id() == b"\x01" * 128
    nccl.connect(2, 4, 1, b"\x02" * 128)
    assert recorded.calls == [("NcclCommunicator", 4, b"\x02" * 128, 1, 2)]


def test_calls_of_the_binding() -> None:
    recorded = Recorded()
    communicator = CupyNccl(recorded, recorded).connect(1, 2, 0, b"")
    del recorded.calls[:]
    communicator.all_reduce(10, 20, 5, "bfloat16", "mean", 7)
    communicator.reduce(10, 20, 5, "float16", "max", 1, 7)
    communicator.reduce_scatter(10, 20, 5, "float64", "min", 7)
    communicator.all_gather(10, 20, 5, 7)
    communicator.broadcast(10, 20, 5, 1, 7)
    with communicator.together():
        communicator.send(10, 5, 1, 7)
        communicator.receive(20, 5, 1, 7)
    communicator.check()
    communicator.abort()
    communicator.destroy()
    assert recorded.calls == [  # numbers of nccl.h; the last one is the current device
        ("allReduce", 10, 20, 5, 9, 4, 7, 1),
        ("reduce", 10, 20, 5, 6, 2, 1, 7, 1),
        ("reduceScatter", 10, 20, 5, 8, 3, 7, 1),
        ("allGather", 10, 20, 5, 1, 7, 1),
        ("broadcast", 10, 20, 5, 1, 1, 7, 1),
        ("groupStart",),
        ("send", 10, 5, 1, 1, 7, 1),
        ("recv", 20, 5, 1, 1, 7, 1),
        ("groupEnd",),
        ("check_async_error",),
        ("abort",),
        ("destroy", 1),
    ]
    assert not recorded.device


def test_a_group_of_calls_is_ended_after_an_error() -> None:
    recorded = Recorded(fails="send")
    communicator = CupyNccl(recorded, recorded).connect(0, 2, 0, b"")
    with pytest.raises(RuntimeError, match="NCCL_ERROR"), communicator.together():
        communicator.send(10, 5, 1, 7)
    assert recorded.calls[-1] == ("groupEnd",)


def test_the_numbers_are_those_of_the_real_binding() -> None:
    """CuPy's constants, where a library of NCCL is installed, too."""
    pytest.importorskip("cupy")
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("there is no NCCL here: install nvidia-nccl-cu13")
    recorded = Recorded()
    communicator = CupyNccl(recorded, recorded).connect(0, 1, 0, b"")
    for name in [*REDUCED.values(), "bfloat16"]:
        communicator.all_reduce(0, 0, 1, name, "sum", 0)
        assert recorded.calls[-1][4] == getattr(nccl, f"NCCL_{name.upper()}")
    for op, name in (("sum", "SUM"), ("prod", "PROD"), ("max", "MAX"), ("min", "MIN"), ("mean", "AVG")):
        communicator.all_reduce(0, 0, 1, "int8", op, 0)
        assert recorded.calls[-1][5] == getattr(nccl, f"NCCL_{name}")
    found = found_nccl("cuda")
    assert isinstance(found, CupyNccl)
    assert len(found.new_id()) == 128
