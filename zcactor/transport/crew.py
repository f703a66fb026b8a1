"""Threads for calls that block on sockets: few for a process, however many peers it has.

A thread takes the next piece of work as soon as it has done one, and ends when none has come for a while. There are as
many as there is work at once, and a few that wait for more.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Crew", "NoThread", "run"]

SPARE: Final = 2 * (os.cpu_count() or 1)
"""Threads that may wait for work: more would not run at once."""
REST: Final = 10.0
"""Seconds without work after which a thread ends. Starting one takes 50 us, so little is lost."""

_Place = queue.SimpleQueue["Callable[[], object]"]


class NoThread(RuntimeError):
    """The system has no thread left."""


class Crew:
    """Runs pieces of work in threads of its own, each at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._resting: list[_Place] = []  # the one that has just begun to rest is the next to work: its stack is warm

    def run(self, work: Callable[[], object]) -> None:
        """Have a thread call `work`, which must not raise. From any thread.

        Raises:
            NoThread: none rests, and the system has none left.
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
            del work  # not held while this rests
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
                work = place.get()  # taken off the list in this moment: work is about to come


_crew = Crew()


def run(work: Callable[[], object]) -> None:
    """`Crew.run` of the process's own."""
    _crew.run(work)


def _forked() -> None:
    """A child has none of the threads, and its copy of the lock may be held for ever."""
    global _crew
    _crew = Crew()


os.register_at_fork(after_in_child=_forked)
