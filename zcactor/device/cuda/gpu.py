"""The driver of NVIDIA's GPUs.

Memory is CUDA's virtual memory, which other processes map by descriptors. Where a GPU cannot export it so, arrays go
through host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from zcactor.device.cuda.calls import CudaCalls, bindings, free_by_nvml
from zcactor.device.cuda.flags import CudaFlags
from zcactor.device.driver import (
    LEGACY_STREAM,
    PAGE_NBYTES,
    PATTERNS,
    THREAD_STREAM,
    CudaCode,
    GpuFacts,
    Refused,
)
from zcactor.errors import DeviceError, DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CudaGpuDriver"]

_WAITS_SINCE: Final = 12000
"""The driver's version from which on streams write and wait for numbers without a setting of the system."""


_PROPERTIES_NBYTES: Final = 32
"""Bytes of ``CUmemAllocationProp``."""


@dataclass(slots=True)
class _Memory:
    device: int
    """The GPU on which it lies; -1 for one that this process does not see."""
    nbytes: int
    is_ours: bool = True
    """Whether it is not another process's."""


@dataclass(slots=True)
class _State:
    """Everything that ends with a driver."""

    cuda: CudaCalls
    flags: CudaFlags | None
    """The events that are shared between processes; None where they are not."""
    handles: dict[int, _Memory] = field(default_factory=dict)
    mapped: dict[int, _Memory] = field(default_factory=dict)
    """Mapped extents by their address."""
    reserved: dict[int, int] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)
    """The device of each stream that was made here."""
    events: dict[int, int] = field(default_factory=dict)
    """The device of each event that was made here, one of CUDA's. Those of `flags` are negative numbers."""


class CudaGpuDriver:
    """NVIDIA's GPUs; see `zcactor.device.driver.GpuDriver` for all calls. It ends with the last reference to it.

    CUDA itself waits in a copy between a GPU and host memory that is not pinned. Streams of other libraries can be
    given, too, by their ``CUstream``.

    Args:
        api: the module ``cuda.bindings.driver``, or what stands in its place in a test.
        nvml: the same for ``cuda.bindings.nvml``.

    Raises:
        DeviceUnavailable: there is no such module, no driver, no GPU, or a GPU without virtual memory. The message
            says which.
    """

    kind: Literal["cuda", "fake"] = "cuda"

    def __init__(self, api: Any = None, nvml: Any = None) -> None:
        self._nvml: Final = nvml
        cuda = CudaCalls(bindings() if api is None else api)
        self._cuda: Final = cuda
        self._api: Final = cuda.api
        count = len(cuda.devices)
        self._facts: Final = [cuda.fact(index) for index in range(count)]
        if not all(self._cuda.has(index, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED") for index in range(count)):
            raise DeviceUnavailable("a GPU of this machine has no virtual memory, which zcactor needs")
        by_descriptor = "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"
        self.exports: bool = all(self._cuda.has(index, by_descriptor) for index in range(count))
        self.shared_events: bool = cuda.version >= _WAITS_SINCE and all(
            self._cuda.has(index, "CAN_USE_64_BIT_STREAM_MEM_OPS") for index in range(count)
        )
        self._state: Final = _State(cuda, CudaFlags(cuda) if self.shared_events else None)
        self.exports_to_cards: bool = all(self._cuda.has(index, "DMA_BUF_SUPPORTED") for index in range(count))
        self._pitches: Final = [self._cuda.attribute(index, "MAX_PITCH") for index in range(count)]
        minimum = cuda.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity: int = max(
            self._cuda.ask("create", index, "cuMemGetAllocationGranularity", self._properties(index), minimum)
            for index in range(count)
        )
        self.close: Final = weakref.finalize(self, _end, self._state)
        """Wait for all work, and give everything back. Idempotent."""
        self.close.atexit = False  # CUDA does it at the end of a process, and other libraries may still need theirs

    def allocation_properties(self, device: int) -> bytes:
        """The structure ``CUmemAllocationProp`` by which memory of a GPU is made."""
        return ctypes.string_at(self._properties(device).getPtr(), _PROPERTIES_NBYTES)

    def _properties(self, device: int) -> Any:
        made = self._api.CUmemAllocationProp()
        made.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._cuda.locate(made.location, device)
        if self.exports:
            made.requestedHandleTypes = self._descriptors
        if self._cuda.has(device, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            made.allocFlags.gpuDirectRDMACapable = 1
        return made

    @property
    def _descriptors(self) -> Any:
        return self._api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    # ---- devices

    def devices(self) -> Sequence[GpuFacts]:
        self._cuda.check_process()
        return list(self._facts)

    def can_access(self, device: int, peer: int) -> bool:
        with self._cuda.named("can_access", device), self._cuda.named("can_access", peer):
            return device == peer or self._reaches(device, peer)

    def _reaches(self, device: int, peer: int) -> bool:
        here, there = self._cuda.devices[device], self._cuda.devices[peer]
        return bool(self._cuda.ask("can_access", device, "cuDeviceCanAccessPeer", here, there))

    def free(self, device: int) -> int:
        with self._cuda.named("free", device):
            free = None if device in self._cuda.contexts else free_by_nvml(self._nvml, self._facts[device].uuid)
        if free is not None:
            return free
        with self._cuda.current("free", device):
            return int(self._cuda.ask("free", device, "cuMemGetInfo")[0])

    # ---- memory

    def reserve(self, device: int, nbytes: int) -> int:
        with self._cuda.current("reserve", device):
            self._check_size("reserve", device, nbytes)
            address = int(self._cuda.ask("reserve", device, "cuMemAddressReserve", nbytes, 0, 0, 0))
            self._state.reserved[address] = nbytes
            return address

    def _check_size(self, call: str, device: int, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self.granularity:
            reason = f"{nbytes} bytes are not a multiple of {self.granularity}"
            raise DeviceError(call, CudaCode.INVALID_VALUE, device, False, reason)

    def unreserve(self, device: int, address: int, nbytes: int) -> None:
        with self._cuda.current("unreserve", device):
            self._cuda.ask("unreserve", device, "cuMemAddressFree", address, nbytes)
            self._state.reserved.pop(address, None)

    def create(self, device: int, nbytes: int) -> int:
        with self._cuda.current("create", device):
            self._check_size("create", device, nbytes)
            handle = int(self._cuda.ask("create", device, "cuMemCreate", nbytes, self._properties(device), 0))
            self._state.handles[handle] = _Memory(device, nbytes)
            return handle

    def _memory(self, call: str, device: int, handle: int) -> _Memory:
        found = self._state.handles.get(handle)
        if found is None:  # the driver would take it for a pointer
            raise DeviceError(call, CudaCode.INVALID_HANDLE, device, False, f"there is no memory {handle}")
        return found

    def map(self, device: int, address: int, handle: int, nbytes: int, writable: bool) -> bool:
        with self._cuda.current("map", device):
            memory = self._memory("map", device, handle)
            if nbytes != memory.nbytes:
                reason = f"the memory has {memory.nbytes} bytes, not {nbytes}"
                raise DeviceError("map", CudaCode.INVALID_VALUE, device, False, reason)
            if memory.device not in {device, -1} and not self._reaches(device, memory.device):
                reason = f"GPU {device} does not reach the memory of GPU {memory.device}"
                raise DeviceError("map", CudaCode.PEER_ACCESS_UNSUPPORTED, device, False, reason)
            self._cuda.ask("map", device, "cuMemMap", address, nbytes, 0, handle, 0)
            try:
                readonly = self._allow(device, address, memory, writable)
            except DeviceError:
                self._api.cuMemUnmap(address, nbytes)
                raise
            self._state.mapped[address] = memory
            return readonly

    def _allow(self, device: int, address: int, memory: _Memory, writable: bool) -> bool:
        """Let the GPUs that reach it use mapped memory. Returns whether they may not write: CUDA may refuse to map
        memory of a GPU without write access."""
        flags = self._api.CUmemAccess_flags
        if not writable:
            try:
                self._set_access(device, address, memory, flags.CU_MEM_ACCESS_FLAGS_PROT_READ)
            except DeviceError as error:
                if error.code not in {CudaCode.INVALID_VALUE, CudaCode.NOT_SUPPORTED}:
                    raise
            else:
                return True
        self._set_access(device, address, memory, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return False

    def _set_access(self, device: int, address: int, memory: _Memory, flags: Any) -> None:
        wanted = []
        for index in range(len(self._cuda.devices)):
            if index in {device, memory.device} or (memory.device >= 0 and self._reaches(index, memory.device)):
                access = self._api.CUmemAccessDesc()
                self._cuda.locate(access.location, index)
                access.flags = flags
                wanted.append(access)
        self._cuda.ask("map", device, "cuMemSetAccess", address, memory.nbytes, wanted, len(wanted))

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        with self._cuda.current("unmap", device):
            self._cuda.ask("unmap", device, "cuMemUnmap", address, nbytes)
            self._state.mapped.pop(address, None)

    def release(self, device: int, handle: int) -> None:
        with self._cuda.current("release", device):
            self._memory("release", device, handle)
            self._cuda.ask("release", device, "cuMemRelease", handle)
            del self._state.handles[handle]

    def export(self, device: int, address: int, nbytes: int) -> int:
        with self._cuda.current("export", device):
            memory = self._state.mapped.get(address)
            if not self.exports or (memory is not None and not memory.is_ours):
                reason = "it is another process's memory" if self.exports else "the GPU exports no memory"
                raise DeviceError("export", CudaCode.NOT_SUPPORTED, device, False, reason)
            handle = self._cuda.ask("export", device, "cuMemRetainAllocationHandle", address)
            try:
                descriptors = self._descriptors
                return int(self._cuda.ask("export", device, "cuMemExportToShareableHandle", handle, descriptors, 0))
            finally:
                self._api.cuMemRelease(handle)

    def import_(self, device: int, fd: int, nbytes: int, uuid: str) -> int:
        with self._cuda.current("import_", device):
            self._check_size("import_", device, nbytes)
            try:
                made = self._cuda.ask("import_", device, "cuMemImportFromShareableHandle", fd, self._descriptors)
            except DeviceError as error:
                if error.fatal or error.code == CudaCode.OUT_OF_MEMORY:
                    raise
                raise DeviceError("import_", CudaCode.INVALID_VALUE, device, False, error.reason) from error
            owner = next((each.index for each in self._facts if each.uuid == uuid), -1)
            self._state.handles[int(made)] = _Memory(owner, nbytes, is_ours=False)
            return int(made)

    def copy(
        self,
        device: int,
        destination: int,
        source: int,
        rows: int,
        row_nbytes: int,
        strides: tuple[int, int],
        stream: int,
    ) -> None:
        with self._cuda.current("copy", device):
            if rows < 0 or row_nbytes < 0 or (rows > 1 and min(strides) < row_nbytes):
                reason = f"{rows} rows of {row_nbytes} bytes, {strides} bytes apart"
                raise DeviceError("copy", CudaCode.INVALID_VALUE, device, False, reason)
            stream = self._stream("copy", device, stream)
            if not rows or not row_nbytes:
                return
            if rows == 1 or strides == (row_nbytes, row_nbytes):
                self._cuda.ask("copy", device, "cuMemcpyAsync", destination, source, rows * row_nbytes, stream)
            elif max(strides) <= self._pitches[device]:
                plan = self._api.CUDA_MEMCPY2D()
                plan.srcMemoryType = plan.dstMemoryType = self._api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                plan.srcDevice, plan.dstDevice = source, destination
                plan.dstPitch, plan.srcPitch = strides
                plan.WidthInBytes, plan.Height = row_nbytes, rows
                self._cuda.ask("copy", device, "cuMemcpy2DAsync", plan, stream)
            else:
                for row in range(rows):
                    into, out = destination + row * strides[0], source + row * strides[1]
                    self._cuda.ask("copy", device, "cuMemcpyAsync", into, out, row_nbytes, stream)

    def fill(self, device: int, address: int, pattern: bytes, count: int, stream: int) -> None:
        with self._cuda.current("fill", device):
            width = len(pattern)
            if width not in PATTERNS or count < 0 or address % min(width, 4):
                reason = f"a pattern of {width} bytes, {count} times at {address:#x}"
                raise DeviceError("fill", CudaCode.INVALID_VALUE, device, False, reason)
            stream = self._stream("fill", device, stream)
            if not count:
                return
            part = min(width, 4)
            words = [int.from_bytes(pattern[at : at + part], "little") for at in range(0, width, part)]
            if len(set(words)) == 1:
                name = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}[part]
                self._cuda.ask("fill", device, name, address, words[0], count * len(words), stream)
                return
            for number, word in enumerate(words):  # each word of the pattern is a column
                at = address + 4 * number
                self._cuda.ask("fill", device, "cuMemsetD2D32Async", at, width, word, 1, count, stream)

    def pin(self, address: int, nbytes: int) -> None:
        with self._cuda.somewhere("pin"):
            if not address or nbytes <= 0:
                raise DeviceError("pin", CudaCode.INVALID_VALUE, -1, False, f"{nbytes} bytes at {address:#x}")
            self._cuda.ask("pin", -1, "cuMemHostRegister", address, nbytes, self._api.CU_MEMHOSTREGISTER_PORTABLE)

    def unpin(self, address: int, nbytes: int) -> None:
        with self._cuda.somewhere("unpin"):
            if not address or nbytes <= 0:
                raise DeviceError("unpin", CudaCode.INVALID_VALUE, -1, False, f"{nbytes} bytes at {address:#x}")
            self._cuda.ask("unpin", -1, "cuMemHostUnregister", address)

    def dma_buf(self, device: int, address: int, nbytes: int) -> int:
        with self._cuda.current("dma_buf", device):
            if not self.exports_to_cards:
                reason = "the GPU does not export memory to network cards"
                raise DeviceError("dma_buf", CudaCode.NOT_SUPPORTED, device, False, reason)
            if address % PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes <= 0:
                reason = f"{nbytes} bytes at {address:#x} are no whole pages of the host"
                raise DeviceError("dma_buf", CudaCode.INVALID_VALUE, device, False, reason)
            kind = self._api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
            return int(self._cuda.ask("dma_buf", device, "cuMemGetHandleForAddressRange", address, nbytes, kind, 0))

    def flush(self, device: int) -> None:
        with self._cuda.current("flush", device):
            if not self.exports_to_cards:
                reason = "no network card writes to this GPU's memory"
                raise DeviceError("flush", CudaCode.NOT_SUPPORTED, device, False, reason)
            # Another GPU may read what was written here, so the order has to hold for all of them.
            scope = self._api.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES
            if self._cuda.attribute(device, "GPU_DIRECT_RDMA_WRITES_ORDERING") >= int(scope):
                return
            by_host = self._api.CUflushGPUDirectRDMAWritesOptions.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
            if not self._cuda.attribute(device, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & int(by_host):
                reason = "the driver does not order writes of network cards, and has no call for it"
                raise DeviceError("flush", CudaCode.NOT_SUPPORTED, device, False, reason)
            target = self._api.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
            self._cuda.ask("flush", device, "cuFlushGPUDirectRDMAWrites", target, scope)

    def owner_of(self, pointer: int) -> tuple[int, int, int] | None:
        for address, memory in list(self._state.mapped.items()):
            if address <= pointer < address + memory.nbytes:
                return memory.device, address, memory.nbytes
        attributes = self._api.CUpointer_attribute
        with self._cuda.somewhere("owner_of"):
            code, kind = self._api.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer)
            if code or kind != self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE:
                return None
            ordinal = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            device = int(self._cuda.ask("owner_of", -1, "cuPointerGetAttribute", ordinal, pointer))
            address, nbytes = self._cuda.ask("owner_of", device, "cuMemGetAddressRange", pointer)
            return device, int(address), int(nbytes)

    # ---- order

    def _stream(self, call: str, device: int, stream: int) -> int:
        """The stream as CUDA takes it, for which 0 may be the default stream of the thread. One of another library is
        taken as it is."""
        owner = self._state.streams.get(stream, device)
        if owner != device or stream < 0 or (stream % 8 and stream not in {LEGACY_STREAM, THREAD_STREAM}):
            reason = f"{stream} is no stream of GPU {device}"  # CUDA would take it for a pointer
            raise DeviceError(call, CudaCode.INVALID_HANDLE, device, False, reason)
        stream = stream or LEGACY_STREAM
        self._cuda.check_not_captured(call, device, stream)
        return stream

    def stream(self, device: int) -> int:
        with self._cuda.current("stream", device):
            beside = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
            made = int(self._cuda.ask("stream", device, "cuStreamCreate", beside))
            self._state.streams[made] = device
            return made

    def idle(self, device: int, stream: int) -> bool:
        with self._cuda.current("idle", device):
            stream = self._stream("idle", device, stream)
            return self._cuda.is_ready("idle", device, "cuStreamQuery", stream)

    def end_stream(self, device: int, stream: int) -> None:
        with self._cuda.current("end_stream", device):
            if self._state.streams.get(stream) != device:
                reason = f"{stream} is no stream that was made for GPU {device}"
                raise DeviceError("end_stream", CudaCode.INVALID_HANDLE, device, False, reason)
            self._cuda.ask("end_stream", device, "cuStreamDestroy", stream)
            del self._state.streams[stream]

    def event(self, device: int) -> int:
        with self._cuda.current("event", device):
            made = self._cuda.make_event("event", device)
            self._state.events[made] = device
            return made

    def _check_event(self, event: int, device: int | None = None) -> None:
        """Check that an event was made here, for that GPU where one is given."""
        found = self._state.events.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        if device not in {None, found}:
            raise Refused(CudaCode.INVALID_HANDLE, f"{event} is no event that was made for GPU {device}")

    def end_event(self, device: int, event: int) -> None:
        with self._cuda.current("end_event", device):
            if event < 0:
                self._flags().end(event)
                return
            self._check_event(event)
            self._cuda.ask("end_event", device, "cuEventDestroy", event)
            del self._state.events[event]
            self._forget(event)

    def _flags(self) -> CudaFlags:
        flags = self._state.flags
        if flags is None:
            raise Refused(CudaCode.NOT_SUPPORTED, "events are not shared between processes")
        return flags

    def _forget(self, event: int) -> None:
        if self._state.flags is not None:
            self._state.flags.forget(event)

    def record(self, device: int, event: int, stream: int) -> None:
        with self._cuda.current("record", device):
            stream = self._stream("record", device, stream)
            self._check_event(event, device)
            self._cuda.ask("record", device, "cuEventRecord", event, stream)
            self._forget(event)

    def record_all(self, device: int, event: int) -> None:
        with self._cuda.current("record_all", device):
            self._check_event(event, device)
            self._cuda.record_all(device, event)
            self._forget(event)

    def done(self, device: int, event: int) -> bool:
        with self._cuda.named("done", device):
            if event < 0:
                return self._flags().done(device, event)
            self._check_event(event)
            with self._cuda.current("done", device):
                return self._cuda.is_ready("done", device, "cuEventQuery", event)

    def wait(self, device: int, stream: int, event: int) -> None:
        with self._cuda.current("wait", device):
            stream = self._stream("wait", device, stream)
            if event < 0:
                self._flags().wait(device, event, stream)
            else:
                self._check_event(event)
                self._cuda.ask("wait", device, "cuStreamWaitEvent", stream, event, 0)

    def event_page(self) -> int:
        with self._cuda.named("event_page", 0):
            return self._flags().page()

    def add_event_page(self, fd: int, process: int) -> None:
        with self._cuda.named("add_event_page", 0):
            self._flags().add_page(fd, process)

    def promise_event(self, device: int) -> int:
        with self._cuda.current("promise_event", device):
            return self._flags().promise()

    def keep_promise(self, device: int, event: int, done: bool) -> None:
        with self._cuda.named("keep_promise", device):
            self._flags().keep(event, done=done)

    def export_event(self, device: int, event: int) -> bytes:
        with self._cuda.current("export_event", device):
            flags = self._flags()
            if event >= 0:
                self._check_event(event)
            return flags.export(device, event)

    def lose_events(self) -> None:
        self._cuda.check_process()
        if self.shared_events:
            self._flags().lose()

    def open_event(self, device: int, exported: bytes) -> int:
        with self._cuda.current("open_event", device):
            return self._flags().open(exported)

    def event_is_lost(self, device: int, event: int) -> bool:
        with self._cuda.named("event_is_lost", device):
            return event < 0 and self._flags().is_lost(event)


_left: Final[list[_State]] = []
"""The states of drivers that have ended while a capture hid whether their work has ended, which may use GPU memory and
pages of events. The end of a later driver tries again."""


def _end(state: _State) -> None:
    states = [state]
    with contextlib.suppress(IndexError):  # another thread may take some
        while True:
            states.append(_left.pop())
    for each in states:
        if os.getpid() == each.cuda.pid:  # a forked child has no part in it
            with each.cuda.relaxed("close", -1):
                if _has_ended(each.cuda):
                    _give_back(each)
                else:
                    _left.append(each)


def _has_ended(cuda: CudaCalls) -> bool:
    """Wait for all work on all GPUs. Returns whether it has ended: while a thread captures, CUDA refuses to wait."""
    ended = True
    for device, context in cuda.contexts.items():
        cuda.api.cuCtxPushCurrent(context)
        try:
            cuda.ask("close", device, "cuCtxSynchronize")
        except DeviceError as error:  # a broken context does no work any more
            ended = ended and error.fatal
        cuda.api.cuCtxPopCurrent()
    return ended


def _give_back(state: _State) -> None:
    cuda, api = state.cuda, state.cuda.api
    for device, context in cuda.contexts.items():
        api.cuCtxPushCurrent(context)
        for stream in [each for each, index in state.streams.items() if index == device]:
            api.cuStreamDestroy(stream)
        api.cuCtxPopCurrent()
    if cuda.contexts:
        api.cuCtxPushCurrent(next(iter(cuda.contexts.values())))
        for event in state.events:
            api.cuEventDestroy(event)
        if state.flags is not None:
            state.flags.close()
        api.cuCtxPopCurrent()
    for address, memory in state.mapped.items():
        api.cuMemUnmap(address, memory.nbytes)
    for handle in state.handles:
        api.cuMemRelease(handle)
    for address, nbytes in state.reserved.items():
        api.cuMemAddressFree(address, nbytes)
    for device in cuda.contexts:
        api.cuDevicePrimaryCtxRelease(cuda.devices[device])
