"""Another process of this host, and the proof that it is gone.

A process number comes again; together with the time at which the process was started it does not. A pidfd
(pidfd_open(2)) becomes readable when all threads of the process have ended, and its memory maps with them.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

__all__ = ["OsProcess"]

_AFTER_NAME: Final = 22 - 3
"""Where the start time stands in /proc/<pid>/stat behind the name, which may hold anything: it is field 22, and the
first one behind the name is field 3 (proc(5))."""
_NEVER: Final = -1
"""Start time of a process that was gone when it was asked for: no process has it."""


def _started(pid: int) -> int:
    """Clock ticks from the boot to the start of the process; `_NEVER` when there is none.

    Raises:
        OSError: the system does not say: no descriptor is left, or /proc is not mounted.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        os.stat("/proc/self/stat")
        return _NEVER
    return int(text.rpartition(b")")[2].split()[_AFTER_NAME])


class OsProcess(NamedTuple):
    """A process that lives, or has lived, on this host."""

    pid: int
    """Its number here; 0 for one that has none: it lives in a process namespace that this one does not see."""
    started: int
    """Clock ticks from the boot to its start."""

    @classmethod
    def of(cls, pid: int) -> OsProcess:
        """The process that has the number `pid` now. Without a way to tell it from a later one it has number 0."""
        try:
            return cls(pid, _started(pid)) if pid > 0 else cls(0, _NEVER)
        except OSError:
            return cls(0, _NEVER)

    def open(self) -> int | None:
        """A pidfd, which the caller closes; None when the process is gone.

        Raises:
            OSError: it cannot be told whether it is gone: no descriptor is left, or it has no number here.
        """
        if not self.pid:
            raise ProcessLookupError("a process without a number in this process namespace")
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        try:
            gone = _started(self.pid) != self.started  # somebody else has its number
        except OSError:
            os.close(fd)
            raise
        if not gone:
            return fd
        os.close(fd)
        return None
