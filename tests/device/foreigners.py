"""Arrays of libraries that are not there: objects with the attributes by which other libraries' arrays are known."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conformance.device_peer import mapped
from zcactor.device.array import DeviceArray
from zcactor.device.interchange import tensor_of
from zcactor.device.memory import GpuMemory

__all__ = ["Array", "Interfaced", "Packed", "Parameter", "Tensor", "jax_like", "library", "outside", "torch_like"]


def library(name: str) -> Any:
    """Import a module, or skip the test with the name of the missing package."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {name}-cuda13x")


def outside(gpu: GpuMemory) -> int:
    """Memory of a GPU that no arena has, 2 MiB; its address."""
    return mapped(gpu.driver, gpu.index, gpu.driver.granularity)


class Interfaced:
    """An array with ``__cuda_array_interface__`` alone, as Numba's."""

    def __init__(self, address: int, shape: tuple[int, ...], typestr: str, **more: Any) -> None:
        self.described = {"version": 3, "shape": shape, "typestr": typestr, "data": (address, False), **more}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The facts that it was made of."""
        return self.described


class Packed:
    """An array with DLPack alone.

    Args:
        array: the array.
        versions: whether it knows versioned capsules.
    """

    def __init__(self, array: DeviceArray, *, versions: bool = True) -> None:
        self.array = array
        self.versions = versions
        self.streams: list[Any] = []
        """The streams that consumers have named."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument")
        self.streams.append(options.get("stream"))
        return self.array.__dlpack__(**options)


STRIDED = object()


class Tensor:
    """As much of a CUDA tensor as is looked at."""

    is_cuda = True
    is_quantized = False
    layout = STRIDED

    def __init__(
        self, address: int, shape: Sequence[int], steps: Sequence[int], dtype: str, size: int, kept: object
    ) -> None:
        self.address = address
        self.shape = tuple(shape)
        self.steps = tuple(steps)
        self.dtype = f"torch.{dtype}"
        self.size = size
        self.kept = kept
        self.device = SimpleNamespace(index=0)
        self.requires_grad = False
        self._base: Tensor | None = None
        self._version = 0

    def __dlpack_device__(self) -> tuple[int, int]:
        raise AssertionError("it may ask a driver")

    def is_inference(self) -> bool:
        """Whether writes to it are not counted."""
        return False

    def is_conj(self) -> bool:
        """Whether it is a conjugate view."""
        return False

    def is_neg(self) -> bool:
        """Whether it is a negative view."""
        return False

    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next along each axis."""
        return self.steps

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.size

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.address

    def view(self, dtype: str) -> Tensor:
        """The same bytes as another type."""
        return Tensor(self.address, self.shape, self.steps, dtype.removeprefix("torch."), self.size, self.kept)

    def requires_grad_(self, value: bool) -> Tensor:
        """Set whether gradients are computed."""
        self.requires_grad = value
        return self


class Parameter(Tensor):
    """As much of a parameter of a module."""

    def __init__(self, of: Tensor, requires_grad: bool = True) -> None:
        super().__init__(of.address, of.shape, of.steps, of.dtype.removeprefix("torch."), of.size, of.kept)
        self.requires_grad = requires_grad


def _from_dlpack(capsule: Any) -> Tensor:
    tensor = tensor_of(capsule)
    kind = {0: "int", 1: "uint", 2: "float"}[tensor.code]
    shape, steps = tensor.shape[: tensor.ndim], tensor.strides[: tensor.ndim]
    return Tensor(tensor.data, shape, steps, f"{kind}{tensor.bits}", tensor.bits // 8, capsule)


def torch_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module with such tensors in the place of PyTorch, which asks a driver for each CUDA tensor."""
    module: Any = ModuleType("torch")
    module.Tensor, module.strided, module.from_dlpack = Tensor, STRIDED, _from_dlpack
    module.bfloat16 = "torch.bfloat16"
    module.nn = SimpleNamespace(Parameter=Parameter)
    monkeypatch.setitem(sys.modules, "torch", module)


def ramp(count: int) -> Any:
    """The numbers 0, 1, 2, ... as int32."""
    return np.arange(count, dtype="i4")


class Array(Packed):
    """An array with DLPack alone, as one of JAX's."""

    def __init__(self, array: DeviceArray) -> None:
        super().__init__(array)
        self.capsule: Any = None


Array.__module__ = "jaxlib._jax"


def jax_like(monkeypatch: pytest.MonkeyPatch, stream: int) -> None:
    """Put a module with such arrays in the place of JAX, which takes capsules for a stream of its own."""

    def from_dlpack(value: Any) -> Array:
        assert value.__dlpack_device__() == (2, 0)
        made = Array(value._array)
        made.capsule = value.__dlpack__(stream=stream)
        return made

    module: Any = ModuleType("jax")
    module.dlpack = SimpleNamespace(from_dlpack=from_dlpack)
    monkeypatch.setitem(sys.modules, "jax", module)
