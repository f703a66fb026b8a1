"""One thread that waits for the next request at many idle sockets, so that none of them needs a thread of its own."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from typing import TYPE_CHECKING

from zcactor.transport.tcp import crew

if TYPE_CHECKING:
    from collections.abc import Callable

    Resume = Callable[[bool], object]
    """``resume(readable)``"""

__all__ = ["Waiting", "until_readable"]


class Waiting:
    """Idle sockets, each with a function that is called once. There is a thread while there is such a socket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None  # while there is a thread
        self._resume: dict[int, tuple[float, Resume]] = {}  # by descriptor, in the order of the calls

    def until_readable(self, fd: int, seconds: float, resume: Resume) -> None:
        """Have ``resume(True)`` called when `fd` has bytes or has ended, or ``resume(False)`` after so many seconds.

        `seconds` must be the same in all calls. The caller must not close `fd` before. `resume` runs in the one thread,
        and must neither raise nor block. Any thread may call this.

        Raises:
            OSError: no descriptor or no thread is left; `resume` is never called then.
        """
        with self._lock:
            begins = self._epoll is None
            epoll = self._epoll = self._epoll or select.epoll()
            self._resume[fd] = time.monotonic() + seconds, resume
            try:
                if begins:
                    crew.run(self._wait)
                epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLONESHOT)
            except (OSError, crew.NoThread) as error:
                del self._resume[fd]
                if begins and isinstance(error, crew.NoThread):
                    self._end()
                raise OSError(*error.args) from error

    def forget(self) -> None:
        """Close a forked child's copy of the descriptor, without the lock that a thread may have held."""
        self._end()

    def _end(self) -> None:
        epoll, self._epoll = self._epoll, None
        if epoll is not None:
            epoll.close()

    def _wait(self) -> None:
        epoll = self._epoll
        assert epoll is not None
        pause = 0.0
        while True:
            found = {fd for fd, _ in epoll.poll(pause)}
            with self._lock:
                now = time.monotonic()
                late = [fd for fd, (until, _) in self._resume.items() if until <= now and fd not in found]
                calls = [(self._taken(fd), True) for fd in found] + [(self._taken(fd), False) for fd in late]
                if not self._resume:
                    self._end()
                pause = min((until for until, _ in self._resume.values()), default=now) - now
            for resume, readable in calls:
                resume(readable)
            del calls
            if self._epoll is not epoll:
                return

    def _taken(self, fd: int) -> Resume:
        assert self._epoll is not None
        with contextlib.suppress(FileNotFoundError):
            self._epoll.unregister(fd)
        return self._resume.pop(fd)[1]


_waiting = Waiting()


def until_readable(fd: int, seconds: float, resume: Resume) -> None:
    """Call `Waiting.until_readable` of the process's own instance."""
    _waiting.until_readable(fd, seconds, resume)


def _forked() -> None:
    """Replace the instance in a forked child, which has no such thread. The epoll instance belongs to the parent, so
    its copy is only closed."""
    global _waiting
    gone, _waiting = _waiting, Waiting()
    gone.forget()


os.register_at_fork(after_in_child=_forked)
