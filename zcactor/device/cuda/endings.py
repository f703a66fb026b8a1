"""The ends of other processes, seen by a thread: a program may be waiting for a GPU in all of its own threads."""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.event_pages import EventPage

__all__ = ["Endings"]


class Endings:
    """A watch over the processes of pages. Any thread may use it. A thread runs from the first page on, until `close`.

    Args:
        ended: called with each watched page whose process has ended, by that thread.
    """

    def __init__(self, ended: Callable[[EventPage], None]) -> None:
        self._ended: Final = ended
        self._lock: Final = threading.Lock()
        self._pages: Final[dict[int, EventPage]] = {}
        """The watched pages, by the descriptors of their processes."""
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None

    def watch(self, page: EventPage) -> None:
        """Watch the process of a page, which has an owner. Idempotent."""
        owner = page.owner
        if owner is None or page.is_watched:
            return
        with self._lock:
            page.is_watched = True
            if self._epoll is None:
                self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_CLOEXEC)
                self._epoll.register(self._wake, select.EPOLLIN)
                self._thread = threading.Thread(target=self._run, args=[self._epoll], name="zcactor-cuda", daemon=True)
                self._thread.start()
            self._pages[owner.fileno()] = page
            self._epoll.register(owner.fileno(), select.EPOLLIN)

    def forget(self, page: EventPage) -> None:
        """Watch the process of a page no more, before the page is closed."""
        with self._lock:
            if page.owner is not None and self._pages.pop(page.owner.fileno(), None) is not None and self._epoll:
                self._epoll.unregister(page.owner.fileno())

    def _run(self, epoll: select.epoll) -> None:
        while True:
            for fd, _ in epoll.poll():
                if fd == self._wake:
                    return
                with self._lock:
                    page = self._pages.pop(fd, None)
                    if page is not None:
                        epoll.unregister(fd)
                        self._ended(page)

    def close(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._epoll is None:
            return
        os.eventfd_write(self._wake, 1)
        thread.join()
        self._epoll.close()
        os.close(self._wake)
        self._epoll = None
