"""Control groups made of plain files, as the kernel shows them in either version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zcactor.objectstore.groups import MemoryGroup, own_groups


@dataclass
class Usage:
    """Bytes of a group: its limit (None for no limit), the used ones, and the used ones that can be dropped."""

    limit: int | None = None
    used: int = 0
    inactive: int = 0


def groups_of(base: Path, levels: Mapping[str, Usage], version: int = 2, root: str = "/") -> tuple[MemoryGroup, ...]:
    """Make groups, and return those that a process in the last of `levels` finds.

    Args:
        base: the folder of the files.
        levels: groups by path below the mount, the process's own one last; version 2 needs none for its root.
        version: the version of control groups.
        root: the path of the group that is mounted.
    """
    mount = base / "a mount"
    for path, usage in levels.items():
        write(mount / path, usage, version)
    own = (root.rstrip("/") + "/" + list(levels)[-1]).rstrip("/") or "/"
    return own_groups(process_in(base, mount, own, "memory", version, root))


def process_in(base: Path, mount: Path, own: str, controller: str, version: int, root: str = "/") -> Path:
    """Make the folder, as in proc(5), of a process in the group `own`.

    Args:
        base: the folder of the files.
        mount: the place where the groups are mounted.
        own: the process's own group.
        controller: the controllers of version 1 that are mounted there; others are mounted elsewhere.
        version: the version of control groups.
        root: the path of the group that is mounted.
    """
    proc = base / "proc"
    proc.mkdir(exist_ok=True)
    other = "memory" if "cpu" in controller else "cpu,cpuacct"
    mounts = ["22 1 0:21 / /proc rw,nosuid - proc proc rw", f"23 1 0:22 / /elsewhere rw - cgroup cgroup rw,{other}"]
    point = str(mount).replace(" ", r"\040")
    if version == 2:
        (proc / "cgroup").write_text(f"0::{own}\n")
        mounts.append(f"24 1 0:23 {root} {point} rw shared:4 - cgroup2 cgroup2 rw,nsdelegate")
    else:
        (proc / "cgroup").write_text(f"5:{other}:/elsewhere\n4:{controller}:{own}\n0::/\n")
        mounts.append(f"24 1 0:23 {root} {point} rw - cgroup cgroup rw,{controller}")
        mounts.append(f"25 1 0:24 / {base / 'unified'} rw - cgroup2 cgroup2 rw")
    (proc / "mountinfo").write_text("\n".join(mounts) + "\n")
    return proc


def write(folder: Path, usage: Usage, version: int = 2) -> None:
    """Write the files of one group."""
    folder.mkdir(parents=True, exist_ok=True)
    if version == 2:
        limit, names = "max" if usage.limit is None else str(usage.limit), ("memory.max", "memory.current")
        statistics = f"anon 4096\nfile 8192\nactive_file 77\ninactive_file {usage.inactive}\n"
    else:
        limit = str((1 << 63) - 4096 if usage.limit is None else usage.limit)
        names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        statistics = f"cache 4096\ninactive_file 12345678901\ntotal_cache 1\ntotal_inactive_file {usage.inactive}\n"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage.used}\n")
    (folder / "memory.stat").write_text(statistics)
