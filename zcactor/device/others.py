"""Other processes of the host whose work on a GPU this one waits for."""

from __future__ import annotations

import os
import select

__all__ = ["Other"]


class Other:
    """Another process of this host, and whether it has ended.

    Args:
        pidfd: a descriptor of it (pidfd_open(2)), which stays the caller's.
    """

    def __init__(self, pidfd: int) -> None:
        self._fd = os.dup(pidfd)
        self._ended = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when it ends; -1 after `close`."""
        return self._fd

    def has_ended(self) -> bool:
        """Whether it has ended."""
        if not self._ended and self._fd >= 0:
            poll = select.poll()  # of this call: one is for one thread at a time
            poll.register(self._fd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        return self._ended

    def close(self) -> None:
        """Watch it no more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
