"""A peer's arena, mapped into this process.

Python's own ``mmap`` keeps a duplicate of the descriptor for as long as the mapping lives, one per peer; this one goes
to ``mmap(2)`` directly and keeps none.

A mapping must outlive every array that points into it, also after its connection has closed: whoever hands out such an
array keeps a reference to the `Mapping`, and the last one to let go unmaps.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
from typing import TYPE_CHECKING, Final

from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Mapping", "check_seals"]

# <linux/mman.h>: do not count the sparse arena, of which most is never touched, against the commit limit
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap: Final = _libc.munmap
_munmap.restype = ctypes.c_int
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


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


class Mapping:
    """`nbytes` of `fd`, shared, from its start. The descriptor stays the caller's and may be closed at once.

    Args:
        fd: an open file, usually a memfd.
        nbytes: bytes to map, more than 0.
        writable: map with write access; the descriptor must have it too.

    Raises:
        OSError: the system refused (EACCES: the descriptor is read-only; ENOMEM: no address space).
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, fd: int, nbytes: int, *, writable: bool = False) -> None:
        self.address = 0
        """Where the bytes lie in this process; 0 once unmapped."""
        self.nbytes = nbytes
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        address = _mmap(None, nbytes, access, mmap.MAP_SHARED | _MAP_NORESERVE, fd, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {nbytes} bytes of an arena: {os.strerror(code)}")
        self.address = int(address)

    def close(self) -> None:
        """Unmap. Idempotent. Only for whoever knows that no array points into the mapping: the next access faults."""
        address, self.address = self.address, 0
        if address:
            _munmap(address, self.nbytes)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the kernel unmaps, in an order that cannot hurt; before it, an array in the same reference cycle may
        # still be looked at by another finalizer.
        if not _is_finalizing():
            self.close()
