"""Other libraries' arrays on GPUs among the values of a message.

The modules for GPUs are imported with the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np
from msgspec.msgpack import Ext

from zcactor.errors import DeviceUnavailable
from zcactor.marshal.values import Code, unpackers

if TYPE_CHECKING:
    from zcactor.device.array import DeviceArray
    from zcactor.objectstore.store import Store

__all__ = ["array_over_foreign", "may_be_on_gpu", "pack_foreign"]

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


def pack_foreign(packing: Any, value: Any) -> Ext | None:
    """Encode another library's array on a GPU; see `zcactor.marshal.devices.pack_known_array`. None for a value that
    is no such array."""
    if packing.store.open_devices is None:
        return None
    from zcactor.device.kinds import kind_of

    if kind_of(value) is None:
        return None
    from zcactor.marshal import devices

    data = devices.pack_known_array(packing, value)
    if data is None:
        return None
    unpackers[Code.DEVICE_ARRAY] = devices.unpack_device_array
    return Ext(Code.DEVICE_ARRAY, data)


def array_over_foreign(store: Store, value: Any) -> DeviceArray | None:
    """The array over the bytes of another library's array on a GPU; None for a value that is no such
    array.

    Raises:
        DeviceError: the driver refuses.
    """
    if not may_be_on_gpu(type(value)):
        return None
    from zcactor.device.kinds import kind_of

    if kind_of(value) is None:
        return None
    from zcactor.device.foreign import known_array

    try:
        devices = store.devices()
    except DeviceUnavailable:  # switched off
        return None
    known = known_array(devices, value)
    return None if known is None else known.array
