"""The machine as this process sees it: its control groups, and the processors that it may use."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cpu_quota", "group_folders", "usable_cpus"]

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
