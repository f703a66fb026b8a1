"""Parked blocks, which a peer may go on reading though no connection leads to it any more.

A peer that maps our arena reads arrays in place, also after its connection has ended, and whether or not our runtime
still runs. The blocks that it had leased are kept here until its process is gone, or until it has connected anew and
reported the leases that it still holds. They are never freed on a timer, and never because of a goodbye.
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

    from zcactor.transport.os_process import OsProcess

__all__ = ["Parking"]

_RETRY: Final = 1.0
"""Seconds until the next attempt to watch a process, after no descriptor was left for it."""


class Parking:
    """The blocks that processes of this host, which map one arena, may still read. Any thread may call any method.

    A daemon thread waits for the ends of these processes, with an event loop or without. The thread runs only while
    something is parked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parked: dict[OsProcess, dict[Hashable, dict[int, object]]] = {}  # by reader, by connection, by object
        self._watched: dict[OsProcess, int] = {}  # pidfds
        self._thread: threading.Thread | None = None
        self._epoll: select.epoll | None = None
        self._wake = -1  # an eventfd
        self._roused = threading.Event()  # where no descriptor is left for that

    @property
    def total(self) -> int:
        """The number of parked objects. An object counts once for each connection by which it was leased."""
        return sum(len(kept) for tables in self._parked.copy().values() for kept in tables.copy().values())

    def connections_of(self, reader: OsProcess) -> list[Hashable]:
        """The keys of the connections by which `reader` had leased parked objects."""
        with self._lock:
            return list(self._parked.get(reader, ()))

    def park(self, reader: OsProcess, connection: Hashable, kept: Mapping[int, object]) -> None:
        """Keep the objects that `reader` has leased until its process is gone.

        Args:
            reader: the peer, which maps our arena. The end of a process without a process id is never known.
            connection: key of the connection by which they were leased.
            kept: the holder that keeps the bytes of each object, by object id.
        """
        with self._lock:
            self._parked.setdefault(reader, {}).setdefault(connection, {}).update(kept)
        del kept
        self.sweep()
        with self._lock:
            if self._thread is None and any(other.pid for other in self._parked):
                self._thread = threading.Thread(target=self._run, name="zcactor-parking", daemon=True)
                self._thread.start()
            else:
                self._rouse()

    def hold(self, reader: OsProcess, connections: Iterable[Hashable], held: Collection[int]) -> None:
        """Release all that `reader` had leased by connections that have ended at its side, except the objects that it
        still holds."""
        dropped = []
        with self._lock:
            tables = self._parked.get(reader, {})
            for connection in connections:
                kept = tables.get(connection, {})
                dropped.extend([kept.pop(object_id) for object_id in list(kept) if object_id not in held])
                if not kept:
                    tables.pop(connection, None)
            if not tables:
                self._parked.pop(reader, None)
        dropped.clear()  # after the lock is released, as in `sweep`
        self.sweep()

    def sweep(self) -> None:
        """Release the objects of processes that have ended. When nothing is left, the thread ends."""
        dropped = []
        with self._lock:
            for reader in list(self._parked):
                if self._is_gone(reader):
                    dropped.append(self._parked.pop(reader))
                    if reader in self._watched:
                        os.close(self._watched.pop(reader))
            thread = None if any(reader.pid for reader in self._parked) else self._thread
            if thread is not None:
                self._rouse()
        dropped.clear()  # after the lock is released: a finalizer may run Python
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _is_gone(self, reader: OsProcess) -> bool:
        fd = self._watched.get(reader)
        if fd is not None:
            return _has_ended(fd)
        if not reader.pid:
            return False
        try:
            fd = reader.open()
        except OSError:  # no descriptor is left: the next sweep tries again
            return False
        if fd is None:
            return True
        ended = _has_ended(fd)
        os.close(fd)
        return ended

    def _run(self) -> None:
        while True:
            with self._lock:
                if not any(reader.pid for reader in self._parked):
                    self._stop()
                    return
                all_watched = self._watch()
                epoll = self._epoll if self._wake >= 0 else None
            if epoll is None:
                self._roused.wait(_RETRY)  # no descriptor is left to wait by
                self._roused.clear()
            else:
                for fd, _ in epoll.poll(None if all_watched else _RETRY):
                    if fd == self._wake:
                        os.eventfd_read(fd)
            self.sweep()

    def _rouse(self) -> None:
        """Have the thread look again at once. Called under the lock."""
        self._roused.set()
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _watch(self) -> bool:
        """Watch every process. Returns whether the end of each wakes the thread. Called under the lock."""
        try:
            if self._epoll is None:
                self._epoll = select.epoll()
            if self._wake < 0:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                self._epoll.register(self._wake, select.EPOLLIN)
            for reader in self._parked:
                if reader.pid and reader not in self._watched:
                    fd = reader.open()
                    if fd is None:  # it has ended since the last sweep, so the next one comes at once
                        os.eventfd_write(self._wake, 1)
                        continue
                    self._watched[reader] = fd
                    self._epoll.register(fd, select.EPOLLIN)
        except OSError:  # no descriptor is left
            return False
        return True

    def _stop(self) -> None:
        """Close all descriptors and forget the thread. Called under the lock."""
        for fd in (*self._watched.values(), self._wake):
            if fd >= 0:
                os.close(fd)
        self._watched.clear()
        self._wake = -1
        if self._epoll is not None:
            self._epoll.close()
        self._epoll = None
        self._thread = None


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
