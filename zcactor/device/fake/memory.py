"""The memory of the fake GPUs of one process: reservations, extents, and which of these are mapped where.

A reservation is twice in the address space: at the addresses that programs see, which nothing can access, and at the
engine's, into which extents are mapped. So a device pointer becomes one of the engine by an addition.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zcactor.device.driver import PAGE_NBYTES, CudaCode, Refused
from zcactor.device.fake import system
from zcactor.device.sealed import sealed_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.fake.options import FakeOptions

__all__ = ["GRANULARITY", "FakeMemory"]

GRANULARITY: Final = 2 << 20
"""Bytes, as of today's GPUs."""


@dataclass(slots=True)
class _Extent:
    """Memory of one handle."""

    number: int
    """The number of the GPU, among those of the host."""
    fd: int
    nbytes: int
    own: bool
    """Whether it was allocated here."""
    released: bool = False
    mapped: int = 0


@dataclass(slots=True)
class _Range:
    """An extent at its addresses."""

    address: int
    end: int
    extent: _Extent
    writable: bool
    shift: int
    """The distance to the engine's addresses."""


@dataclass(slots=True, eq=False)
class _Pinned:
    """Pinned memory of the host."""

    address: int
    nbytes: int
    low: int
    """The beginning of its first page."""
    high: int
    """The end of its last page."""
    again: int | None
    """The address at which its pages are mapped again, as the GPUs go on using them; None for private memory."""


class FakeMemory:
    """The memory of all GPUs that one process sees. Any thread may use it.

    Args:
        options: the options of the fake.
    """

    def __init__(self, options: FakeOptions) -> None:
        self._options: Final = options
        self._lock: Final = threading.RLock()  # a finalizer that makes arrays may run inside it
        self._used = dict.fromkeys(range(options.devices), 0)
        self._handles: dict[int, _Extent] = {}
        self._next = 1
        self._contexts: dict[int, int] = {}
        """For each GPU that was used a descriptor of the memory of its context."""
        self._reservations: dict[int, tuple[int, int]] = {}
        """Bytes, and distance to the engine's addresses, by the first address."""
        self._ranges: dict[int, _Range] = {}
        """All that is mapped, by the first address."""
        self._starts: list[int] = []
        """These addresses in order. The list is replaced and never changed."""
        self._pinned: dict[int, _Pinned] = {}
        self.copied: Final[Counter[str]] = Counter()
        """Bytes of the host that were copied, as pinned memory and as other (``pageable``)."""

    def free(self, number: int) -> int:
        """Bytes that are not allocated."""
        host = self._options.host
        return self._options.memory - (system.taken(number, host) if host else self._used[number])

    def use(self, number: int) -> None:
        """Take the memory of a context, if this process has none on the GPU."""
        with self._lock:
            if number not in self._contexts and self._options.context:
                self._contexts[number] = self._allocated(number, self._options.context)

    def _allocated(self, number: int, nbytes: int) -> int:
        free = self.free(number)
        if nbytes > free:
            raise Refused(CudaCode.OUT_OF_MEMORY, f"{nbytes} bytes are wanted and {free} are free")
        fd = self._system(lambda size: system.extent(number, size, self._options.host), nbytes)
        self._used[number] += nbytes
        return fd

    # ---- addresses

    def reserve(self, nbytes: int) -> int:
        """See `zcactor.device.driver.GpuDriver`, as for all that follows; `number` is the GPU's among the host's."""
        _check_size(nbytes)
        with self._lock:
            address = self._system(system.reserved, nbytes)
            try:
                engine = self._system(system.reserved, nbytes)
            except Refused:
                system.unmapped(address, nbytes)
                raise
            self._reservations[address] = nbytes, engine - address
            return address

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give up a reservation."""
        with self._lock:
            known, shift = self._reservations.get(address, (0, 0))
            if known != nbytes or any(address <= each < address + nbytes for each in self._starts):
                raise Refused(CudaCode.INVALID_VALUE, f"{address:#x} is no empty reservation of {nbytes} bytes")
            del self._reservations[address]
            system.unmapped(address, nbytes)
            system.unmapped(address + shift, nbytes)

    @staticmethod
    def _system(call: Callable[[int], int], nbytes: int) -> int:
        try:
            return call(nbytes)
        except OSError as error:
            raise Refused(CudaCode.OUT_OF_MEMORY, f"the system refuses {nbytes} bytes: {error.strerror}") from error

    # ---- extents

    def create(self, number: int, nbytes: int) -> int:
        """Allocate memory."""
        _check_size(nbytes)
        with self._lock:
            return self._add(_Extent(number, self._allocated(number, nbytes), nbytes, own=True))

    def _add(self, extent: _Extent) -> int:
        handle, self._next = self._next, self._next + 1
        self._handles[handle] = extent
        return handle

    def _extent(self, handle: int) -> _Extent:
        extent = self._handles.get(handle)
        if extent is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no memory with the handle {handle}")
        return extent

    def map(self, number: int, address: int, handle: int, nbytes: int, writable: bool) -> bool:
        """Map an extent."""
        with self._lock:
            extent = self._extent(handle)
            if extent.number != number and self._options.peer == "none":
                raise Refused(CudaCode.PEER_ACCESS_UNSUPPORTED, f"GPU {number} cannot access GPU {extent.number}")
            base, (room, shift) = self._around(address)
            ranges = list(self._ranges.values())
            taken = any(each.address < address + nbytes and address < each.end for each in ranges)
            if nbytes != extent.nbytes or address + nbytes > base + room or (address - base) % GRANULARITY or taken:
                raise Refused(
                    CudaCode.INVALID_VALUE, f"{nbytes} bytes cannot be mapped at {address:#x}: it is not free, or "
                    f"in no reservation, or the extent has {extent.nbytes} bytes"
                )  # fmt: skip
            writable = writable or not self._options.readonly
            try:
                system.map_at(address + shift, nbytes, extent.fd, writable=writable)
            except OSError as error:
                raise Refused(CudaCode.INVALID_VALUE, f"the system refuses: {error.strerror}") from error
            self._ranges[address] = _Range(address, address + nbytes, extent, writable, shift)
            self._sort()
            extent.mapped += 1
            return not writable

    def _sort(self) -> None:
        while len(self._starts) != len(self._ranges):  # a finalizer may have mapped more meanwhile
            self._starts = sorted(self._ranges)

    def _around(self, address: int) -> tuple[int, tuple[int, int]]:
        for base, (nbytes, shift) in list(self._reservations.items()):
            if base <= address < base + nbytes:
                return base, (nbytes, shift)
        raise Refused(CudaCode.INVALID_VALUE, f"{address:#x} is in no reservation")

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo a mapping."""
        with self._lock:
            found = self._mapped(address, nbytes)
            del self._ranges[address]
            self._sort()
            system.anonymous(address + found.shift, nbytes)
            found.extent.mapped -= 1
            self._let_go(found.extent)

    def _mapped(self, address: int, nbytes: int) -> _Range:
        found = self._at(address)
        if found is None or (found.address, found.end) != (address, address + nbytes):
            raise Refused(CudaCode.INVALID_VALUE, f"{nbytes} bytes at {address:#x} are not a mapped extent")
        return found

    def release(self, handle: int) -> None:
        """Give up a handle."""
        with self._lock:
            extent = self._extent(handle)
            del self._handles[handle]
            extent.released = True
            self._let_go(extent)

    def _let_go(self, extent: _Extent) -> None:
        if extent.mapped or not extent.released:
            return
        if extent.own:
            self._used[extent.number] -= extent.nbytes
        os.close(extent.fd)

    def export(self, address: int, nbytes: int) -> int:
        """Export memory."""
        with self._lock:
            extent = self._mapped(address, nbytes).extent
            if self._options.export == "none" or not extent.own:
                reason = "this driver's memory" if extent.own else "memory of another process"
                raise Refused(CudaCode.NOT_SUPPORTED, f"{reason} cannot be exported")
            return os.dup(extent.fd)

    def import_(self, exported: int, nbytes: int) -> int:
        """Import memory."""
        try:
            fd = os.dup(exported)
        except OSError as error:
            raise Refused(CudaCode.INVALID_VALUE, f"{exported} is no descriptor") from error
        number = system.number_of(fd)
        if number not in self._used or sealed_size(fd) != nbytes:
            os.close(fd)
            raise Refused(CudaCode.INVALID_VALUE, f"this is no memory of a GPU of {nbytes} bytes")
        with self._lock:
            return self._add(_Extent(number, fd, nbytes, own=False))

    def dma_buf(self, address: int, nbytes: int) -> int:
        """A descriptor of the one extent with these bytes: the real call, too, returns one segment only."""
        if address % PAGE_NBYTES or nbytes % PAGE_NBYTES or nbytes <= 0:
            raise Refused(CudaCode.INVALID_VALUE, f"{nbytes} bytes at {address:#x} are no whole pages of the host")
        with self._lock:
            found = self._at(address)
            if not self._options.dmabuf or found is None or (found.address, found.end) != (address, address + nbytes):
                raise Refused(CudaCode.NOT_SUPPORTED, f"{nbytes} bytes at {address:#x} cannot be exported to a card")
            return os.dup(found.extent.fd)

    # ---- pointers

    def _at(self, address: int) -> _Range | None:
        starts = self._starts
        place = bisect_right(starts, address) - 1
        found = self._ranges[starts[place]] if place >= 0 else None
        return found if found is not None and address < found.end else None

    def owner_of(self, pointer: int) -> tuple[int, int, int] | None:
        """The number of the GPU, and the extent's address and bytes."""
        with self._lock:
            found = self._at(pointer)
            return None if found is None else (found.extent.number, found.address, found.end - found.address)

    def pin(self, address: int, nbytes: int) -> None:
        """Pin memory of the host."""
        if not address or nbytes <= 0:
            raise Refused(CudaCode.INVALID_VALUE, f"{nbytes} bytes at {address:#x}")
        low, high = address & -PAGE_NBYTES, (address + nbytes + PAGE_NBYTES - 1) & -PAGE_NBYTES
        with self._lock:
            if any(each.low < high and low < each.high for each in list(self._pinned.values())):
                raise Refused(CudaCode.ALREADY_PINNED, f"pages of {nbytes} bytes at {address:#x} are pinned")
            again = system.mapped_again(low, high - low)
            self._pinned[address] = _Pinned(address, nbytes, low, high, again)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._lock:
            found = self._pinned.pop(address, None)
            if found is None:
                raise Refused(CudaCode.NOT_PINNED, f"no pinned memory begins at {address:#x}")
            if found.again is not None:
                system.unmapped(found.again, found.high - found.low)

    def pinned(self, address: int, nbytes: int) -> _Pinned | None:
        """The pinned memory that bytes lie in, which a copy is to read or write; None for other bytes.

        Raises:
            Refused: with `CudaCode.INVALID_VALUE` where they lie across an end of pinned memory.
        """
        with self._lock:
            if self._is_device(address):
                return None
            for each in list(self._pinned.values()):
                low, high = each.address, each.address + each.nbytes
                if low <= address and address + nbytes <= high:
                    self.copied["pinned"] += nbytes
                    return each
                if low < address + nbytes and address < high:
                    raise Refused(
                        CudaCode.INVALID_VALUE, f"{nbytes} bytes at {address:#x} are pinned in part only"
                    )  # fmt: skip
            self.copied["pageable"] += nbytes
            return None

    def _is_device(self, address: int) -> bool:
        return any(base <= address < base + room for base, (room, _) in list(self._reservations.items()))

    def engines(
        self, number: int, address: int, nbytes: int, *, write: bool, pinned: _Pinned | None = None
    ) -> int:  # fmt: skip
        """The engine's pointer for bytes that a GPU is to read or write. Those of the host that are not pinned stay as
        they are.

        Raises:
            Refused: with `CudaCode.ILLEGAL_ADDRESS` where a byte is not mapped, may not be written, is out of the
                GPU's reach, or is not pinned any more.
        """
        with self._lock:
            if pinned is not None:
                if self._pinned.get(pinned.address) is not pinned:
                    raise Refused(CudaCode.ILLEGAL_ADDRESS, f"{address:#x} was unpinned before it was copied")
                return address if pinned.again is None else pinned.again + address - pinned.low
            if not self._is_device(address):
                return address
            at, shift = address, 0
            while at < address + nbytes:
                found = self._at(at)
                if found is None:
                    raise Refused(CudaCode.ILLEGAL_ADDRESS, f"nothing is mapped at {at:#x}")
                extent = found.extent
                if write and not found.writable:
                    raise Refused(CudaCode.ILLEGAL_ADDRESS, f"{at:#x} is mapped without write access")
                if extent.number != number and self._options.peer == "none":
                    raise Refused(CudaCode.ILLEGAL_ADDRESS, f"{at:#x} is out of reach of GPU {number}")
                at, shift = found.end, found.shift
            return address + shift

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        with self._lock:
            mapped = (one.extent for one in self._ranges.values())
            extents = {id(each): each for each in (*self._handles.values(), *mapped)}
            for fd in (*(each.fd for each in extents.values()), *self._contexts.values()):
                os.close(fd)
            for address, (nbytes, shift) in self._reservations.items():
                system.unmapped(address, nbytes)
                system.unmapped(address + shift, nbytes)
            for each in list(self._pinned):
                self.unpin(each)
            self._contexts.clear()
            self._handles.clear()
            self._ranges.clear()
            self._starts = []
            self._reservations.clear()
            self._used = dict.fromkeys(self._used, 0)


def _check_size(nbytes: int) -> None:
    if nbytes <= 0 or nbytes % GRANULARITY:
        raise Refused(CudaCode.INVALID_VALUE, f"{nbytes} bytes are not a multiple of {GRANULARITY}")
