"""Threads for calls that block on sockets: few in a process, however many peers it has.

A thread takes the next piece of work as soon as it has done one, and ends after a time without work. There are as many
threads as pieces of work at the same time, and a few that wait for more.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Final

from zcactor.machine import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Crew", "NoThread", "run"]

SPARE: Final = 2 * usable_cpus()
"""Threads that may wait for work. The processors could not run more of them at the same time."""
REST: Final = 10.0
"""Seconds without work after which a thread ends. Starting another one takes 50 us."""

_Place = queue.SimpleQueue["Callable[[], object]"]


class NoThread(RuntimeError):
    """The system cannot start another thread."""


class Crew:
    """A group of threads, which runs each piece of work at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting: list[_Place] = []  # the last one is the next to work: its stack is in the cache

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread call `work`, which must not raise. Any thread may call this.

        Raises:
            NoThread: no thread is idle, and the system cannot start another one.
        """
        with self._lock:
            place = self._resting.pop() if self._resting else None
        if place is None:
            try:
                threading.Thread(target=self._work, args=(work,), name="zcactor data", daemon=True).start()
            except RuntimeError as error:
                raise NoThread(*error.args) from error
        else:
            place.put(work)

    def _work(self, work: Callable[[], object]) -> None:
        place: _Place = queue.SimpleQueue()
        while True:
            work()
            del work  # an idle thread does not hold it
            with self._lock:
                if len(self._resting) >= SPARE:
                    return
                self._resting.append(place)
            try:
                work = place.get(timeout=REST)
            except queue.Empty:
                with self._lock:
                    if place in self._resting:
                        self._resting.remove(place)
                        return
                work = place.get()  # it was taken off the list at this moment: work is about to arrive


_crew = Crew()


def run(work: Callable[[], object]) -> None:
    """Call `Crew.run` of the process's crew."""
    _crew.run(work)


def _forked() -> None:
    """Replace the crew in a forked child, which has no such threads and whose copy of the lock may be locked."""
    global _crew
    _crew = Crew()


os.register_at_fork(after_in_child=_forked)
