"""The machine and its processes: affinity, descendants, memory, descriptors; from ``/proc`` (proc(5))."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "available_memory", "awake", "cores", "descendants", "describe", "descriptors", "first_on", "hold_core", "on_cores",
    "pss", "rss", "threads",
]  # fmt: skip

_IDLER: Final = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = int(sys.argv[2])
print(flush=True)
while os.getppid() == parent:
    for _ in range(10_000):
        pass
"""
"""The program that keeps a core awake. It ends with the process that has started it."""


def cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_cores(*chosen: int) -> Iterator[None]:
    """Keep this thread, and every process and thread it starts meanwhile, on the cores with these numbers."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def first_on(core: int) -> Iterator[None]:
    """`on_cores` for one core, before all other programs: in the class SCHED_RR (sched(7)), where the user may choose
    that."""
    with on_cores(core), contextlib.ExitStack() as stack:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
            stack.callback(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0))
        yield


def hold_core(core: int) -> None:
    """Keep all threads of this process, and those that they start, on one core, and before all other programs: in the
    class SCHED_RR (sched(7)), where the user may choose that."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, [core])
            with contextlib.suppress(PermissionError):
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def awake(*chosen: int) -> Iterator[None]:
    """Keep the cores with these numbers from halting: each runs a process of the class SCHED_IDLE (sched(7)), which
    makes way at once for any other. The system counts such a core as idle."""
    with contextlib.ExitStack() as stack:
        for core in chosen:
            command = [sys.executable, "-I", "-S", "-c", _IDLER, str(core), str(os.getpid())]
            idler = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            stack.callback(idler.kill)
            assert idler.stdout is not None
            idler.stdout.readline()
        yield


def descendants(pid: int) -> list[int]:
    """The pids of the children of `pid`, of their children, and so on."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:  # it has ended meanwhile
        return found
    for child in children:
        found += [child, *descendants(child)]
    return found


def pss(pid: int) -> int:
    """Proportional set size in bytes: pages shared by n processes count 1/n."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss:") << 10


def rss(pid: int) -> int:
    """Resident set size in bytes."""
    return _kilobytes(Path(f"/proc/{pid}/status"), "VmRSS:") << 10


def available_memory() -> int:
    """Bytes that are available without swapping."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable:") << 10


def _kilobytes(path: Path, field: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(f"{path} has no {field}")


def descriptors() -> int:
    """Open descriptors of this process, without the one for this count."""
    return len(os.listdir("/proc/self/fd")) - 1


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def describe() -> dict[str, Any]:
    """The facts about the machine, the checkout and this moment that readers of the figures need."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty=, with changes", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "commit": done.stdout.strip() or "unknown: this is no checkout",
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "load": [round(figure, 1) for figure in os.getloadavg()],
        "cpu": models[0] if models else platform.machine(),
        "cores": len(cores()),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "shared_huge_pages": _chosen(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
    }


def _chosen(setting: Path) -> str:
    """The word in brackets of a setting that lists its choices; empty where the setting does not exist."""
    return setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else ""
