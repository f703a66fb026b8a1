"""The arena: all shared memory of one process, as one sparse anonymous file.

The file is a memfd (memfd_create(2)) with no name, so a killed process leaves nothing behind; peers get its descriptor
and map it read-only. It is sealed against shrinking and growing, so no access of theirs can end in SIGBUS.
F_SEAL_FUTURE_WRITE is not used: it forbids hole punching to the owner as well.

Its size is the capacity from the start; memory is taken only by `Arena.commit`. Everything that may fail for lack of
memory fails there, as an exception: a page fault that finds no memory would be a SIGBUS.
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
"""Bytes in which an arena is handed out and registered with a network card: few registrations for a full arena, and
none of them so large that the first one is felt."""

GRANULE_NBYTES: Final = 2 << 20
"""Bytes in which memory is committed: a huge page. Small objects then cost a system call once in thousands."""

_NO_MEMORY: Final = frozenset((errno.ENOMEM, errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EFAULT))
"""How the system says that memory, the file system, a size limit or a quota is at its end; EFAULT is what
MADV_POPULATE_WRITE reports where an access would have been a SIGBUS (madvise(2))."""


def _refused(nbytes: int, error: OSError) -> str:
    """Why there can be no arena of so many bytes, with the limit that says so where there is one."""
    which, name, what = resource.RLIMIT_AS, "ulimit -v", "an address space"
    if error.errno == errno.EFBIG:
        which, name, what = resource.RLIMIT_FSIZE, "ulimit -f", "a file"
    limit = resource.getrlimit(which)[0]
    allows = f"{name} allows {what} of {limit:,} bytes" if limit != resource.RLIM_INFINITY else f"{error.strerror}"
    return f"{allows}, and the store is to have {nbytes:,}: raise that limit"


def _opened_anew(fd: int) -> int:
    """A descriptor of the memfd `fd`, which is closed, that the system counts among those that are open for writing.
    It does not count the first one, and a fork of ours that maps the arena is to be counted."""
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # /proc is not mounted: no peer gets the arena
        return fd
    os.close(fd)
    return again


class Arena:
    """One process's shared memory. Making one is cheap: it maps address space and touches nothing.

    Args:
        capacity: bytes the arena can hold; rounded up to whole pages.
        extent_nbytes: bytes in which the arena should be handed out; rounded up to whole pages.
        fallocate: ``fallocate(fd, offset, nbytes)``, which takes memory or raises ``OSError``; None for the system's.
        groups: the control groups that bound this process's memory; None looks for them.
        seed: for an arena of anonymous memory, which no peer can map, ids of its blocks drawn from this number: for
            simulations, whose processes are thousands in one. None for a file.

    Raises:
        OutOfMemory: the file may not be that large (RLIMIT_FSIZE) or the address space not (RLIMIT_AS).
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
            """Who holds which bytes. It owns the descriptor and the mapping, which end with the last holder."""
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
        """Where the arena lies in this process."""

    @property
    def fd(self) -> int:
        """The memfd; -1 once the arena is closed and nothing is allocated in it any more, and without a file."""
        return self.heap.fd

    @property
    def committed(self) -> int:
        """Bytes of memory taken from the system."""
        return self.heap.committed

    def commit(self, offset: int, nbytes: int) -> None:
        """Make sure that there is memory behind ``[offset, offset + nbytes)``; call it before touching them.

        Large ranges are also entered into the page table, by several threads: filling 1 GiB of fresh memory for the
        first time takes 0.72 s by page faults alone, 0.65 s by them after fallocate(2), 0.51 s with
        MADV_POPULATE_WRITE between, and 0.24 s + 0.07 s when two threads do that (2-core VM). A range that was
        committed before costs no system call.

        The kernel ends a process whose control group has nothing left, and says nothing before. So each time that
        another 16 MiB are wanted, be it at once or in parts, the groups are asked what they have.

        Any thread may call it; the caller owns the range.

        Raises:
            OutOfMemory: the system has no memory left, or a control group has not, which the note names. Memory that
                was taken on the way has been given back.
            ValueError: the range is not inside the arena, or the arena is closed.
        """
        self._have(self.heap.commit, offset, nbytes)

    def pin(self, offset: int, nbytes: int) -> None:
        """Make sure that there is memory behind the granules that ``[offset, offset + nbytes)`` touches, and that none
        of it goes back to the system before `Heap.unpin_all`; call it before registering them with a network card,
        which would go on using pages that the file has lost.

        It does not matter to whom the range belongs, and contents do not change. A range that was pinned before costs
        no system call. Any thread may call it.

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
            raise OutOfMemory(nbytes, self.committed, self.nbytes, 0, note) from error

    def _tightest(self) -> str:
        """The limit of the control group that has the least left; empty where no group sets one."""
        left = [(room, group) for group in self._groups if (room := group.left) is not None]
        if not left:
            return ""
        room, group = min(left, key=lambda pair: pair[0])
        return f"{group} allows {group.limit:,} bytes, of which {room:,} are left"

    def close(self) -> None:
        """Hand out nothing more, and give free memory back. Idempotent. What is allocated stays, until its last holder
        lets go of it; the descriptor is closed, and the mapping ends, when all have."""
        self.heap.close()
