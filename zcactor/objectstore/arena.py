"""The arena: all shared memory of one process, as one sparse anonymous file.

The file is a memfd (memfd_create(2)) with no name, so a killed process leaves nothing behind; peers get its descriptor
and map it read-only. It is sealed against shrinking and growing, so no access of theirs can end in SIGBUS.
F_SEAL_FUTURE_WRITE is not used: it forbids hole punching to the owner as well.

Its size is the capacity from the start; memory is taken only by `Arena.commit`. Everything that may fail for lack of
memory fails there, as an exception: a page fault that finds no memory would be a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Final

from zcactor.errors import OutOfMemory
from zcactor.objectstore.parallel import in_parallel
from zcactor.transport.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXTENT_NBYTES", "GRANULE_NBYTES", "Arena"]

EXTENT_NBYTES: Final = 64 << 20
"""Bytes in which an arena is handed out and registered with a network card: few registrations for a full arena, and
none of them so large that the first one is felt."""

GRANULE_NBYTES: Final = 2 << 20
"""Bytes in which memory is committed: a huge page. Small objects then cost a system call once in thousands."""

_CHUNK_NBYTES: Final = 16 << 20
"""Bytes per fallocate(2). A signal makes the kernel undo the call, which is then repeated: under a profiler's timer a
longer one might never end. 16 MiB take 3.5 ms; larger chunks were no faster."""

_MADV_REMOVE: Final = 9
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23  # <linux/mman.h>, since Linux 5.14

_NO_MEMORY: Final = frozenset((errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EFAULT))
"""How the system says that memory, the file system, a size limit or a quota is at its end; EFAULT is what
MADV_POPULATE_WRITE reports where an access would have been a SIGBUS (madvise(2))."""

# ctypes rather than the mmap module: it lets go of the interpreter lock during the call.
_madvise: Final = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Arena:
    """One process's shared memory. Making one is cheap: it maps address space and touches nothing.

    Args:
        capacity: bytes the arena can hold; rounded up to whole pages.
        extent_nbytes: bytes in which the arena should be handed out; rounded up to whole pages.
        fallocate: ``fallocate(fd, offset, nbytes)``, which takes memory or raises ``OSError``.

    Raises:
        OutOfMemory: the file may not be that large (RLIMIT_FSIZE) or the address space not (RLIMIT_AS).
        ValueError: `capacity` is not positive.
    """

    def __init__(
        self,
        capacity: int,
        extent_nbytes: int = EXTENT_NBYTES,
        *,
        fallocate: Callable[[int, int, int], None] = os.posix_fallocate,
    ) -> None:
        if capacity <= 0:
            raise ValueError(f"an arena of {capacity} bytes cannot hold anything; pass a capacity of at least 1 byte")
        nbytes = (capacity + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        self.nbytes: Final = nbytes
        """Bytes of the file and of the mapping."""
        self.extent_nbytes: Final = (extent_nbytes + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        self.fd = os.memfd_create("zcactor-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memfd; -1 once closed."""
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = Mapping(self.fd, nbytes, writable=True)
        except OSError as error:
            os.close(self.fd)
            self.fd = -1
            if error.errno not in _NO_MEMORY:
                raise
            note = f"the system refuses an arena of that size: {error.strerror}; see ulimit -f and ulimit -v"
            raise OutOfMemory(nbytes, 0, nbytes, 0, note) from error
        self.mapping: Mapping | None = mapping
        """What keeps the bytes mapped. Whoever hands out arrays over them holds it too; None once closed."""
        self.address: Final = mapping.address
        """Where the arena lies in this process."""
        self._fallocate = fallocate
        self._populate = True
        self._lock = threading.Lock()
        # Starts and stops of the committed ranges, sorted and apart. Replaced as a whole, so reading takes no lock.
        self._committed: tuple[list[int], list[int]] = ([], [])
        # Huge pages for the file where the system's policy for shared memory is "advise".
        if _madvise(self.address, nbytes, _MADV_HUGEPAGE) and ctypes.get_errno() != errno.EINVAL:
            code = ctypes.get_errno()  # EINVAL: this kernel has no transparent huge pages, and small ones will do
            self.close()
            raise OSError(code, f"madvise(MADV_HUGEPAGE): {os.strerror(code)}")

    @property
    def committed(self) -> int:
        """Bytes of memory taken from the system."""
        starts, stops = self._committed
        return sum(stops) - sum(starts)

    def commit(self, offset: int, nbytes: int) -> None:
        """Make sure that there is memory behind ``[offset, offset + nbytes)``; call it before touching them.

        Large ranges are also entered into the page table, by several threads: filling 1 GiB of fresh memory for the
        first time takes 0.72 s by page faults alone, 0.65 s by them after fallocate(2), 0.51 s with
        MADV_POPULATE_WRITE between, and 0.24 s + 0.07 s when two threads do that (2-core VM). A range that was
        committed before costs no system call.

        Any thread may call it; the caller owns the range.

        Raises:
            OutOfMemory: the system has no memory left. Memory that was taken on the way has been given back.
            ValueError: the range is not inside the arena, or the arena is closed.
        """
        stop = offset + nbytes
        starts, stops = self._committed
        index = bisect_right(starts, offset) - 1
        if index >= 0 and stop <= stops[index]:
            return
        if offset < 0 or nbytes < 0 or stop > self.nbytes:
            raise ValueError(f"[{offset}, {stop}) is not inside an arena of {self.nbytes} bytes")
        if self.fd < 0:
            raise ValueError("the arena is closed")
        # The system calls run outside the lock: another thread may take the granules at either end at the same time,
        # which is harmless.
        missing = self._missing(offset // GRANULE_NBYTES * GRANULE_NBYTES, self._granule_end(stop))
        try:
            for low, high in missing:
                self._take(low, high)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            self._give_back(offset, stop, missing)
            note = f"the system has no memory for it: {error.strerror}"
            raise OutOfMemory(nbytes, self.committed, self.nbytes, 0, note) from error
        with self._lock:
            for low, high in missing:
                self._remember(low, high)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping, which ends with the last block that holds it. Idempotent."""
        fd, self.fd = self.fd, -1
        self.mapping = None
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def _granule_end(self, stop: int) -> int:
        return min(-(-stop // GRANULE_NBYTES) * GRANULE_NBYTES, self.nbytes)

    def _missing(self, low: int, high: int) -> list[tuple[int, int]]:
        """The parts of [low, high) that are not committed."""
        missing = []
        starts, stops = self._committed
        for start, stop in zip(starts, stops, strict=True):
            if start >= high:
                break
            if low < start:
                missing.append((low, start))
            low = max(low, stop)
        if low < high:
            missing.append((low, high))
        return missing

    def _take(self, low: int, high: int) -> None:
        def work(start: int, stop: int) -> None:
            for at in range(low + start, low + stop, _CHUNK_NBYTES):
                length = min(_CHUNK_NBYTES, low + stop - at)
                self._fallocate(self.fd, at, length)
                if populate and self._populate and _madvise(self.address + at, length, _MADV_POPULATE_WRITE):
                    code = ctypes.get_errno()
                    if code != errno.EINVAL:
                        raise OSError(code, os.strerror(code))
                    self._populate = False  # Linux before 5.14: page faults do it, and find the memory there

        # One granule is shared by many small objects: each pays for the pages that it touches.
        populate = high - low > GRANULE_NBYTES
        in_parallel(work, high - low)

    def _give_back(self, offset: int, stop: int, missing: list[tuple[int, int]]) -> None:
        """Free what a failed commit took: the granules inside the caller's own range, where nobody else commits."""
        first = -(-offset // GRANULE_NBYTES) * GRANULE_NBYTES
        last = stop // GRANULE_NBYTES * GRANULE_NBYTES
        for low, high in missing:
            low, high = max(low, first), min(high, last)
            if low < high and _madvise(self.address + low, high - low, _MADV_REMOVE):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot give {high - low} bytes back: {os.strerror(code)}")

    def _remember(self, low: int, high: int) -> None:
        """Note [low, high) as committed, joined with what touches or overlaps it. Called under the lock."""
        starts, stops = self._committed
        joined = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start <= high and stop >= low]
        apart = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start > high or stop < low]
        apart.append((min([low, *(s for s, _ in joined)]), max([high, *(e for _, e in joined)])))
        apart.sort()
        self._committed = ([start for start, _ in apart], [stop for _, stop in apart])
