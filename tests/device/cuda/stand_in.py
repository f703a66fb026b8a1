"""CUDA's calls over fake GPUs, so that the driver for CUDA is tested where no GPU is.

Each call checks what CUDA checks or leaves undefined: a context of the right device is current, handles are known, and
arguments have the types of ``cuda.bindings``. It imports no pytest, as second processes use it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from cuda.bindings import driver as bindings

from zcactor.device.cuda import CudaGpuDriver
from zcactor.device.driver import THREAD_STREAM, CudaCode, Refused
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.fake.system import number_of
from zcactor.errors import DeviceError

__all__ = ["StandIn", "opened_cuda", "opened_held"]

_ATTRIBUTES: Final = bindings.CUdevice_attribute
_MODES: Final = bindings.CUstreamCaptureMode
_STREAM: Final = 0x10000
"""Streams are numbers that look like addresses."""
_PATIENCE: Final = 60.0
"""Seconds until a test gives up."""


def opened_cuda(options: str = "", version: int = 13000, **attributes: int) -> CudaGpuDriver:
    """The driver for CUDA over fake GPUs; see `StandIn`."""
    return CudaGpuDriver(StandIn(options, version, **attributes))


def opened_held() -> CudaGpuDriver:
    """The same; the default stream of the first GPU never does anything."""
    calls = StandIn()
    calls.gpus.hold(0, 0, bool)
    return CudaGpuDriver(calls)


class StandIn:
    """The stand-in for the module ``cuda.bindings.driver``; its types are that module's.

    Args:
        options: of the fake GPUs.
        version: of the driver.
        attributes: of all devices, by CUDA's names, where they differ from the options.
    """

    def __init__(self, options: str = "", version: int = 13000, **attributes: int) -> None:
        self.gpus: Final = FakeGpuDriver(options)
        self.calls: Final[list[tuple[Any, ...]]] = []
        """The calls by which bytes are written, with their arguments."""
        self.flushed: Final[list[int]] = []
        """The devices whose memory was made to show what network cards have written."""
        self._version = version
        self._attributes: Final = {
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": int(self.gpus.exports),
            "CAN_USE_64_BIT_STREAM_MEM_OPS": int(self.gpus.shared_events),
            "DMA_BUF_SUPPORTED": int(self.gpus.exports_to_cards),
            "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
            "GPU_DIRECT_RDMA_WRITES_ORDERING": 0,
            "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 1,
            "MAX_PITCH": (1 << 31) - 1,
            **attributes,
        }
        self._local: Final = threading.local()
        self._owners: Final[dict[int, int]] = {}
        self._retained: Final[Counter[int]] = Counter()
        """The device of each handle."""
        self._mapped: Final[dict[int, tuple[int, int]]] = {}
        """Handle and bytes of the memory at an address."""
        self.registered: Final[dict[int, int]] = {}
        """Bytes of pinned host memory, by its address."""
        self.retained: Final[list[int]] = []
        """The devices whose contexts are in use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AttributeError(f"the stand-in for CUDA has no call {name}")
        return getattr(bindings, name)

    # ---- contexts

    def _now(self) -> int:
        stack: list[int] = getattr(self._local, "stack", [])
        assert stack, "no context is current"
        return stack[-1]

    def _do(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        """Make a call of the fake driver. Returns CUDA's code, and the result."""
        if self.gpus.prohibits(call, relaxed=self.mode != _MODES.CU_STREAM_CAPTURE_MODE_GLOBAL):
            return (bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        if self.gpus.captured.intersection(arguments):
            self.gpus.captures_are_valid = False
            return (bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        try:
            result = getattr(self.gpus, call)(*arguments)
        except DeviceError as error:
            return (bindings.CUresult(error.code),)
        return bindings.CUresult.CUDA_SUCCESS, result

    def _only(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        return self._do(call, *arguments)[:1]

    @property
    def mode(self) -> Any:
        """The calling thread's mode towards captures."""
        return getattr(self._local, "mode", _MODES.CU_STREAM_CAPTURE_MODE_GLOBAL)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        before, self._local.mode = self.mode, mode
        return bindings.CUresult.CUDA_SUCCESS, before

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, ...]:
        kinds = bindings.CUstreamCaptureStatus
        captured = self._stream(stream) in self.gpus.captured
        return bindings.CUresult.CUDA_SUCCESS, (
            kinds.CU_STREAM_CAPTURE_STATUS_ACTIVE if captured else kinds.CU_STREAM_CAPTURE_STATUS_NONE
        )

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        kinds = bindings.CUresult
        return (kinds.CUDA_SUCCESS if self.gpus.devices() else kinds.CUDA_ERROR_NO_DEVICE,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, self._version

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, len(self.gpus.devices())

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUdevice(ordinal)

    def cuDeviceGetUuid(self, device: Any) -> tuple[Any, ...]:
        uuid = self.gpus.devices()[int(device)].uuid
        raw = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
        return bindings.CUresult.CUDA_SUCCESS, SimpleNamespace(bytes=raw)

    def cuDeviceGetName(self, nbytes: int, device: Any) -> tuple[Any, ...]:
        name = self.gpus.devices()[int(device)].name.encode()
        return bindings.CUresult.CUDA_SUCCESS, name.ljust(nbytes, b"\0")

    def cuDeviceTotalMem(self, device: Any) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, self.gpus.devices()[int(device)].total

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        assert isinstance(device, bindings.CUdevice)
        values = {getattr(_ATTRIBUTES, f"CU_DEVICE_ATTRIBUTE_{name}"): each for name, each in self._attributes.items()}
        return bindings.CUresult.CUDA_SUCCESS, values[attribute]

    def cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> tuple[Any, ...]:
        assert int(device) != int(peer)
        code, *result = self._do("can_access", int(device), int(peer))
        return (code, *(int(each) for each in result))

    def cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        if self.gpus.prohibits("create", relaxed=self.mode != _MODES.CU_STREAM_CAPTURE_MODE_GLOBAL):
            return bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, None  # a context takes memory, too
        self.retained.append(int(device))
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUcontext(int(device) + 1)

    def cuDevicePrimaryCtxRelease(self, device: Any) -> tuple[Any, ...]:
        self.retained.remove(int(device))
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        self._local.stack.append(int(context) - 1)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        stack: list[int] = getattr(self._local, "stack", [])
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUcontext(stack[-1] + 1 if stack else 0)

    def cuCtxSetCurrent(self, context: Any) -> tuple[Any, ...]:
        self._local.stack = [*getattr(self._local, "stack", [])[:-1], int(context) - 1]
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUcontext(self._local.stack.pop() + 1)

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        if self.gpus.prohibits("record_all", relaxed=True):
            return (bindings.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        assert self.gpus._engines[self._now()].synchronize(_PATIENCE), "the work of a GPU does not end"
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        code, *free = self._do("free", self._now())
        return code, *free, self.gpus.devices()[self._now()].total

    # ---- memory

    def _device(self, location: Any) -> int:
        assert location.type == bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return int(location.id)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, ...]:
        assert isinstance(properties, bindings.CUmemAllocationProp)
        assert option == bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return bindings.CUresult.CUDA_SUCCESS, self.gpus.granularity

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        assert (alignment, address, flags) == (0, 0, 0)
        code, *made = self._do("reserve", self._now(), nbytes)
        return (code, *(bindings.CUdeviceptr(each) for each in made))

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        return self._only("unreserve", 0, address, nbytes)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:
        assert properties.type == bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED and not flags
        fd = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert (properties.requestedHandleTypes == fd) == (self.gpus.exports)
        device = self._device(properties.location)
        code, *made = self._do("create", device, nbytes)
        for handle in made:
            self._owners[handle] = device
        return (code, *(bindings.CUmemGenericAllocationHandle(each) for each in made))

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        assert handle in self._owners and not offset and not flags
        self._mapped[address] = handle, nbytes
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> tuple[Any, ...]:
        handle, size = self._mapped[address]
        assert nbytes == size and count == len(access)
        flags = bindings.CUmemAccess_flags
        kinds = {each.flags for each in access}
        devices = [self._device(each.location) for each in access]
        assert self._now() in devices
        for each in devices:
            if self._owners[handle] >= 0 and not self.gpus.can_access(each, self._owners[handle]):
                return (bindings.CUresult.CUDA_ERROR_INVALID_DEVICE,)
        writable = kinds == {flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE}
        assert writable or kinds == {flags.CU_MEM_ACCESS_FLAGS_PROT_READ}
        if not writable and not self.gpus._options.readonly:
            return (bindings.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        return self._only("map", self._now(), address, handle, nbytes, writable)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert self._mapped[address][1] == nbytes
        code = self._only("unmap", 0, address, nbytes)
        if not code[0]:
            del self._mapped[address]
        return code

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        if self._retained[int(handle)]:
            self._retained[int(handle)] -= 1
            return (bindings.CUresult.CUDA_SUCCESS,)
        code = self._only("release", 0, handle)
        if not code[0]:
            del self._owners[handle]
        return code

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:
        found = self._mapped.get(address)
        if found is None:
            return (bindings.CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._retained[found[0]] += 1
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUmemGenericAllocationHandle(found[0])

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[Any, ...]:
        assert kind == bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR and not flags
        assert self._retained[int(handle)]
        address, nbytes = next((at, size) for at, (each, size) in self._mapped.items() if each == int(handle))
        return self._do("export", self._now(), address, nbytes)

    def cuMemImportFromShareableHandle(self, what: int, kind: Any) -> tuple[Any, ...]:
        assert kind == bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        code, *made = self._do("import_", self._now(), what, os.fstat(what).st_size, "")
        for handle in made:
            number, numbers = number_of(what), self.gpus._numbers
            self._owners[handle] = numbers.index(number) if number in numbers else -1
        return (code, *(bindings.CUmemGenericAllocationHandle(each) for each in made))

    def _stream(self, stream: int) -> int:
        """The fake's number of a stream. For CUDA, 0 is the calling thread's where ``cuda.bindings`` is told so."""
        return stream // _STREAM if stream >= _STREAM else {0: THREAD_STREAM}.get(stream, stream)

    def _write(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        self.calls.append((call, *arguments))
        return self._only(call, self._now(), *arguments)

    def cuMemcpyAsync(self, into: int, out: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        return self._write("copy", into, out, 1, nbytes, (nbytes, nbytes), self._stream(stream))

    def cuMemcpy2DAsync(self, plan: Any, stream: int) -> tuple[Any, ...]:
        unified = bindings.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        assert plan.srcMemoryType == plan.dstMemoryType == unified
        assert plan.srcXInBytes == plan.srcY == plan.dstXInBytes == plan.dstY == 0
        assert max(plan.dstPitch, plan.srcPitch) <= self._attributes["MAX_PITCH"]
        into, out = int(plan.dstDevice), int(plan.srcDevice)
        pitches = plan.dstPitch, plan.srcPitch
        return self._write("copy", into, out, plan.Height, plan.WidthInBytes, pitches, self._stream(stream))

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        return self._write("fill", address, value.to_bytes(1), count, self._stream(stream))

    def cuMemsetD16Async(self, address: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        return self._write("fill", address, value.to_bytes(2, "little"), count, self._stream(stream))

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        return self._write("fill", address, value.to_bytes(4, "little"), count, self._stream(stream))

    def cuMemsetD2D32Async(
        self, address: int, pitch: int, value: int, width: int, height: int, stream: int
    ) -> tuple[Any, ...]:
        assert width == 1 and pitch % 4 == address % 4 == 0
        for row in range(height):
            code, *_ = self._write("fill", address + row * pitch, value.to_bytes(4, "little"), 1, self._stream(stream))
            if code:
                return (code,)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any, ...]:
        self._now()
        mapped = bindings.CU_MEMHOSTREGISTER_DEVICEMAP
        assert flags | mapped == bindings.CU_MEMHOSTREGISTER_PORTABLE | mapped
        code = self._only("pin", address, nbytes)
        if not code[0]:
            self.registered[address] = nbytes
        return code

    def cuMemHostUnregister(self, address: int) -> tuple[Any, ...]:
        self._now()
        code = self._only("unpin", address, 1)
        if not code[0]:
            del self.registered[address]
        return code

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        self._now()
        assert address in self.registered and not flags
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUdeviceptr(address)

    def _number(self, address: int) -> Any:
        """A number in pinned memory, which is used while that is pinned."""
        if not any(at <= address <= at + nbytes - 8 for at, nbytes in self.registered.items()):
            raise Refused(CudaCode.ILLEGAL_ADDRESS, f"{address:#x} is not pinned")
        return ctypes.c_uint64.from_address(address)

    def cuMemGetHandleForAddressRange(self, address: int, nbytes: int, kind: Any, flags: int) -> tuple[Any, ...]:
        assert kind == bindings.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD and not flags
        return self._do("dma_buf", self._now(), address, nbytes)

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> tuple[Any, ...]:
        assert target == bindings.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        assert scope == bindings.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
        self.flushed.append(self._now())
        return self._do("flush", self._now())[:1]

    def cuPointerGetAttribute(self, attribute: Any, pointer: int) -> tuple[Any, ...]:
        self._now()
        found = self.gpus.owner_of(pointer)
        if found is None:
            return bindings.CUresult.CUDA_ERROR_INVALID_VALUE, None
        if attribute == bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            return bindings.CUresult.CUDA_SUCCESS, bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
        assert attribute == bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return bindings.CUresult.CUDA_SUCCESS, found[0]

    def cuMemGetAddressRange(self, pointer: int) -> tuple[Any, ...]:
        found = self.gpus.owner_of(pointer)
        assert found is not None
        return bindings.CUresult.CUDA_SUCCESS, bindings.CUdeviceptr(found[1]), found[2]

    # ---- order

    def cuStreamCreate(self, flags: Any) -> tuple[Any, ...]:
        assert flags == bindings.CUstream_flags.CU_STREAM_NON_BLOCKING
        code, *made = self._do("stream", self._now())
        return (code, *(bindings.CUstream(each * _STREAM) for each in made))

    def _query(self, call: str, *arguments: Any) -> tuple[Any, ...]:
        code, *ready = self._do(call, self._now(), *arguments)
        return (bindings.CUresult.CUDA_ERROR_NOT_READY,) if ready == [False] else (code,)

    def cuStreamQuery(self, stream: int) -> tuple[Any, ...]:
        return self._query("idle", self._stream(stream))

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return self._only("end_stream", self._now(), self._stream(stream))

    def cuStreamWriteValue64(self, stream: int, address: int, value: int, flags: int) -> tuple[Any, ...]:
        assert not flags

        def run() -> None:
            self._number(address).value = value

        return self._queue(stream, run)

    def cuStreamWaitValue64(self, stream: int, address: int, value: int, flags: Any) -> tuple[Any, ...]:
        assert flags == bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ

        def ready() -> bool:
            return not self.gpus._options.waits or (self._number(address).value - value) % (1 << 64) < 1 << 63

        return self._queue(stream, lambda: None, ready)

    def _queue(self, stream: int, run: Callable[[], None], ready: Callable[[], bool] | None = None) -> tuple[Any, ...]:
        device = self._now()
        try:
            self.gpus._engines[device].submit(self.gpus._stream(device, self._stream(stream)), run, ready)
        except Refused as error:
            return (bindings.CUresult(error.code),)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._only("wait", self._now(), self._stream(stream), event)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        kinds = bindings.CUevent_flags
        assert flags == kinds.CU_EVENT_DISABLE_TIMING
        code, *made = self._do("event", self._now())
        return (code, *(bindings.CUevent(each) for each in made))

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._only("end_event", 0, event)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._only("record", self._now(), event, self._stream(stream))

    def cuCtxRecordEvent(self, context: Any, event: int) -> tuple[Any, ...]:
        assert self._version >= 12050, "the driver has no such call"
        return self._only("record_all", int(context) - 1, event)

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        return self._query("done", event)
