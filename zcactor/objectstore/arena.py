"""The arena: all shared memory of one process, as one sparse anonymous file.

The file is a memfd (memfd_create(2)) with no name, so a killed process leaves nothing behind. Peers get its descriptor
and map it read-only. File seals forbid shrinking and growing, so an access of a peer cannot end in SIGBUS.
F_SEAL_FUTURE_WRITE is not used: it forbids hole punching to the owner as well.

The file has the capacity as its size from the start; only `Arena.commit` takes memory. Lack of memory appears there, as
an exception: a page fault that finds no memory would be a SIGBUS.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
from typing import TYPE_CHECKING, Final

from zcactor.errors import OutOfMemory
from zcactor.objectstore.groups import inherited_groups
from zcactor.objectstore.heap import ANONYMOUS, Heap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.objectstore.groups import MemoryGroup

__all__ = ["EXTENT_NBYTES", "GRANULE_NBYTES", "Arena"]

EXTENT_NBYTES: Final = 64 << 20
"""Bytes of an extent, in which an arena is handed out and registered with a network card: few registrations for a full
arena, and none so large that the first one is felt."""

GRANULE_NBYTES: Final = 2 << 20
"""Bytes of a granule, in which memory is committed: a huge page. Only one in thousands of small objects then costs a
system call."""

_NO_MEMORY: Final = frozenset((errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EFAULT))
"""Error numbers for memory, the file system, a size limit or a quota that is exhausted. MADV_POPULATE_WRITE reports
EFAULT where an access would have been a SIGBUS (madvise(2))."""


def _refused(nbytes: int, error: OSError) -> str:
    """The reason why an arena of `nbytes` bytes is impossible, with the limit that forbids it where a limit does."""
    which, name, what = resource.RLIMIT_AS, "ulimit -v", "an address space"
    if error.errno == errno.EFBIG:
        which, name, what = resource.RLIMIT_FSIZE, "ulimit -f", "a file"
    limit = resource.getrlimit(which)[0]
    allows = f"{name} allows {what} of {limit:,} bytes" if limit != resource.RLIM_INFINITY else f"{error.strerror}"
    wanted = f"and the store is to have {nbytes:,}"
    return f"{allows}, {wanted}: raise that limit, or pass a smaller store_capacity to zc.init()"


def _opened_anew(fd: int) -> int:
    """Open the memfd `fd` again and close it. The system counts the new descriptor among those that are open for
    writing; it does not count the first one, and a fork of this process that maps the arena is to be counted."""
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # /proc is not mounted: no peer gets the arena
        return fd
    os.close(fd)
    return again


class Arena:
    """The shared memory of one process. Making an arena is cheap: it maps address space and touches nothing.

    Args:
        capacity: bytes that the arena can hold; rounded up to whole pages.
        extent_nbytes: bytes of an extent, in which the arena is handed out; rounded up to whole pages.
        fallocate: ``fallocate(fd, offset, nbytes)``, which takes memory or raises ``OSError``; None means the system's.
        groups: the control groups that bound this process's memory; None looks for them.
        seed: a number that makes the arena of anonymous memory, which no peer can map, and from which ids of blocks are
            drawn. For simulations, which have thousands of processes in one. None makes a file.

    Raises:
        OutOfMemory: a limit forbids a file (RLIMIT_FSIZE) or an address space (RLIMIT_AS) of that size.
        ValueError: `capacity` is not positive.
    """

    def __init__(
        self,
        capacity: int,
        extent_nbytes: int = EXTENT_NBYTES,
        *,
        fallocate: Callable[[int, int, int], None] | None = None,
        groups: Sequence[MemoryGroup] | None = None,
        seed: int | None = None,
    ) -> None:
        if capacity <= 0:
            raise ValueError(f"an arena of {capacity} bytes cannot hold anything; pass a capacity of at least 1 byte")
        nbytes = (capacity + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        self.nbytes: Final = nbytes
        """Bytes of the file and of the mapping."""
        self.extent_nbytes: Final = (extent_nbytes + mmap.PAGESIZE - 1) & -mmap.PAGESIZE
        fd = ANONYMOUS
        if seed is None:
            fd = os.memfd_create("zcactor-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if seed is None:
                os.ftruncate(fd, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                fd = _opened_anew(fd)
            self.heap: Final = Heap(fd, nbytes, self.extent_nbytes, fallocate)
            """The heap, which knows the holders of all bytes. It owns the descriptor and the mapping, which end with
            the last holder."""
        except OSError as error:
            if seed is None:
                os.close(fd)
            if error.errno not in _NO_MEMORY:
                raise
            raise OutOfMemory(nbytes, 0, 0, 0, _refused(nbytes, error)) from error
        if seed is not None:
            self.heap.seed(seed)
        self._groups: Final = inherited_groups() if groups is None else groups
        self.heap.limit_by([group.paths for group in self._groups])
        self.address: Final = self.heap.address
        """Address at which the arena lies in this process."""

    @property
    def fd(self) -> int:
        """The memfd; -1 for an arena without a file, and once the arena is closed and nothing is allocated in it any
        more."""
        return self.heap.fd

    @property
    def committed(self) -> int:
        """Bytes of memory that are taken from the system."""
        return self.heap.committed

    def commit(self, offset: int, nbytes: int) -> None:
        """Take memory for ``[offset, offset + nbytes)``; call it before touching the bytes.

        Large ranges are also entered into the page table, by several threads: filling 1 GiB of fresh memory for the
        first time takes 0.72 s by page faults alone, 0.65 s by them after fallocate(2), 0.51 s with
        MADV_POPULATE_WRITE between, and 0.24 s + 0.07 s when two threads do that (2-core VM). A range that was
        committed before costs no system call.

        The kernel ends a process whose control group has no memory left, without a warning. So the groups are asked for
        their free memory each time that another 16 MiB are wanted, at once or in parts.

        Any thread may call it; the caller owns the range.

        Raises:
            OutOfMemory: the system, or a control group that the note names, has no memory left. Memory that was taken
                on the way has been given back.
            ValueError: the range is not inside the arena, or the arena is closed.
        """
        self._have(self.heap.commit, offset, nbytes)

    def pin(self, offset: int, nbytes: int) -> None:
        """Take memory for the granules that ``[offset, offset + nbytes)`` touches, and keep it until `Heap.unpin_all`.

        Call it before registering the range with a network card, which would go on using pages that the file loses.
        The range may belong to anybody, and its contents do not change. A range that is pinned already costs no system
        call. Any thread may call it.

        Raises:
            OutOfMemory: the system has no memory left. No more is pinned than before.
            ValueError: the range is not inside the arena, or the arena is closed.
        """
        self._have(self.heap.pin, offset, nbytes)

    def _have(self, take: Callable[[int, int], None], offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside an arena of {self.nbytes} bytes")
        try:
            take(offset, nbytes)
        except OSError as error:
            if error.errno not in _NO_MEMORY:
                raise
            note = f"the system has no memory for it: {error.strerror}"
            if error.errno == errno.EDQUOT and (exceeded := self._tightest()):
                note = f"{exceeded}; its processes share that, so end some, use smaller arrays, or raise the limit"
            # The traceback would keep the frames of all callers, where the error is kept.
            raise OutOfMemory(nbytes, self.committed, self.nbytes, 0, note) from error.with_traceback(None)

    def _tightest(self) -> str:
        """The limit of the control group with the least memory left; empty where no group sets a limit."""
        left = [(room, group) for group in self._groups if (room := group.left) is not None]
        if not left:
            return ""
        room, group = min(left, key=lambda pair: pair[0])
        return f"{group} allows {group.limit:,} bytes, of which {room:,} are left"

    def close(self) -> None:
        """Hand out nothing more, and give free memory back. Idempotent. Allocated memory stays until its last holder
        releases it; with the last of it the descriptor is closed and the mapping ends."""
        self.heap.close()
