"""Values that may be arrays on GPUs, recognised without what knows GPUs."""

from __future__ import annotations

from typing import Any, Final
from weakref import ref

from zcactor.lazy_numpy import np

__all__ = ["is_on_gpu", "may_be_on_gpu"]

_others: Final[dict[int, ref[type]]] = {}
"""Classes of objects that are no arrays on GPUs, by their ids: looking for an attribute that is missing takes 0.3 us,
and this is asked for each object that is pickled."""
_MAX_KNOWN: Final = 4096
"""Number of classes that are kept; programs use fewer."""


def may_be_on_gpu(cls: type) -> bool:
    """Whether objects of a class may be arrays on GPUs: the class has an attribute for that."""
    known = _others.get(id(cls))
    if known is not None and known() is cls:
        return False
    if (hasattr(cls, "__cuda_array_interface__") or hasattr(cls, "__dlpack_device__")) and not issubclass(
        cls, np.ndarray
    ):
        return True
    if len(_others) >= _MAX_KNOWN:
        _others.clear()
    _others[id(cls)] = ref(cls)
    return False


def is_on_gpu(value: Any) -> bool:
    """Whether a value is an array on a GPU, of ours or of another library."""
    cls = type(value)
    if not may_be_on_gpu(cls):
        return False
    from zcactor.device.kinds import kind_of

    return cls.__module__ == "zcactor.device.array" or kind_of(value) is not None
