"""Another process of this host, and the proof that it has ended.

The system uses a process number again, but not together with the same start time. A pidfd (pidfd_open(2)) becomes
readable when all threads of the process have ended, and its memory maps are gone by then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["OsProcess", "parent_of", "pid_space", "started_at"]

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


def pid_space() -> str:
    """Return the name of the space in which pids and start times count: a boot of a kernel, and a process namespace
    there. No other host has the same.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{os.stat('/proc/self/ns/pid').st_ino}"


def started_at(pid: int) -> int | None:
    """The start of a process, in ticks since boot (proc(5), field 22 of ``stat``); None when the process has ended, or
    may not be seen, as another user's under ``hidepid``."""
    fields = _status(pid)
    return None if fields is None else int(fields[19])


def parent_of(pid: int) -> int | None:
    """The pid of a process's parent; None when the process has ended."""
    fields = _status(pid)
    return None if fields is None else int(fields[1])


def _status(pid: int) -> list[str] | None:
    """The fields of ``stat`` from the third on; None when the process has ended, or another user's is hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields


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
