"""Other processes of the host whose work on a GPU this one waits for."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Final

__all__ = ["Other"]


class Other:
    """Another process of this host and user, and whether it has ended.

    Args:
        pid: its pid.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self._fd = os.pidfd_open(pid)
        self._ended = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when it ends; -1 after `close`."""
        return self._fd

    def has_ended(self) -> bool:
        """Whether it has ended."""
        if not self._ended and self._fd >= 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        return self._ended

    def open(self, number: int, *, writable: bool) -> int:
        """Open one of its descriptors anew.

        Raises:
            OSError: it has no descriptor of that number, or has ended.
        """
        flags = os.O_RDWR if writable else os.O_RDONLY
        return os.open(Path(f"/proc/{self.pid}/fd/{number}"), flags | os.O_CLOEXEC)

    def close(self) -> None:
        """Watch it no more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
