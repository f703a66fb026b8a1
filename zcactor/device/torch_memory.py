"""PyTorch's memory from the store, so that tensors which PyTorch makes need no copy on their way.

PyTorch takes large pieces of memory by the C functions of `zcactor.device._torch`, and makes tensors in them itself. A
tensor that is passed becomes an object of the store for as long as somebody has it, and its bytes are PyTorch's again
afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections import deque
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from zcactor.device import _torch
from zcactor.device.arena import EXTENT_NBYTES
from zcactor.device.interchange import imported
from zcactor.device.memory import DeviceBlock
from zcactor.device.work import Work
from zcactor.errors import DeviceError, OutOfMemory

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    from zcactor.device.memory import GpuMemory

__all__ = ["ALLOCATE", "FREE", "TorchBlock", "TorchMemory", "allocates_for_torch"]

ALLOCATE, FREE = "zcactor_torch_alloc", "zcactor_torch_free"
"""Names of the C functions, in the file of `zcactor.device._torch`."""
_FUNCTIONS: Final = (
    "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess",
    "cuMemRelease", "cuStreamSynchronize", "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip
"""The functions of CUDA that make an extent and end it, in the order of `zcactor.device._torch.make_by`."""
_ACCESS: Final = struct.Struct("<iii")
"""CUmemAccessDesc: the location's type and number, flags."""
_DEVICE, _READ_WRITE = 1, 3
"""CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_numbers: Final = count(1)
_kept: Final[list[TorchMemory]] = []
"""All of them: PyTorch has pointers into their memory to the end of the process."""


class _StorageHold:
    """The holder of a tensor's bytes: it keeps them from PyTorch until the work that was queued on them is done."""

    __slots__ = ("gpu", "offset", "storage", "work")

    def __init__(self, gpu: GpuMemory, offset: int, storage: object) -> None:
        self.gpu: Final = gpu
        self.offset: Final = offset
        self.storage: Final = storage
        self.work: Final = Work()

    def __del__(self) -> None:
        work = self.work.left
        if work:
            self.gpu.tending.when_done(work, partial(_drop, self.storage))


def _drop(kept: object) -> None:
    """Keep an object up to now."""
    del kept


class TorchBlock(DeviceBlock):
    """The bytes of a tensor that PyTorch has made in the store, as an object of the store.

    Args:
        gpu: the memory.
        offset: the place in the arena.
        address: the address.
        nbytes: bytes of the storage.
        storage: PyTorch's storage.
    """

    __slots__ = ()

    def __init__(self, gpu: GpuMemory, offset: int, address: int, nbytes: int, storage: object) -> None:
        super().__init__(gpu, nbytes, (_StorageHold(gpu, offset, storage), address))


class TorchMemory:
    """The memory of PyTorch on the GPUs of one runtime.

    Args:
        gpus: the GPUs.
        capacity: bytes of each GPU that may be made without Python; None for what the GPU has.
        keep_nbytes: bytes of memory that PyTorch has freed and that are kept for it.
        loop: the loop on which extents are made ahead of need.
    """

    def __init__(
        self, gpus: Sequence[GpuMemory], capacity: int | None, keep_nbytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._gpus: Final = gpus
        self._capacity: Final = capacity
        self._keep_nbytes: Final = max(keep_nbytes, EXTENT_NBYTES)
        self._loop: Final = loop
        self.number: Final = next(_numbers)
        """The number of the memory, for `zcactor.device._torch`."""
        self._extents: dict[int, tuple[GpuMemory, int, DeviceBlock | None]] = {}
        """The GPU, the place in the arena and the block of each extent, by its address."""
        self._pools: dict[int, deque[Any]] = {}
        """Pools that nobody uses, by the GPU's index."""
        self._living: WeakValueDictionary[int, TorchBlock] = WeakValueDictionary()
        """The tensors that are objects of the store, by their addresses."""
        self._told: dict[int, int] = {}
        self._allocator: Any = None
        _kept.append(self)

    def use(self, gpu: GpuMemory) -> None:
        """Let PyTorch's memory on a GPU come from here, and have some ready.

        Raises:
            OutOfMemory: the GPU has no room.
            DeviceError: the driver refuses.
        """
        told = self._told.get(gpu.index)
        if told is None:
            told = self._told[gpu.index] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._loop.call_soon_threadsafe(self._loop.add_reader, told, self._grow_soon, gpu)
            _torch.use(gpu.index, self.number, told, EXTENT_NBYTES)
            if gpu.driver.kind == "cuda":
                self._make_by_cuda(gpu)
            else:
                self.grow(gpu)
        else:
            self.tidy()

    def grow(self, gpu: GpuMemory, nbytes: int = EXTENT_NBYTES) -> None:
        """Make an extent ahead of need.

        Raises:
            OutOfMemory: the GPU has no room.
            DeviceError: the driver refuses.
        """
        block = DeviceBlock(gpu, nbytes)
        gpu.blocks.pop(block.hold.offset, None)  # the tensors in it are the objects
        self._extents[block.address] = gpu, block.hold.offset, block
        _torch.add(self.number, gpu.index, block.address, nbytes)

    def close(self) -> None:
        """Make nothing ahead any more. The memory stays, as PyTorch has tensors in it. Idempotent."""
        while self._told:
            index, told = self._told.popitem()
            _torch.use(index, self.number, -1, EXTENT_NBYTES)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.remove_reader(told)
            os.close(told)

    def _grow_soon(self, gpu: GpuMemory) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._told[gpu.index])
        with contextlib.suppress(OutOfMemory, DeviceError):  # PyTorch raises its own error when it needs more
            self.grow(gpu)

    def tidy(self) -> None:
        """Give extents without tensors back to the store, above what is kept."""
        for address in _torch.take_idle(self.number, self._keep_nbytes):
            self._extents.pop(address, None)

    def _make_by_cuda(self, gpu: GpuMemory) -> None:
        """Let the C functions make extents by CUDA's, without Python."""
        library = ctypes.CDLL("libcuda.so.1")
        functions = tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS)
        driver: Any = gpu.driver
        properties = driver.allocation_properties(gpu.index)
        near = [each.index for each in self._gpus if gpu.driver.can_access(each.index, gpu.index)]
        access = b"".join(_ACCESS.pack(_DEVICE, index, _READ_WRITE) for index in near)
        total = gpu.driver.devices()[gpu.index].total if self._capacity is None else self._capacity
        step, keep = gpu.driver.granularity, self._keep_nbytes
        gpu.arena.beside, gpu.arena.take_back = partial(_torch.beside, gpu.index), self._take_back
        _torch.make_by(gpu.index, functions, properties, access, len(near), step, total, keep)
        gpu.arena.tidy()  # it tells of its extents

    def _take_back(self, address: int, keep: int) -> bool:
        """See `zcactor.device.arena.DeviceArena.take_back`."""
        taken = _torch.take(address, max(keep, self._keep_nbytes) if keep else 0)
        if taken:
            self._extents.pop(address, None)
        return taken

    def block_at(self, low: int, high: int, value: Any) -> TorchBlock | None:
        """The object that contains the addresses ``[low, high)`` of a tensor; None where PyTorch has it elsewhere.

        Args:
            low: the lowest address.
            high: the address after the highest.
            value: the tensor, or another library's array over the same bytes, which is kept as it is.
        """
        extent = self._extent_at(low)
        if extent is None:
            return None
        gpu, place, start = extent
        storage, first, nbytes = value, low, high - low
        if hasattr(type(value), "untyped_storage"):
            storage = value.untyped_storage()
            first, nbytes = storage.data_ptr(), storage.nbytes()
        block = self._living.get(first)
        if block is None or block.nbytes < nbytes:
            block = TorchBlock(gpu, place + first - start, first, nbytes, storage)
            self._living[first] = block
        return block if high <= block.address + block.nbytes else None

    def _extent_at(self, address: int) -> tuple[GpuMemory, int, int] | None:
        """The GPU, the place in its arena and the address of the extent around an address."""
        found = _torch.find(address)
        if found is None or found[0] != self.number:
            return None
        _, device, start, nbytes = found
        known = self._extents.get(start)
        if known is None:
            gpu = self._gpus[device]
            known = self._extents[start] = gpu, gpu.arena.adopt(start, nbytes), None
        return known[0], known[1], start

    @contextmanager
    def pool(self, torch: Any, index: int) -> Iterator[Any]:
        """Lend a ``torch.cuda.MemPool`` of a GPU, which is current in PyTorch: a pool is in use once at a time. They
        are kept for later blocks."""
        if self._allocator is None:
            self._allocator = torch.cuda.memory.CUDAPluggableAllocator(_torch.__file__, ALLOCATE, FREE)
        idle = self._pools.setdefault(index, deque())
        try:
            pool = idle.pop()
        except IndexError:
            pool = torch.cuda.MemPool(self._allocator.allocator())
        try:
            yield pool
        finally:
            idle.append(pool)


@contextmanager
def allocates_for_torch(memory: TorchMemory, gpus: Sequence[GpuMemory]) -> Iterator[None]:
    """Let PyTorch allocate in the store, in this thread, on the GPU that is current in PyTorch.

    Args:
        memory: the memory of PyTorch in this runtime.
        gpus: the GPUs of this process.

    Raises:
        ImportError: PyTorch is not installed.
        OutOfMemory: the GPU has no room.
        DeviceError: the driver refuses.
    """
    torch = imported("torch")
    index = torch.cuda.current_device()
    memory.use(gpus[index])
    with memory.pool(torch, index) as pool, torch.cuda.use_mem_pool(pool):
        yield
