"""The control groups that bound this process's memory, of version 1 or 2. The kernel kills where one is exceeded.

A group's limit holds for all processes in it and in the groups below it. So a process is bound by each group from its
own up to the root, and by the memory that the other processes in them have taken meanwhile. Page cache that can be
dropped counts as free.
"""

from __future__ import annotations

import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zcactor.machine import group_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MemoryGroup",
    "bound_by_file_limit",
    "default_capacity",
    "inherited_groups",
    "memory_of_machine",
    "own_groups",
    "smallest",
    "within_limits",
]

_UNLIMITED: Final = 1 << 60
"""Bytes from which on a limit means none: version 1 writes "no limit" as a number of about 2**63."""
_NAMES_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NAMES_2: Final = ("memory.max", "memory.current", "inactive_file")
_SHARE: Final = 0.3
"""Share of memory for one process's arena, so that a driver and a worker or two do not take all of it."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group.

    Args:
        folder: the folder of the group's files.
        limit_file, usage_file: names of the files with the limit and the memory in use.
        inactive: name in ``memory.stat`` of the page cache that can be dropped.
    """

    folder: Path
    limit_file: str
    usage_file: str
    inactive: str

    @property
    def paths(self) -> tuple[str, str, str, str]:
        """The arguments of `zcactor.objectstore.heap.Heap.limit_by`: the files with limit, usage and statistics, and
        the name of the line with the cache."""
        folder = self.folder
        return (
            str(folder / self.limit_file), str(folder / self.usage_file), str(folder / "memory.stat"), self.inactive,
        )  # fmt: skip

    @property
    def limit(self) -> int | None:
        """Bytes that the group allows; None where it sets no limit, or does not exist any more."""
        try:
            text = (self.folder / self.limit_file).read_text("ascii").strip()
        except OSError:
            return None
        return None if text == "max" or int(text) >= _UNLIMITED else int(text)

    @property
    def left(self) -> int | None:
        """Bytes that the group can still give; None where it sets no limit, or does not exist any more."""
        limit = self.limit
        if limit is None:
            return None
        try:
            used = int((self.folder / self.usage_file).read_text("ascii"))
            lines = (self.folder / "memory.stat").read_text("ascii").splitlines()
        except OSError:
            return None
        inactive = next((int(value) for name, _, value in map(_split, lines) if name == self.inactive), 0)
        return max(limit - used + inactive, 0)

    def __str__(self) -> str:
        return f"{self.limit_file} of control group {self.folder}"


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(" ")


def own_groups(proc: Path = Path("/proc/self")) -> tuple[MemoryGroup, ...]:
    """The groups of this process: its own first, then their parents as far as they are visible from here.

    Args:
        proc: the folder of the process in proc(5).
    """
    found = []
    for folder, unified in group_folders("memory", proc):
        names = _NAMES_2 if unified else _NAMES_1
        if (folder / names[0]).exists():
            found.append(MemoryGroup(folder, *names))
    return tuple(found)


@functools.cache
def inherited_groups() -> tuple[MemoryGroup, ...]:
    """The result of `own_groups`, read once: forked children are in the groups of their parent."""
    return own_groups()


def smallest(groups: Sequence[MemoryGroup]) -> MemoryGroup | None:
    """The group with the lowest limit; None where no group sets a limit."""
    limited = [(limit, group) for group in groups if (limit := group.limit) is not None]
    return min(limited, key=lambda pair: pair[0])[1] if limited else None


def memory_of_machine() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_LEAST_FILE = 1 << 20
"""Bytes: the least capacity that may be configured. Below it, an error that names the limit is more useful."""


def default_capacity(groups: Sequence[MemoryGroup] | None = None, memory: int | None = None) -> int:
    """Bytes of a process's arena by default, in whole pages: 30 % of the machine's memory, or of a control group's
    limit where that is less. The limits of this process bound it; see `within_limits`.

    Args:
        groups: the control groups; those of this process by default.
        memory: bytes of memory; those of this machine by default.
    """
    tightest = smallest(own_groups() if groups is None else groups)
    bounds = [memory_of_machine() if memory is None else memory]
    if tightest is not None and (limit := tightest.limit) is not None:
        bounds.append(limit)
    page = os.sysconf("SC_PAGE_SIZE")
    return within_limits(int(min(bounds) * _SHARE)) // page * page


def within_limits(capacity: int) -> int:
    """`capacity`, bounded by the limits of this process.

    That on files (RLIMIT_FSIZE) counts unless it is too small to be of use. Of that on the address space (RLIMIT_AS),
    which batch systems set, a store takes no more than its share: stores of others are mapped, too.
    """
    files, space = resource.getrlimit(resource.RLIMIT_FSIZE)[0], resource.getrlimit(resource.RLIMIT_AS)[0]
    if files != resource.RLIM_INFINITY and files >= _LEAST_FILE:
        capacity = min(capacity, files)
    return capacity if space == resource.RLIM_INFINITY else min(capacity, int(space * _SHARE))


def bound_by_file_limit(capacity: int) -> bool:
    """Whether a store of `capacity` bytes is as large as the limit on files (RLIMIT_FSIZE) allows, in whole pages."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit != resource.RLIM_INFINITY and capacity + os.sysconf("SC_PAGE_SIZE") > limit
