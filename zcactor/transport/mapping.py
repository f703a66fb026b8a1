"""A peer's arena, mapped into this process.

Python's ``mmap`` keeps a duplicate of the descriptor for as long as the mapping lives, one for each peer. `Mapping`
calls ``mmap(2)`` itself, and keeps a descriptor only of the few mappings that are writable.

A mapping has to outlive all arrays that point into it, also after its connection has closed. So each array keeps a
reference to the `Mapping`, which unmaps when the last reference is gone.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any
    from weakref import ref

__all__ = ["Mapping", "PrivateMapping", "check_seals"]

# <linux/mman.h>: do not count the sparse arena, of which most is never touched, against the commit limit
_MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
# <linux/mman.h>; Python has no mremap(2)
_MREMAP_MAYMOVE: Final = 1
_MREMAP_DONTUNMAP: Final = 4
_MADV_REMOVE: Final = 9

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap: Final = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mremap: Final = _libc.mremap
_mremap.restype = ctypes.c_void_p
_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_madvise: Final = _libc.madvise
_madvise.restype = ctypes.c_int
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mprotect: Final = _libc.mprotect
_mprotect.restype = ctypes.c_int
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def check_seals(fd: int, nbytes: int) -> None:
    """Check that `fd` is a memfd of exactly `nbytes` bytes whose size is fixed by file seals.

    Without these seals a peer could truncate the file, and our next read of the mapping would end in SIGBUS.

    Raises:
        ProtocolError: `fd` is no memfd, lacks F_SEAL_SHRINK or F_SEAL_GROW (memfd_create(2)), or has another size.
    """
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError("the peer's arena is not a memfd: it cannot be sealed") from error
    if seals & wanted != wanted:
        raise ProtocolError(f"the peer's arena is not sealed against resizing: its seals are {seals:#x}")
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise ProtocolError(f"the peer's arena has {size} bytes, not the {nbytes} it announced")


def _map(fd: int, offset: int, nbytes: int, access: int, kind: int, at: int | None = None) -> int:
    address = _mmap(at, nbytes, access, kind | _MAP_NORESERVE, fd, offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes of an arena: {os.strerror(code)}")
    return int(address)


mappings: Final[WeakSet[Mapping]] = WeakSet()
"""The mappings of this process."""


class Mapping:
    """A shared mapping of the first `nbytes` of `fd`. The caller may close the descriptor at once.

    Args:
        fd: an open file, usually a memfd.
        nbytes: bytes to map, more than 0.
        writable: map with write access; the descriptor must have it too.
        spare: map the file a second time, read-only and private; `private` makes its mappings from that one.

    Raises:
        OSError: the system refused (EACCES: the descriptor is read-only; ENOMEM: no address space).
    """

    __slots__ = ("__weakref__", "_fd", "_lock", "_spare", "address", "leases", "nbytes", "outdated")

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False, spare: bool = False) -> None:
        self._lock = threading.Lock()  # of `_spare`
        self._spare = 0
        self._fd = -1
        self.leases: dict[int, ref[Any]] = {}
        """Leases on bytes of the mapping, by ``id``. The memory of all other bytes may be given up."""
        self.address = 0
        """The address of the first byte in this process; 0 once unmapped."""
        self.nbytes = nbytes
        self.outdated = False
        """Whether a fork has made a part private: arrays that the peer moves here from now on are mapped by `again`."""
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.address = _map(fd, 0, nbytes, access, mmap.MAP_SHARED)
        if spare:
            self._spare = _map(fd, 0, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE)
        if writable:
            self._fd = os.dup(fd)
        mappings.add(self)

    @property
    def writable(self) -> bool:
        """Whether the mapping has write access."""
        return self._fd >= 0

    def make_private(self, low: int, nbytes: int) -> None:
        """Make whole pages of a writable mapping private, for a fork: other processes see no later writes to them, nor
        does this one see theirs.

        Args:
            low: bytes from the start, of any alignment.
            nbytes: bytes, more than 0.

        Raises:
            OSError: the system refused; the pages stay shared.
        """
        first = low - low % mmap.PAGESIZE
        access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        _map(self._fd, first, low + nbytes - first, access, kind, self.address + first)
        self.outdated = True

    def again(self) -> Mapping:
        """Map the file of a writable mapping once more.

        Raises:
            OSError: as for `Mapping`.
        """
        return Mapping(self._fd, self.nbytes, writable=True)

    def private(self, offset: int, nbytes: int, keep: object) -> PrivateMapping | None:
        """Map part of the file again, private and writable. Any thread may call it.

        The descriptor may be closed, but ``mremap(2)`` makes a mapping from a mapping: MREMAP_DONTUNMAP moves its pages
        and leaves it in place, and the spare one has no pages of its own.

        Args:
            offset: bytes from the start, of any alignment.
            nbytes: bytes, more than 0.
            keep: see `PrivateMapping`.

        Returns:
            None when the system cannot do that (Linux before 5.13, no address space left), or without a spare mapping.
        """
        if not self._spare or nbytes <= 0 or not 0 <= offset <= self.nbytes - nbytes:
            return None
        inside = offset % mmap.PAGESIZE
        length = -(-(inside + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = _MREMAP_MAYMOVE | _MREMAP_DONTUNMAP
        with self._lock:
            if not self._spare:
                return None
            address = _mremap(self._spare + offset - inside, length, length, flags, None)
        if address == _MAP_FAILED:
            return None
        made = PrivateMapping(int(address), length, inside, nbytes, keep)
        return None if _mprotect(address, length, mmap.PROT_READ | mmap.PROT_WRITE) else made

    def replace(self, low: int, nbytes: int, fd: int, offset: int) -> None:
        """Replace pages of the mapping by those of another file, read-only, in one step.

        Args:
            low: bytes from the start, whole pages.
            nbytes: whole pages.
            fd: a file with the same bytes; stays the caller's.
            offset: the position of the bytes in that file.

        Raises:
            OSError: the system refused; the old pages stay.
        """
        _map(fd, offset, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, self.address + low)

    def give_up(self, kept: Iterable[tuple[int, int]]) -> None:
        """Unmap the file except for replaced pages. An access to any other byte faults from now on.

        The addresses stay reserved until the mapping is closed, so that nothing else is mapped there.

        Args:
            kept: offset and bytes of the replaced pages, in order.

        Raises:
            OSError: the system refused for some of the pages.
        """
        with self._lock:
            spare, self._spare = self._spare, 0
            if spare:
                _munmap(spare, self.nbytes)
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        for low, nbytes in self._others(kept):
            _map(-1, 0, nbytes, _PROT_NONE, nothing, self.address + low)

    def _others(self, kept: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """The gaps between the `kept` pages: offset and bytes of each."""
        at = 0
        for low, nbytes in (*kept, (-(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)):
            if low > at:
                yield at, low - at
            at = low + nbytes

    def is_the_only_one(self) -> bool:
        """Whether no other process has the file open or maps it: only then the system grants a lease for writing
        (F_SETLEASE, fcntl(2)). The system counts open file descriptions, so each receiver of the descriptor is given
        one of its own.

        False also where the mapping is not writable, and where the system does not answer.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, ValueError):
            return False
        return True

    def punch(self, kept: Iterable[tuple[int, int]]) -> None:
        """Free the memory of the file except for the `kept` pages. All other bytes read as zeros from now on.

        Only for a mapping that is the only one, of a file whose owner has ended.

        Args:
            kept: as in `give_up`.

        Raises:
            OSError: the system refused for some of the pages.
        """
        for low, nbytes in self._others(kept):
            if _madvise(self.address + low, nbytes, _MADV_REMOVE):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot give back {nbytes} bytes of an arena: {os.strerror(code)}")

    def close(self) -> None:
        """Unmap. Idempotent. No array may point into the mapping then: an access would fault."""
        address, self.address = self.address, 0
        if address:
            _munmap(address, self.nbytes)
        spare, self._spare = self._spare, 0
        if spare:
            _munmap(spare, self.nbytes)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the kernel unmaps in a safe order. Before that, another finalizer may still read an array of the same
        # reference cycle.
        if not _is_finalizing():
            self.close()


class PrivateMapping:
    """Bytes of a file, writable and private: no other process sees what is written (mmap(2), MAP_PRIVATE).

    The system copies only pages that are written to. All others show the file, so the caller makes sure that no other
    process changes those bytes meanwhile. The object is the base of an array, by NumPy's array interface, and unmaps
    when it is gone.

    Args:
        address: where whole pages are mapped.
        length: bytes of these pages.
        inside: bytes before the first byte of the array.
        nbytes: bytes of the array.
        keep: an object that keeps other processes from changing the bytes.
    """

    __slots__ = ("__array_interface__", "_address", "_keep", "_length")

    def __init__(self, address: int, length: int, inside: int, nbytes: int, keep: object) -> None:
        self._address = address
        self._length = length
        self._keep = keep
        self.__array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + inside, False),
            "version": 3,
        }

    @classmethod
    def of(cls, fd: int, offset: int, nbytes: int, keep: object) -> PrivateMapping:
        """Map `nbytes` of `fd` at `offset`, of any alignment. The descriptor may be read-only, and stays the caller's.

        Raises:
            OSError: the system refused.
        """
        inside = offset % mmap.PAGESIZE
        length = inside + nbytes
        address = _map(fd, offset - inside, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE)
        return cls(address, length, inside, nbytes, keep)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():
            _munmap(self._address, self._length)
