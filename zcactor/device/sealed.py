"""Memory of a fixed size that other processes map: no access of theirs can end in SIGBUS."""

from __future__ import annotations

import fcntl
import os
from typing import Final

__all__ = ["sealed_memory", "sealed_size"]

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(name: str, nbytes: int) -> int:
    """Make a memfd whose size is fixed. Returns its descriptor.

    Args:
        name: as ``/proc/PID/maps`` shows it.
        nbytes: bytes.

    Raises:
        OSError: the system refused.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def sealed_size(fd: int) -> int:
    """The bytes of a memfd whose size is fixed; -1 for any other file."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except (OSError, ValueError):  # ValueError: a negative number
        return -1
    return os.fstat(fd).st_size if sealed else -1
