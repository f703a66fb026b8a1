"""A peer's arena, mapped into this process.

Python's own ``mmap`` keeps a duplicate of the descriptor for as long as the mapping lives, one per peer; this one goes
to ``mmap(2)`` directly and keeps one only where it is writable, which few are.

A mapping must outlive every array that points into it, also after its connection has closed: whoever hands out such an
array keeps a reference to the `Mapping`, and the last one to let go unmaps.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

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
    """Check that `fd` is a memfd of exactly `nbytes` bytes that nobody can make shorter or longer any more.

    Without the seals a peer could truncate the file, and our next read of the mapping would end in SIGBUS.

    Raises:
        ProtocolError: it is no memfd, lacks F_SEAL_SHRINK or F_SEAL_GROW (memfd_create(2)), or has another size.
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


class Mapping:
    """`nbytes` of `fd`, shared, from its start. The descriptor stays the caller's and may be closed at once.

    Args:
        fd: an open file, usually a memfd.
        nbytes: bytes to map, more than 0.
        writable: map with write access; the descriptor must have it too.
        spare: map it a second time, read-only and private, as what `private` makes its mappings of.

    Raises:
        OSError: the system refused (EACCES: the descriptor is read-only; ENOMEM: no address space).
    """

    __slots__ = ("__weakref__", "_fd", "_lock", "_spare", "address", "leases", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False, spare: bool = False) -> None:
        self._lock = threading.Lock()  # of `_spare`
        self._spare = 0
        self._fd = -1
        self.leases: dict[int, ref[Any]] = {}
        """What points into it, by the number that is its identity: the bytes under all else may go."""
        self.address = 0
        """Where the bytes lie in this process; 0 once unmapped."""
        self.nbytes = nbytes
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.address = _map(fd, 0, nbytes, access, mmap.MAP_SHARED)
        if spare:
            self._spare = _map(fd, 0, nbytes, mmap.PROT_READ, mmap.MAP_PRIVATE)
        if writable:
            self._fd = os.dup(fd)

    def private(self, offset: int, nbytes: int, keep: object) -> PrivateMapping | None:
        """Part of the file once more, to be written to privately. Any thread may call it.

        There is no descriptor any more, but ``mremap(2)`` makes a mapping of a mapping: MREMAP_DONTUNMAP moves its
        pages and leaves it in place, and the spare one has no pages of its own.

        Args:
            offset: bytes from the start, of any alignment.
            nbytes: bytes, more than 0.
            keep: see `PrivateMapping`.

        Returns:
            None when the system cannot do that (Linux before 5.13, no address space left), or there is no spare one.
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
        """Map other pages in the place of these, read-only: at every moment one or the other are there.

        Args:
            low: bytes from the start, whole pages.
            nbytes: whole pages.
            fd: a file that holds the same bytes; stays the caller's.
            offset: where it does.

        Raises:
            OSError: the system refused; the old pages are there as before.
        """
        _map(fd, offset, nbytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, self.address + low)

    def give_up(self, kept: Iterable[tuple[int, int]]) -> None:
        """Let go of the file, but for what was replaced: an access to anything else faults from now on.

        The addresses stay taken, so that nothing else is mapped there, and unmapped with this.

        Args:
            kept: what was replaced, in order: from where, and how many bytes.

        Raises:
            OSError: the system refused somewhere.
        """
        with self._lock:
            spare, self._spare = self._spare, 0
            if spare:
                _munmap(spare, self.nbytes)
        nothing = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        for low, nbytes in self._others(kept):
            _map(-1, 0, nbytes, _PROT_NONE, nothing, self.address + low)

    def _others(self, kept: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """What lies between: from where, and how many bytes."""
        at = 0
        for low, nbytes in (*kept, (-(-self.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)):
            if low > at:
                yield at, low - at
            at = low + nbytes

    def is_the_only_one(self) -> bool:
        """Whether nobody else has the file open or maps it: only then does the system grant a lease for writing
        (F_SETLEASE, fcntl(2)). It counts what was opened, so whoever passes descriptors on opens the file for each.

        False also where the mapping is not writable, or the system does not say.
        """
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except (OSError, ValueError):
            return False
        return True

    def punch(self, kept: Iterable[tuple[int, int]]) -> None:
        """Give the memory of the file back, but for some: what reads the rest sees zeros from now on.

        Only for a mapping that is the only one, of a file whose owner is gone.

        Args:
            kept: as in `give_up`.

        Raises:
            OSError: the system refused somewhere.
        """
        for low, nbytes in self._others(kept):
            if _madvise(self.address + low, nbytes, _MADV_REMOVE):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot give back {nbytes} bytes of an arena: {os.strerror(code)}")

    def close(self) -> None:
        """Unmap. Idempotent. Only for whoever knows that no array points into the mapping: the next access faults."""
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
        # At exit the kernel unmaps, in an order that cannot hurt; before it, an array in the same reference cycle may
        # still be looked at by another finalizer.
        if not _is_finalizing():
            self.close()


class PrivateMapping:
    """Bytes of a file that are writable, and private: what is written is seen by nobody else (mmap(2), MAP_PRIVATE).

    Nothing is copied but the pages that are written to. Pages that are not show what the file holds, so whoever makes
    one sees to it that nobody else changes those bytes meanwhile. It is the base object of an array, by NumPy's array
    interface, and unmaps when it is gone.

    Args:
        address: where whole pages are mapped.
        length: their bytes.
        inside: bytes before the first that counts.
        nbytes: bytes that count.
        keep: what keeps others from changing the bytes.
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
