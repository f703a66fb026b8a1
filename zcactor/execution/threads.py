"""The threads for plain methods of shared actors: a few for all of them, and more where those few block.

A thread for each actor would be thousands of threads in a process of small actors. A bounded number would be a trap:
plain methods may wait for each other, and a method that others wait for must find a thread. So a queued function waits
at most `PATIENCE` for a free thread, and then a thread is added. Threads without work end after a while.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from zcactor.machine import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Runner", "Threads"]

PATIENCE: Final = 0.05
"""Seconds that a function waits for a thread until one is added: far above the time of a short method, and little
beside the time of a method that blocks."""
IDLE: Final = 10.0
"""Seconds after which a thread without work ends."""


class Runner(Protocol):
    """The executor of plain methods of several actors: `Threads`, or in a simulation the loop itself."""

    @property
    def wanted(self) -> bool:
        """Whether a function waits for its turn: a running one may end early for it."""

    def submit(self, function: Callable[[], None]) -> None:
        """Run `function`, which raises nothing, later. From any thread."""

    def close(self) -> None:
        """Run no more functions than are queued. Idempotent; does not wait."""


class _Thread:
    """The lock that one thread waits with, and its next function."""

    __slots__ = ("function", "woken")

    def __init__(self) -> None:
        self.function: Callable[[], None] | None = None
        self.woken = threading.Lock()
        self.woken.acquire()


class Threads:
    """Threads that run functions in the order of submission, as far as threads are free.

    Args:
        name: of the threads, for debuggers.
        size: threads that are started without delay when needed; None for two per processor.
    """

    def __init__(self, name: str, size: int | None = None) -> None:
        self._name = name
        self.size = size or 2 * usable_cpus()
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._queued = 0
        """The number of functions so far that found no thread free."""
        self._idle: list[_Thread] = []
        """The last thread to become idle is the first to be used, so that those beyond the need end."""
        self._count = 0
        self._made = 0
        self._watching = False
        self._closed = threading.Event()

    @property
    def count(self) -> int:
        """The number of threads."""
        return self._count

    @property
    def wanted(self) -> bool:
        """Whether a function waits for a thread: a function that runs on one may let it go."""
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
            del function  # the objects of a call must not live until the next call comes

    def _next(self, thread: _Thread) -> Callable[[], None] | None:
        """Wait for a function; None when the thread is to end."""
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
            thread.woken.acquire()  # a function was assigned just then
        function, thread.function = thread.function, None
        if function is None:
            with self._lock:
                self._count -= 1
        return function

    def _watch(self) -> None:
        """Add a thread whenever a function has waited for `PATIENCE`; ends when no function waits."""
        while not self._closed.is_set():
            before = self._queued
            self._closed.wait(PATIENCE)
            with self._lock:
                # The first in the queue is the first to go: one from before still waits if more wait than came since.
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
