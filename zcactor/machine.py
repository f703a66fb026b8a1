"""The machine as this process sees it: control groups, the processors that it may use, and the calls of its kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "KERNEL", "CallMissing", "check_calls", "cpu_quota", "file_lock_missing", "group_folders", "missing_calls",
    "usable_cpus",
]  # fmt: skip

KERNEL: Final = "5.3"
"""The oldest version of Linux that has all calls that are needed: the one with pidfd_open(2)."""

_OCTAL: Final = re.compile(r"\\([0-7]{3})")
"""The form in which mountinfo writes a blank and similar characters."""


def usable_cpus() -> int:
    """The number of processors that this process may use: those to which the scheduler keeps it, and no more than the
    quota of its control groups pays for, rounded up. At least 1.

    Processes, threads and offers to actors are counted by it: more of them than the quota allows only wait for the next
    period.
    """
    allowed, quota = len(os.sched_getaffinity(0)), _own_quota()
    return allowed if quota is None else max(min(allowed, -int(-quota // 1)), 1)


@functools.cache
def _own_quota() -> float | None:
    """The result of `cpu_quota`, read once: forked children are in the groups of their parent."""
    return cpu_quota()


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """Processors that the control groups of this process pay for at a time, as in 0.5; None where they set no quota.

    A group's quota holds for all processes in it and in the groups below it, so the least one counts.

    Args:
        proc: the folder of the process in proc(5).
    """
    found = []
    for folder, unified in group_folders("cpu", proc):
        try:
            if unified:  # "max 100000", or microseconds of each period
                quota, _, period = (folder / "cpu.max").read_text("ascii").partition(" ")
            else:  # -1, or likewise
                quota = (folder / "cpu.cfs_quota_us").read_text("ascii").strip()
                period = (folder / "cpu.cfs_period_us").read_text("ascii")
        except OSError:  # the group has just gone; the root has no such files
            continue
        if quota not in ("max", "-1"):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def group_folders(controller: str, proc: Path = Path("/proc/self")) -> list[tuple[Path, bool]]:
    """The folders of this process's control groups: its own first, then their parents as far as they are visible from
    here. Each comes with whether it is one of version 2, where one hierarchy has all controllers.

    Args:
        controller: the name of a controller, as in ``"memory"``: of version 1, only the groups that have it count.
        proc: the folder of the process in proc(5).
    """
    try:
        memberships = (proc / "cgroup").read_text("utf-8", "surrogateescape").splitlines()
        mounts = (proc / "mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:  # proc(5) is missing, or has no entry for this process
        return []
    found = []
    for line in memberships:  # cgroups(7): hierarchy, controllers, path
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            unified = number == "0"
            found += [(folder, unified) for folder in _mounted(path, mounts, "" if unified else controller)]
    return found


def _mounted(path: str, mounts: Sequence[str], controller: str) -> list[Path]:
    """The folders at which the group `path` and its parents are mounted. No `controller` stands for version 2."""
    for line in mounts:  # proc(5): ... root, mount point, ... "-", type, source, options of the file system
        head, _, tail = line.partition(" - ")
        mounted, _, options = tail.split(" ", 2)
        if mounted != ("cgroup" if controller else "cgroup2"):
            continue
        if controller and controller not in options.split(","):
            continue
        root, point = (_OCTAL.sub(_character, field) for field in head.split(" ")[3:5])
        top, group = Path(point), Path(path)
        # A group outside of the mounted part, as in another name space, is only visible as the mounted part.
        folder = top / group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else top
        return [each for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return []


def _character(octal: re.Match[str]) -> str:
    return chr(int(octal[1], 8))


class CallMissing(OSError):
    """A call of the system that is needed, and fails on this machine. The message names it, and the way out."""


@functools.cache
def check_calls() -> None:
    """Try the calls of the kernel that are needed, before anything is begun. Once they work they are not tried again.

    Raises:
        CallMissing: one of them fails.
    """
    found = missing_calls()
    if found:
        raise CallMissing(found[0])


def missing_calls() -> list[str]:
    """Try the calls of the kernel that are needed. Returns a sentence for each that fails, with the remedy."""
    found: list[str] = []
    with contextlib.ExitStack() as undo:
        fd = -1

        def attempt(call: str, use: str, action: Callable[[], object]) -> None:
            try:
                action()
            except OSError as error:
                found.append(_sentence(call, use, error))

        def memory() -> None:
            nonlocal fd
            fd = os.memfd_create("zcactor-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)

        attempt("memfd_create(2)", "shared memory", memory)
        if fd >= 0:
            attempt("fallocate(2)", "taking shared memory", lambda: os.posix_fallocate(fd, 0, mmap.PAGESIZE))
            attempt("ftruncate(2)", "taking shared memory", lambda: os.ftruncate(fd, mmap.PAGESIZE))
            if os.fstat(fd).st_size:
                mapped = undo.enter_context(mmap.mmap(fd, mmap.PAGESIZE))
                attempt("madvise(2)", "giving shared memory back", lambda: mapped.madvise(mmap.MADV_REMOVE))
            attempt("flock(2)", "telling which processes live", lambda: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB))
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            attempt("fcntl(2) with F_ADD_SEALS", "shared memory", lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals))
        attempt("pidfd_open(2)", "waiting for processes", lambda: os.close(os.pidfd_open(os.getpid())))
        attempt("eventfd(2)", "waking threads", lambda: os.close(os.eventfd(0, os.EFD_CLOEXEC)))
        attempt("timerfd_create(2)", "waiting for a time", _make_timer)
    return found


def file_lock_missing(path: Path, error: OSError) -> CallMissing:
    """The error where a file cannot be locked: not all file systems have flock(2)."""
    return CallMissing(
        f"{path} cannot be locked by flock(2): {error.strerror}. Its file system may have no locks: set "
        "XDG_RUNTIME_DIR to a folder of yours on a local one, such as /run or a tmpfs"
    )


def _make_timer() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)


def _sentence(call: str, use: str, error: OSError) -> str:
    text = f"{call} fails here: {error.strerror}. zcactor needs it for {use}: "
    if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
        return (
            f"{text}Linux {KERNEL} and newer have it, and this is {platform.release()}. Where that is newer, a sandbox "
            "forbids it, such as the seccomp profile of a container: allow the call there"
        )
    return f"{text}see ulimit -a, and the limits of the container"
