"""The things that a test has left: tasks, threads, children, descriptors, leases, and bytes of a store."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from zcactor.testing.inner import described
from zcactor.testing.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zcactor.testing.runtime import LoopbackRuntime

__all__ = ["Snapshot", "memory_left"]

SETTLING: Final = 1.0
"""Seconds in which threads, children and others that are about to end do so."""
_PAUSE: Final = 0.02
"""Seconds from the first collection of garbage to the second; each further pause is twice as long."""
_OWN_FILE: Final = "/memfd:zcactor-arena"
"""The descriptor of an arena stays open as long as bytes in it do, which are reported by themselves."""
_SOCKET: Final = "socket:"
"""A socket in the place of one from before: uvloop opens two of its own anew for each run of the loop."""
_OF_EXECUTOR: Final = ("asyncio_", "uvloop_")
"""Threads of a loop's default executor end with the loop."""


class Snapshot:
    """The tasks, threads, children and descriptors of this process at one moment.

    Args:
        loop: the loop whose tasks count; None for no tasks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._tasks = set() if loop is None else asyncio.all_tasks(loop)
        self._threads = set(threading.enumerate())
        self._children = _children()
        self._descriptors = _descriptors()

    def left(self) -> list[str]:
        """The things of this moment that were not there then, a line for each."""
        return [*self._tasks_left(), *self._threads_left(), *self._children_left(), *self._descriptors_left()]

    def _tasks_left(self) -> Iterable[str]:
        if self._loop is None:
            return
        for task in asyncio.all_tasks(self._loop) - self._tasks:
            if task is not asyncio.current_task():
                yield described(task)

    def _threads_left(self) -> Iterable[str]:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread in self._threads or thread.name.startswith(_OF_EXECUTOR) or not thread.is_alive():
                continue
            frame = frames.get(thread.ident or 0)
            at = "" if frame is None else f", which is in {frame.f_code.co_qualname} ({_place(frame)})"
            yield f"thread {thread.name!r}{at}"

    def _children_left(self) -> Iterable[str]:
        for pid, command in _children().items():
            if pid not in self._children:
                yield f"child {pid} ({command})"

    def _descriptors_left(self) -> Iterable[str]:
        for number, target in _descriptors().items():
            before = self._descriptors.get(number, "")
            if before.startswith(_SOCKET) and target.startswith(_SOCKET):
                continue
            if before != target and not target.startswith(_OWN_FILE):
                yield f"descriptor {number} ({target})"


def _place(frame: Any) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _children() -> dict[int, str]:
    """The command of each child of this process. One that has ended and was not waited for counts."""
    found: dict[int, str] = {}
    helper = sys.modules.get("multiprocessing.resource_tracker")
    tracker = None if helper is None else helper._resource_tracker._pid  # one for all tests; it ends with this process
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                pids = [int(each) for each in file.read().split()]
        except FileNotFoundError:  # the thread has ended
            continue
        found.update({pid: _command(pid) for pid in pids if pid != tracker})
    return found


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        ended = ", which has ended and was not waited for" if rest.split()[0] == "Z" else ""
        return (words[:80] or name) + ended
    except (FileNotFoundError, ProcessLookupError):
        return "it has just ended"


def _descriptors() -> dict[int, str]:
    """The target of each open descriptor."""
    found: dict[int, str] = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def memory_left(runtime: LoopbackRuntime) -> list[str]:
    """The leases and the bytes that are left of a runtime which has ended, a line for each."""
    found = []
    for file, reader, owner in runtime.network.mapped:
        made = file()
        leases = [] if made is None else made.leases
        if leases:
            nbytes = sum(lease.nbytes for lease in leases)
            holder, giver = runtime.label(reader.process), runtime.label(owner.process)
            found.append(f"{_count(len(leases), 'lease')} on {nbytes:,} bytes: {holder} holds arrays of {giver}")
    for inner in runtime.all:
        for other in runtime.all:
            inner.forget_reader(other)
        stats = inner.process.store.stats()
        if stats.used:
            blocks, label = _count(stats.blocks, "block"), runtime.label(inner.process.process)
            found.append(f"{stats.used:,} bytes in {blocks} of the store of {label}")
        found += inner.left
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


async def settled(look: Callable[[], list[str]]) -> list[str]:
    """The result of `look` once it is empty, or after `SETTLING` seconds. Cycles of garbage do not count: they are
    collected now and again, since tasks and threads that end leave some."""
    end, pause = time.monotonic() + SETTLING, _PAUSE
    while look():
        gc.collect()
        try:
            await until(lambda: not look(), "something is left", pause)
        except TimeoutError:
            if time.monotonic() >= end:
                return look()
            pause *= 2
    return []
