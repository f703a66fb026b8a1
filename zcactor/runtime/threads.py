"""The threads that shared actors run their plain methods on: a few for all of them, and more where that few block.

A thread for each actor would be thousands of them in a process of small actors. A bounded number would be a trap: plain
methods may wait for each other, and those that are waited for must find a thread. So what is queued waits
`PATIENCE` at most for one to be free, and then one is added; threads that have nothing to do end after a while.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Runner", "Threads"]

PATIENCE: Final = 0.05
"""Seconds that something waits for a thread until one is added: far above what a short method takes, and little beside
what one that blocks does."""
IDLE: Final = 10.0
"""Seconds after which a thread that has nothing to do ends."""


class Runner(Protocol):
    """What plain methods of several actors run on: `Threads`, or in a simulation the loop itself."""

    @property
    def wanted(self) -> bool:
        """Whether something waits for its turn: what runs may end early for it."""

    def submit(self, function: Callable[[], None]) -> None:
        """Run `function`, which raises nothing, later. From any thread."""

    def close(self) -> None:
        """Run nothing more than is queued. Idempotent; does not wait."""


class _Thread:
    """What one thread waits with."""

    __slots__ = ("function", "woken")

    def __init__(self) -> None:
        self.function: Callable[[], None] | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class Threads:
    """Runs functions on threads, in the order in which they were given as far as threads are free.

    Args:
        name: of the threads, for debuggers.
        size: threads that are started at once where they are needed; None for two per processor.
    """

    def __init__(self, name: str, size: int | None = None) -> None:
        self._name = name
        self.size = size or 2 * len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._queued = 0
        """Functions that found no thread free, ever."""
        self._idle: list[_Thread] = []
        """The last to become idle is the first to be used, so that those beyond the need end."""
        self._count = 0
        self._made = 0
        self._watching = False
        self._closed = threading.Event()

    @property
    def count(self) -> int:
        """The threads there are."""
        return self._count

    @property
    def wanted(self) -> bool:
        """Whether something waits for a thread: who runs on one may let it go."""
        return bool(self._queue)

    def submit(self, function: Callable[[], None]) -> None:
        """Run `function`, which raises nothing, on a thread. From any thread."""
        with self._lock:
            if self._idle:
                thread = self._idle.pop()
                thread.function = function
                thread.woken.release()
                return
            self._queue.append(function)
            self._queued += 1
            grow = self._count < self.size
            if grow:
                self._count += 1
            watch = not grow and not self._watching
            self._watching = self._watching or watch
        if grow:
            self._start()
        if watch:
            threading.Thread(target=self._watch, name=f"{self._name} watch", daemon=True).start()

    def _start(self) -> None:
        self._made += 1
        threading.Thread(target=self._work, name=f"{self._name} {self._made}", daemon=True).start()

    def _work(self) -> None:
        thread = _Thread()
        while True:
            function = self._next(thread)
            if function is None:
                return
            function()
            del function  # what a call held must not live until the next one comes

    def _next(self, thread: _Thread) -> Callable[[], None] | None:
        """Wait for something to do; None when the thread is to end."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if self._closed.is_set():
                self._count -= 1
                return None
            self._idle.append(thread)
        if not thread.woken.acquire(timeout=IDLE):
            with self._lock:
                if thread in self._idle:
                    self._idle.remove(thread)
                    self._count -= 1
                    return None
            thread.woken.acquire()  # it was given something just then
        function, thread.function = thread.function, None
        if function is None:
            with self._lock:
                self._count -= 1
        return function

    def _watch(self) -> None:
        """Add a thread whenever something has waited for `PATIENCE`; ends when nothing waits for one."""
        while not self._closed.is_set():
            before = self._queued
            self._closed.wait(PATIENCE)
            with self._lock:
                # The first that came is the first to go: one from before waits still if more wait than came since.
                late = len(self._queue) > self._queued - before
                if late:
                    self._count += 1
                elif not self._queue:
                    self._watching = False
                    return
            if late:
                self._start()

    def close(self) -> None:
        """End the threads as they become free. Idempotent; does not wait."""
        with self._lock:
            self._closed.set()
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.woken.release()
