"""Other libraries' arrays on GPUs, recognised by their classes: an attribute of an object may call a driver, or wait.

No library is imported: the caller that has an array of it has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, Final, Literal

import numpy as np

from zcactor.exception_pickling import module_name

__all__ = ["KDL_CUDA", "Kind", "is_parameter", "kind_of"]

Kind = Literal["cupy", "torch", "interface", "dlpack"]
KDL_CUDA: Final = 2
"""DLPack's number for memory of a CUDA device."""
_MORE: Final = frozenset({"cudf"})
"""Libraries whose objects have the form of an array and are more than that: a series has an index."""
_KDL_CUDA_MANAGED: Final = 13
"""DLPack's number for memory that moves between host and GPU. It is read like that of a GPU."""


def kind_of(value: object) -> Kind | None:
    """Return the way on which the array `value` is read; None for a value that is no array on a GPU."""
    cls = type(value)
    if issubclass(cls, np.ndarray) or module_name(cls).partition(".")[0] in _MORE:
        return None
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if cupy is not None and issubclass(cls, cupy.ndarray):
        return "cupy" if cls is cupy.ndarray else None
    if torch is not None and issubclass(cls, torch.Tensor):
        tensor: Any = value
        plain = cls is torch.Tensor or is_parameter(tensor)
        strided = plain and tensor.is_cuda and tensor.layout is torch.strided
        return "torch" if strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()) else None
    if hasattr(cls, "__dlpack_device__") and hasattr(cls, "__dlpack__"):
        return "dlpack" if _is_on_gpu(value) else None
    return "interface" if hasattr(cls, "__cuda_array_interface__") else None


def is_parameter(tensor: Any) -> bool:
    """Whether a tensor is a parameter of PyTorch's modules, which is a tensor with a class of its own."""
    torch: Any = sys.modules["torch"]
    return type(tensor) is getattr(getattr(torch, "nn", None), "Parameter", None)


def _is_on_gpu(value: Any) -> bool:
    try:
        return value.__dlpack_device__()[0] in {KDL_CUDA, _KDL_CUDA_MANAGED}
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):  # as Arrow's arrays of text do
        return False
