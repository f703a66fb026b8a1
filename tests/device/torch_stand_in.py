"""A stand-in for PyTorch: its names for allocators and pools, and tensors without elements.

Like PyTorch it takes large pieces by the C functions, makes tensors in them, and keeps what tensors have left.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

__all__ = ["StandIn"]

SEGMENT_NBYTES = 2 << 20
"""Bytes of PyTorch's segments of small tensors."""


class Storage:
    """The bytes of tensors."""

    def __init__(self, free: list[int], address: int, nbytes: int) -> None:
        self._free = free
        self._address, self._nbytes = address, nbytes

    def data_ptr(self) -> int:
        """The address."""
        return self._address

    def nbytes(self) -> int:
        """The number of bytes."""
        return self._nbytes

    def __del__(self) -> None:
        self._free.append(self._address)


class Tensor:
    """A tensor of uint8 on the first GPU."""

    is_cuda, is_quantized, requires_grad = True, False, False
    layout, dtype, device = "strided", "torch.uint8", SimpleNamespace(index=0)

    def __init__(self, storage: Storage, first: int, nbytes: int) -> None:
        self._storage, self._first = storage, first
        self.shape = (nbytes,)
        self._base: Tensor | None = None
        self._version = 0

    def untyped_storage(self) -> Storage:
        """The bytes."""
        return self._storage

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._storage.data_ptr() + self._first

    def stride(self) -> tuple[int, ...]:
        """Elements from one to the next."""
        return (1,)

    def element_size(self) -> int:
        """Bytes of an element."""
        return 1

    def is_inference(self) -> bool:
        """Whether writes to it are not counted."""
        return False

    def is_conj(self) -> bool:
        """Whether it is a conjugate view."""
        return False

    is_neg = is_conj

    def part(self, first: int, nbytes: int) -> Tensor:
        """A view."""
        return Tensor(self._storage, self._first + first, nbytes)


Tensor.__module__ = "torch"


class Allocator:
    """``torch.cuda.memory.CUDAPluggableAllocator``."""

    def __init__(self, path: str, allocate: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.allocate, self.free = getattr(library, allocate), getattr(library, free)
        self.allocate.restype = ctypes.c_void_p
        self.allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocator(self) -> Allocator:
        """The C++ object."""
        return self


class Pool:
    """``torch.cuda.MemPool``: segments, and the places of tensors that have ended."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._free: dict[int, list[int]] = {}
        self._at = self._end = 0

    def take(self, nbytes: int) -> Storage:
        """Bytes for a tensor."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return Storage(free, free.pop(), nbytes)
        if self._at + nbytes > self._end:
            self._at = self._allocator.allocate(SEGMENT_NBYTES, 0, None)
            assert self._at
            self._end = self._at + SEGMENT_NBYTES
        self._at += nbytes
        return Storage(free, self._at - nbytes, nbytes)


class StandIn(SimpleNamespace):
    """The module."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: list[Pool] = []
        self.made = 0
        self.__spec__ = None
        self.strided, self.Tensor = "strided", Tensor
        self.cuda = SimpleNamespace(
            current_device=lambda: 0,
            memory=SimpleNamespace(CUDAPluggableAllocator=Allocator),
            MemPool=self._pool,
            use_mem_pool=self._use,
        )

    def _pool(self, allocator: Any) -> Pool:
        self.made += 1
        return Pool(allocator)

    @contextmanager
    def _use(self, pool: Pool) -> Iterator[None]:
        if pool in self.in_use:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.in_use.append(pool)
        try:
            yield
        finally:
            self.in_use.remove(pool)

    def empty(self, nbytes: int) -> Tensor:
        """A tensor of uint8, on the GPU."""
        storage = self.in_use[-1].take(nbytes) if self.in_use else Storage([], 1 << 60, nbytes)
        return Tensor(storage, 0, nbytes)
