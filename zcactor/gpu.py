"""Arrays on GPUs: which GPUs there are, ways between host and GPU, streams, and allocators of other libraries."""

from __future__ import annotations

from zcactor.api.device_paths import DevicePath
from zcactor.api.gpus import GpuInfo, allocator, gpus, stream, to_device, to_host
from zcactor.device.array import DeviceArray
from zcactor.device.streams import GpuStream

__all__ = ["DeviceArray", "DevicePath", "GpuInfo", "GpuStream", "allocator", "gpus", "stream", "to_device", "to_host"]
