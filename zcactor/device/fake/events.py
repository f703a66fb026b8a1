"""The events of the fake GPUs of one process, in memory that other processes map: an event works between them.

A page holds 128 events of three numbers each: the event's serial number, how often it was recorded, and which of these
records is done. Reading and writing such a number is one access.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from dataclasses import dataclass
from typing import Final

from zcactor.device.driver import EVENT_NBYTES, CudaCode
from zcactor.device.fake import system
from zcactor.device.fake.memory import Refused
from zcactor.device.others import Other

__all__ = ["FakeEvents"]

_NBYTES: Final = 4096
_WORDS: Final = 3
_FIRST: Final = 4
"""Words of a page before its events: 16 random bytes tell whether it is the page that a handle means."""
_EVENTS: Final = 128
_HANDLE: Final = struct.Struct("<8s16sIIIQ36x")
"""An exported event: mark, the page's random bytes, pid, number of the descriptor there, place in the page, serial."""
_MARK: Final = b"zcgpuevt"


class _Page:
    """A page of events."""

    def __init__(self, fd: int, owner: Other | None = None) -> None:
        self.fd = fd
        self.owner = owner
        """The other process whose page it is."""
        self._map = mmap.mmap(fd, _NBYTES, mmap.MAP_SHARED)
        self.words = memoryview(self._map).cast("Q")
        self.free = list(range(_EVENTS))
        self.users = 0

    @property
    def key(self) -> bytes:
        return bytes(self._map[:16])

    @key.setter
    def key(self, key: bytes) -> None:
        self._map[:16] = key

    def close(self) -> None:
        self.words.release()
        self._map.close()
        os.close(self.fd)
        if self.owner is not None:
            self.owner.close()


@dataclass(slots=True)
class _Event:
    page: _Page
    at: int
    """The index of its first word."""
    serial: int


class FakeEvents:
    """The events that one process has made or opened. Any thread may use them."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._pages: list[_Page] = []
        self._opened: dict[tuple[int, bytes], _Page] = {}
        self._events: dict[int, _Event] = {}
        self._next = 1

    def make(self) -> int:
        """Make an event."""
        with self._lock:
            page = next((each for each in self._pages if each.free), None) or self._new_page()
            at = _FIRST + page.free.pop() * _WORDS
            event, self._next = self._next, self._next + 1
            page.words[at + 1] = page.words[at + 2] = 0
            page.words[at] = event
            self._events[event] = _Event(page, at, event)
            return event

    def _new_page(self) -> _Page:
        fd = os.memfd_create(f"{system.NAME}-events", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _NBYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        page = _Page(fd)
        page.key = secrets.token_bytes(16)
        self._pages.append(page)
        return page

    def _find(self, event: int) -> _Event:
        found = self._events.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return found

    def end(self, event: int) -> None:
        """Give up an event."""
        with self._lock:
            found = self._find(event)
            del self._events[event]
            if found.page.owner is None:
                found.page.words[found.at] = 0
                found.page.free.append((found.at - _FIRST) // _WORDS)
                return
            found.page.users -= 1
            if not found.page.users:
                self._opened = {key: page for key, page in self._opened.items() if page is not found.page}
                found.page.close()

    def begin(self, event: int) -> int:
        """Count a record of the event. Returns its number, for `finish`."""
        with self._lock:
            found = self._find(event)
            if found.page.owner is not None:
                raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event records it")
            found.page.words[found.at + 1] += 1
            return int(found.page.words[found.at + 1])

    def finish(self, event: int, record: int) -> None:
        """Note that the work before a record is done."""
        with self._lock:
            found = self._events.get(event)  # it may have been given up meanwhile
            if found is not None and record > found.page.words[found.at + 2]:
                found.page.words[found.at + 2] = record

    def recorded(self, event: int) -> int:
        """The number of the event's last record; 0 for one that was never recorded."""
        with self._lock:
            found = self._find(event)
            return int(found.page.words[found.at + 1]) if found.page.words[found.at] == found.serial else 0

    def reached(self, event: int, record: int) -> bool:
        """Whether the work before a record is done, or will never be: its process has ended, or the event has."""
        with self._lock:
            found = self._events.get(event)
            return found is None or self._reached(found, record) or _is_over(found)

    @staticmethod
    def _reached(found: _Event, record: int) -> bool:
        words = found.page.words
        return words[found.at] != found.serial or words[found.at + 2] >= record

    def done(self, event: int) -> bool:
        """Whether the work before the last record is done."""
        with self._lock:
            found = self._find(event)
            return self._reached(found, found.page.words[found.at + 1])

    def is_lost(self, event: int) -> bool:
        """Whether the event's process ended before the work was done."""
        with self._lock:
            found = self._find(event)
            return _is_over(found) and not self._reached(found, found.page.words[found.at + 1])

    def export(self, event: int) -> bytes:
        """Export an event of this process."""
        with self._lock:
            found = self._find(event)
            if found.page.owner is not None:
                raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event exports it")
            place = (found.at - _FIRST) // _WORDS
            return _HANDLE.pack(_MARK, found.page.key, os.getpid(), found.page.fd, place, found.serial)

    def open(self, exported: bytes) -> int:
        """Open an event of another process."""
        if len(exported) != EVENT_NBYTES:
            raise Refused(CudaCode.INVALID_HANDLE, f"an exported event has {EVENT_NBYTES} bytes, not {len(exported)}")
        mark, key, pid, fd, place, serial = _HANDLE.unpack(exported)
        if mark != _MARK or not 0 < pid != os.getpid() or place >= _EVENTS:
            raise Refused(CudaCode.INVALID_HANDLE, "this is no exported event of another process")
        with self._lock:
            page = self._opened.get((pid, key)) or self._open_page(pid, fd, key)
            at = _FIRST + place * _WORDS
            if page.words[at] != serial or not serial:
                if not page.users:
                    page.close()
                raise Refused(CudaCode.INVALID_HANDLE, "the event has been given up")
            self._opened[pid, key] = page
            page.users += 1
            event, self._next = self._next, self._next + 1
            self._events[event] = _Event(page, at, serial)
            return event

    @staticmethod
    def _open_page(pid: int, fd: int, key: bytes) -> _Page:
        owner = page = None
        try:
            owner = Other(pid)
            mine = owner.open(fd, writable=True)
            if system.sealed_size(mine) == _NBYTES:
                page = _Page(mine, owner)
            else:
                os.close(mine)
        except OSError as error:
            if owner is not None:
                owner.close()
            raise Refused(CudaCode.INVALID_HANDLE, f"process {pid} has no such event") from error
        if page is None:
            owner.close()
        elif page.key == key:
            return page
        else:
            page.close()
        raise Refused(CudaCode.INVALID_HANDLE, f"process {pid} has no such event")

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        with self._lock:
            for page in (*self._pages, *self._opened.values()):
                page.close()
            self._pages.clear()
            self._opened.clear()
            self._events.clear()


def _is_over(event: _Event) -> bool:
    return event.page.owner is not None and event.page.owner.has_ended()
