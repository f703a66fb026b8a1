"""The memory of one process on one GPU: extents, each with a best fit of its own, that peers import by name.

An extent is 64 MiB, or as large as the object that it was made for. Objects lie in one extent each, as a network card
registers one extent at a time. Places in the arena are offsets that are never used for another extent. So a peer that
has imported an extent cannot take it for a later one.

Freed bytes may still be in use on a stream. They are handed out at once, together with the moments after which the new
owner's work may begin: the GPU waits, and nobody on the host.
"""

from __future__ import annotations

import gc
import os
import threading
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from weakref import WeakSet

from zcactor.device.driver import CudaCode
from zcactor.device.events import Moment, pending
from zcactor.device.work import Work, moments_of
from zcactor.errors import DeviceError, ForkedProcess, OutOfMemory
from zcactor.objectstore.heap import Heap

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zcactor.device.driver import GpuDriver

__all__ = ["ALIGNMENT", "EXTENT_NBYTES", "Card", "DeviceArena", "ExportedExtent", "Placed"]

ALIGNMENT: Final = 256
"""Bytes to which objects are aligned, as cudaMalloc aligns them."""
EXTENT_NBYTES: Final = 64 << 20
"""Bytes of an extent: making one takes about a millisecond, so it is to serve many objects."""


_collecting = 0
"""The identifier of the thread in which the garbage collector runs; 0 while it does not run."""


def _note(phase: str, _: dict[str, int]) -> None:
    """Note the thread in which the garbage collector begins, or that it has ended; see `gc.callbacks`."""
    global _collecting
    _collecting = threading.get_ident() if phase == "start" else 0


gc.callbacks.append(_note)


class Placed(NamedTuple):
    """A new place for an object."""

    offset: int
    address: int
    after: list[Moment]
    """The last work on the bytes under their former owners, where it is not known to be done."""


class ExportedExtent(NamedTuple):
    """An extent as peers import it."""

    offset: int
    nbytes: int
    fd: int
    """A descriptor, which belongs to the caller."""


class Card(Protocol):
    """A network card that reads and writes memory of GPUs."""

    def forget(self, key: int) -> None:
        """Deregister the extent at an address, if it is registered, before it is unmapped. Any thread calls this."""


@dataclass(slots=True, eq=False)
class _Extent:
    offset: int
    nbytes: int
    address: int
    heap: Heap
    is_ours: bool = True
    """Whether objects may lie in it: it was made here, or taken back."""
    is_apart: bool = False
    """Whether it has addresses of its own, which were reserved for it."""
    readers: set[bytes] = field(default_factory=set)
    """The processes to which it was exported."""
    used_by: list[tuple[int, int, list[Moment]]] = field(default_factory=list)
    """Freed bytes, from where to where, with the work that may still use them."""


class DeviceArena:
    """The arena. Any thread may use it.

    Args:
        driver: the driver.
        device: the GPU.
        capacity: bytes that all extents may have; None for what the GPU has.
        keep_nbytes: bytes of extents without objects that are kept for later; more goes back to the GPU.
    """

    def __init__(self, driver: GpuDriver, device: int, capacity: int | None, keep_nbytes: int) -> None:
        self._driver: Final = driver
        self._device: Final = device
        self._total: Final = driver.devices()[device].total
        self._capacity: Final = self._total if capacity is None else capacity
        self._limited: Final = capacity is not None
        self._keep_nbytes: Final = keep_nbytes
        self._lock: Final = threading.Lock()
        self._freed: deque[tuple[int, list[Moment] | Work]] = deque()
        self._extents: list[_Extent] = []
        """All extents, in the order of their offsets."""
        self._handles: list[int] = []
        """Handles that are to be released."""
        self._next = 0
        self._pid: Final = os.getpid()
        self._reservations: list[tuple[int, int]] = []
        self._cards: Final[WeakSet[Card]] = WeakSet()
        self.beside: Callable[[int, bool], int] = _alone
        """Called, under a lock, with the bytes of the extents that were made here, and whether others are to give back
        extents without objects; returns the bytes that these have made within the same capacity."""
        self.take_back: Callable[[int, int], bool] = _refuse
        """Called, under a lock, with the address of an extent that was adopted, and the bytes that are kept. Returns
        whether nothing lies in it any more: then it is as if it had been made here."""
        self.on_gone: Callable[[int, set[bytes]], None] = _nothing
        """Called, under a lock and by any thread, with the offset of each extent that was given back, and the processes
        that may have it mapped."""
        self.on_freed: Callable[[], None] = _nothing
        """Called after each `give_back`, perhaps in a finalizer; it is to see to it that `tidy` is called soon."""

    @property
    def used(self) -> int:
        """Bytes of all objects, each rounded up to `ALIGNMENT`."""
        with self._lock:
            self._settle()
            return sum(extent.heap.used for extent in self._extents)

    @property
    def taken(self) -> int:
        """Bytes of all extents."""
        return sum(extent.nbytes for extent in tuple(self._extents))

    def allocate(self, nbytes: int) -> Placed:
        """Find a place for an object, in the extent in which it fits best.

        Args:
            nbytes: bytes, 0 allowed.

        Raises:
            OutOfMemory: the GPU, or the capacity, has no room. Extents without objects were given back before.
            DeviceError: the driver fails in another way.
            ForkedProcess: this is a forked child of the process that has made the arena.
        """
        if os.getpid() != self._pid:  # before the lock, which another thread may have had at the fork
            raise ForkedProcess("a forked process cannot use the GPUs of its parent: start it by spawn")
        size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if _collecting == threading.get_ident():
            extent = self._add_apart(size)
            return Placed(extent.offset, extent.address, [])
        with self._lock:
            self._settle()
            fitting = [(extent.heap.largest_free, extent.offset, extent) for extent in self._extents]
            fitting = [each for each in fitting if each[0] >= size]
            extent = min(fitting)[2] if fitting else self._grow(size)
            inside = extent.heap.allocate(size, ALIGNMENT)
            low, high, after = inside, inside + size, list[Moment]()
            for start, end, moments in extent.used_by:
                if start < high and low < end:
                    after += moments
            return Placed(extent.offset + inside, extent.address + inside, pending(after))

    def give_back(self, offset: int, after: list[Moment] | Work) -> None:
        """Free an object after some work. It runs in finalizers, so it takes no lock."""
        self._freed.append((offset, after))
        self.on_freed()

    def _settle(self) -> None:
        """Free what was given back. Called under the lock."""
        for _ in range(len(self._freed)):
            offset, after = self._freed[0]
            extent = self._around(offset)
            try:
                waiting = pending(moments_of(after))
                extent.used_by = [each for each in extent.used_by if pending(each[2])]
            except DeviceError as error:
                if not error.fatal:  # the driver is asked again
                    self._freed.rotate(-1)
                    continue
                waiting = []  # a broken context does no work any more
                extent.used_by.clear()
            self._freed.popleft()
            inside, before = offset - extent.offset, extent.heap.used
            extent.heap.free(inside)
            if waiting:
                extent.used_by.append((inside, inside + before - extent.heap.used, waiting))

    def _around(self, offset: int) -> _Extent:
        return self._extents[bisect_right(self._extents, offset, key=lambda each: each.offset) - 1]

    def around(self, address: int) -> int:
        """The offset of the object that an address lies in; -1 where there is none. It takes no lock: a finalizer may
        pass an array."""
        for extent in tuple(self._extents):
            if extent.address <= address < extent.address + extent.nbytes:
                inside = extent.heap.around(address - extent.address)
                return extent.offset + inside if inside >= 0 else -1
        return -1

    def add_card(self, card: Card) -> None:
        """Let a network card forget extents before they are unmapped, as long as somebody has it. Idempotent."""
        with self._lock:
            self._cards.add(card)

    def extent_around(self, address: int) -> tuple[int, int]:
        """Address and bytes of the extent that an object's address is in.

        Raises:
            LookupError: there is no such extent.
        """
        for extent in tuple(self._extents):
            if extent.address <= address < extent.address + extent.nbytes:
                return extent.address, extent.nbytes
        raise LookupError(f"{address:#x} is in no extent")

    # ---- extents

    def _grow(self, size: int) -> _Extent:
        step = self._driver.granularity
        least = -(-size // step) * step
        room = self._room()
        wanted = max(least, min(EXTENT_NBYTES, room // step * step))
        sizes = [wanted] if wanted == least else [wanted, least]
        for nbytes in (*sizes, *sizes):
            if nbytes <= self._room():
                try:
                    return self._add(nbytes)
                except DeviceError as error:
                    if error.code != CudaCode.OUT_OF_MEMORY:
                        raise
                    refused: DeviceError | None = error
            else:
                refused = None
            self._trim(0)
        raise self._full(size, refused) from refused

    def _full(self, size: int, refused: DeviceError | None) -> OutOfMemory:
        extents = self._extents
        used = sum(extent.heap.used for extent in extents)
        largest = max((extent.heap.largest_free for extent in extents), default=0)
        limit = f"device_capacity is {self._capacity:,} bytes" if self._limited else f"it has {self._total:,} bytes"
        why = refused.reason if refused is not None else limit
        return OutOfMemory(size, used, self._capacity, largest, f"GPU {self._device}: {why}", "device_capacity")

    def _add_apart(self, size: int) -> _Extent:
        """Make an extent for one object, of a finalizer that the garbage collector runs. This thread, or one that waits
        for it, may be in the midst of another call here. So this takes no lock, and touches no other extent."""
        driver, device, step = self._driver, self._device, self._driver.granularity
        nbytes = -(-size // step) * step
        if nbytes > self._room():
            raise self._full(size, None)
        heap = _heap(nbytes)
        heap.allocate(size, ALIGNMENT)
        address = driver.reserve(device, nbytes)
        try:
            handle = driver.create(device, nbytes)
            try:
                driver.map(device, address, handle, nbytes, True)
            finally:
                driver.release(device, handle)
        except DeviceError as error:
            driver.unreserve(device, address, nbytes)
            if error.code != CudaCode.OUT_OF_MEMORY:
                raise
            raise self._full(size, error) from error
        return self._append(_Extent(-1, nbytes, address, heap, is_apart=True))

    def _append(self, extent: _Extent) -> _Extent:
        # Nothing between these two steps lets the garbage collector run, or another thread.
        extent.offset, self._next = self._next, self._next + extent.nbytes
        self._extents.append(extent)
        return extent

    def _add(self, nbytes: int) -> _Extent:
        driver, device = self._driver, self._device
        address = self._place(nbytes)
        handle = driver.create(device, nbytes)
        try:
            heap = _heap(nbytes)
            driver.map(device, address, handle, nbytes, True)
        except (DeviceError, MemoryError):
            self._handles.append(handle)
            self._release()
            raise
        self._handles.append(handle)  # the memory lives on while it is mapped
        extent = self._append(_Extent(-1, nbytes, address, heap))
        self._room()
        return extent

    def adopt(self, address: int, nbytes: int) -> int:
        """Take over an extent that was made and mapped elsewhere: all of it is in use until `take_back`. Peers import
        it like any other.

        Args:
            address: its address.
            nbytes: its bytes.

        Returns:
            Its offset in the arena.
        """
        heap = _heap(nbytes)
        heap.allocate(nbytes, ALIGNMENT)
        with self._lock:
            return self._append(_Extent(-1, nbytes, address, heap, is_ours=False, is_apart=True)).offset

    def _room(self, *, all_back: bool = False) -> int:
        """Bytes that the capacity leaves, with `all_back` once others have given back what they do not need. They hear
        of the bytes that were made here."""
        ours = sum(extent.nbytes for extent in self._extents if extent.is_ours)
        return self._capacity - ours - self.beside(ours, all_back)

    def _place(self, nbytes: int) -> int:
        """Addresses of a reservation that no extent has: the first that are enough."""
        taken = sorted((extent.address, extent.nbytes) for extent in self._extents)
        for base, reserved in self._reservations:
            at = base
            for start, length in taken:
                if not base <= start < base + reserved:
                    continue
                if start - at >= nbytes:
                    break
                at = start + length
            if base + reserved - at >= nbytes:
                return at
        step = self._driver.granularity
        reserved = max(nbytes, -(-self._total // step) * step)
        base = self._driver.reserve(self._device, reserved)
        self._reservations.append((base, reserved))
        return base

    def tidy(self) -> bool:
        """Free what was given back, and give extents without objects back to the GPU above `keep_nbytes`.

        Returns:
            Whether there is more to give back, once work is done that still uses it.

        Raises:
            DeviceError: the driver fails, or the GPU's context is broken.
        """
        with self._lock:
            self._settle()
            more = self._trim(self._keep_nbytes) or bool(self._freed)
            is_used = bool(self._reservations)
        if is_used:  # work that broke the context may have left no event to ask
            try:
                self._driver.idle(self._device, 0)
            except DeviceError as error:
                if error.fatal:
                    raise
        return more

    def _trim(self, keep: int) -> bool:
        for extent in self._extents:
            if not extent.is_ours and self.take_back(extent.address, keep):
                extent.is_ours = True
                extent.heap.free(0)
        idle = [extent for extent in self._extents if not extent.heap.used]
        kept = sum(extent.nbytes for extent in idle)
        waits = False
        for extent in reversed(idle):
            if kept <= keep:
                break
            if any(pending(moments) for _, _, moments in extent.used_by):
                waits = True
                continue
            self._unmap(extent)
            kept -= extent.nbytes
        self._release()
        self._room(all_back=not keep)
        return waits

    def _unmap(self, extent: _Extent) -> None:
        for card in tuple(self._cards):
            card.forget(extent.address)
        self._driver.unmap(self._device, extent.address, extent.nbytes)
        self._extents.remove(extent)
        if extent.readers:
            self.on_gone(extent.offset, extent.readers)
        if extent.is_apart:
            self._driver.unreserve(self._device, extent.address, extent.nbytes)

    def _release(self) -> None:
        while self._handles:
            self._driver.release(self._device, self._handles[-1])
            self._handles.pop()

    def exports(self, offsets: Collection[int], reader: bytes) -> list[ExportedExtent]:
        """Export the extents around offsets to a process.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where memory cannot leave the process.
        """
        made: list[ExportedExtent] = []
        with self._lock:
            wanted = [each for each in self._extents if any(0 <= at - each.offset < each.nbytes for at in offsets)]
            try:
                for extent in wanted:
                    fd = self._driver.export(self._device, extent.address, extent.nbytes)
                    made.append(ExportedExtent(extent.offset, extent.nbytes, fd))
                    extent.readers.add(reader)
            except DeviceError:
                for each in made:
                    os.close(each.fd)
                raise
        return made


def _heap(nbytes: int) -> Heap:
    """The free bytes of an extent."""
    heap = Heap(-1, 0)
    heap.grow(0, nbytes)
    return heap


def _alone(_: int, __: bool) -> int:
    """The bytes that others have made: none."""
    return 0


def _refuse(_: int, __: int) -> bool:
    """Take no extent back: none was adopted."""
    return False


def _nothing(*_: object) -> None:
    """Do nothing: nobody wants to know."""
