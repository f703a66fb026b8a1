"""Another process of this host, and the proof that it has ended.

The system uses a process number again, but not together with the same start time. A pidfd (pidfd_open(2)) becomes
readable when all threads of the process have ended, and its memory maps are gone by then.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

__all__ = ["OsProcess"]

_AFTER_NAME: Final = 22 - 3
"""Index of the start time among the fields of /proc/<pid>/stat behind the name, which may contain any character: it is
field 22, and the first field behind the name is field 3 (proc(5))."""
_NEVER: Final = -1
"""Start time of a process that had ended already; no process has this start time."""


def _started(pid: int) -> int:
    """Clock ticks from the boot to the start of the process; `_NEVER` when there is no such process.

    Raises:
        OSError: no descriptor is left, or /proc is not mounted.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        os.stat("/proc/self/stat")
        return _NEVER
    return int(text.rpartition(b")")[2].split()[_AFTER_NAME])


class OsProcess(NamedTuple):
    """A process of this host, which may have ended."""

    pid: int
    """The process number; 0 for a process of a process namespace that this process cannot see."""
    started: int
    """Clock ticks from the boot to the start of the process."""

    @classmethod
    def of(cls, pid: int) -> OsProcess:
        """Return the process that has the number `pid` now; number 0 where its start time cannot be read."""
        try:
            return cls(pid, _started(pid)) if pid > 0 else cls(0, _NEVER)
        except OSError:
            return cls(0, _NEVER)

    def open(self) -> int | None:
        """Open a pidfd, which the caller closes. None when the process has ended.

        Raises:
            OSError: no descriptor is left, or the process has no number here.
        """
        if not self.pid:
            raise ProcessLookupError("a process without a number in this process namespace")
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        try:
            gone = _started(self.pid) != self.started  # another process has its number
        except OSError:
            os.close(fd)
            raise
        if not gone:
            return fd
        os.close(fd)
        return None
