"""The system under the fake: mappings at chosen addresses, sealed memfds, and descriptors of other processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import Final

from zcactor.device.sealed import sealed_memory

__all__ = ["NAME", "anonymous", "extent", "map_at", "mapped_again", "number_of", "reserved", "taken", "unmapped"]

NAME: Final = "zcactor-gpu"
"""The memfds of device memory are called this and the number of the GPU; ``/proc/PID/maps`` shows it."""
_EXTENT: Final = re.compile(rf"/memfd:{NAME}(\d+)(?:@[\w-]+)? \(deleted\)")
_NORESERVE: Final = 0x4000  # <linux/mman.h>; Python lacks it, and MAP_FIXED
_FIXED: Final = 0x10
_MAY_MOVE: Final = 1
_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


def _map(at: int | None, nbytes: int, access: int, kind: int, fd: int) -> int:
    address = _libc.mmap(at, nbytes, access, kind | _NORESERVE, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    return int(address)


def reserved(nbytes: int) -> int:
    """Reserve addresses that nothing can access. Returns the first.

    Raises:
        OSError: the system has no room for them.
    """
    return _map(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)


def map_at(address: int, nbytes: int, fd: int, *, writable: bool) -> None:
    """Map a file over reserved addresses.

    Raises:
        OSError: the system refused.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    _map(address, nbytes, access, mmap.MAP_SHARED | _FIXED, fd)


def anonymous(address: int, nbytes: int) -> None:
    """Make mapped addresses reserved ones again.

    Raises:
        OSError: the system refused.
    """
    _map(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)


def mapped_again(address: int, nbytes: int) -> int | None:
    """Map whole pages of shared memory at further addresses, where they stay when the first ones get other pages.
    Returns the first address; None where the pages are private, which only their own addresses lead to."""
    found = _libc.mremap(address, 0, nbytes, _MAY_MOVE)
    return None if found == _FAILED else int(found)


def unmapped(address: int, nbytes: int) -> None:
    """Give addresses back to the system."""
    _libc.munmap(address, nbytes)


def extent(number: int, nbytes: int, host: str = "") -> int:
    """Make memory of the GPU of that number: a memfd whose size is fixed, so that no access of a peer ends in SIGBUS.

    Raises:
        OSError: the system refused.
    """
    return sealed_memory(_name(number, host), nbytes)


def _name(number: int, host: str) -> str:
    return f"{NAME}{number}@{host}" if host else f"{NAME}{number}"


def taken(number: int, host: str) -> int:
    """Bytes of a GPU's memory that processes of a host have, as a descriptor or mapped, each extent once. Processes of
    other users are not seen."""
    name, extents = f"/memfd:{_name(number, host)} (deleted)", dict[int, int]()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in (process / "maps").read_text().splitlines():
                if line.endswith(name):
                    area, _, _, _, inode, *_ = line.split()
                    low, high = (int(each, 16) for each in area.split("-"))
                    extents[int(inode)] = high - low
            for each in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(each.readlink()) == name:
                        found = each.stat()
                        extents[found.st_ino] = found.st_size
    return sum(extents.values())


def number_of(fd: int) -> int | None:
    """The number of the GPU whose memory a descriptor is; None where it is something else."""
    try:
        match = _EXTENT.fullmatch(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return None
    return None if match is None else int(match[1])
