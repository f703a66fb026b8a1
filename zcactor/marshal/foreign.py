"""Other libraries' arrays on GPUs among the values of a message.

The modules for GPUs are imported with the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.msgpack import Ext

from zcactor.errors import DeviceUnavailable
from zcactor.marshal.on_gpu import is_on_gpu
from zcactor.marshal.values import Code, unpackers

if TYPE_CHECKING:
    from zcactor.device.array import DeviceArray
    from zcactor.device.foreign import Known
    from zcactor.objectstore.store import Store

__all__ = ["array_over_foreign", "known_over", "pack_foreign", "pack_moved_on_gpu"]


def pack_moved_on_gpu(packing: Any, value: Any) -> Ext | None:
    """Encode an array on a GPU that is handed over; see `zcactor.marshal.devices.pack_moved_array`. None for a value
    that is no such array."""
    from zcactor.marshal import devices

    return _value(devices.pack_moved_array(packing, value))


def pack_foreign(packing: Any, value: Any) -> Ext | None:
    """Encode another library's array on a GPU; see `zcactor.marshal.devices.pack_known_array`. None for a value that
    is no such array."""
    if packing.store.open_devices is None or not is_on_gpu(value):
        return None
    from zcactor.marshal import devices

    return _value(devices.pack_known_array(packing, value))


def _value(data: bytes | None) -> Ext | None:
    """The value in a message that stands for an encoded array. Such values can be unpacked from then on."""
    if data is None:
        return None
    from zcactor.marshal import devices

    unpackers[Code.DEVICE_ARRAY] = devices.unpack_device_array
    return Ext(Code.DEVICE_ARRAY, data)


def array_over_foreign(store: Store, value: Any) -> DeviceArray | None:
    """The array over the bytes of another library's array on a GPU; None for a value that is no such
    array.

    Raises:
        DeviceError: the driver refuses.
    """
    known = known_over(store, value)
    return None if known is None else known.array


def known_over(store: Store, value: Any) -> Known | None:
    """See `zcactor.device.foreign.known_array`; None for a value that is no array on a GPU.

    Raises:
        DeviceError: the driver refuses.
    """
    if not is_on_gpu(value):
        return None
    from zcactor.device.foreign import known_array

    try:
        devices = store.devices()
    except DeviceUnavailable:  # switched off
        return None
    return known_array(devices, value)
