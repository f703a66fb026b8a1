"""Events of GPUs in memory that other processes map, so that they work between processes.

A page holds 128 events of three numbers each: the event's serial number, how often it was recorded, and which of these
records is done. Reading and writing such a number is one access. The drivers differ in how the last one is written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from typing import Final

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.others import Other
from zcactor.device.sealed import sealed_memory, sealed_size

__all__ = ["EVENT_PAGE_NBYTES", "EventPage", "EventPages", "EventSlot"]

EVENT_PAGE_NBYTES: Final = 4096
"""Bytes of a page."""
_WORDS: Final = 3
_FIRST: Final = 4
"""Words of a page before its events: 16 random bytes tell whether it is the page that a handle means."""
_EVENTS: Final = 128
_HANDLE: Final = struct.Struct("<8s16sIIIQ36x")
"""An exported event: mark, the page's random bytes, pid, number of the descriptor there, place in the page, serial."""
_MARK: Final = b"zcgpuevt"


class EventPage:
    """A page of events.

    Args:
        fd: the memory, which the page closes.
        owner: the other process whose page it is; None for one of this process.
    """

    def __init__(self, fd: int, owner: Other | None = None) -> None:
        self.fd: Final = fd
        self.owner: Final = owner
        self._map: Final = mmap.mmap(fd, EVENT_PAGE_NBYTES, mmap.MAP_SHARED)
        self.words: Final = memoryview(self._map).cast("Q")
        self.free: Final = list(range(_EVENTS))
        """The places without an event."""
        self.users = 0
        """Number of opened events in another process's page."""
        self.is_watched = False
        """Whether the end of the other process is noticed."""

    @property
    def address(self) -> int:
        """The address of the page in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def key(self) -> bytes:
        """The random bytes."""
        return bytes(self._map[:16])

    @key.setter
    def key(self, key: bytes) -> None:
        self._map[:16] = key

    def slots(self) -> list[EventSlot]:
        """All events of the page that were not given up."""
        places = range(_FIRST, _FIRST + _EVENTS * _WORDS, _WORDS)
        return [EventSlot(self, at, serial) for at in places if (serial := int(self.words[at]))]

    def close(self) -> None:
        """Give it back to the system."""
        self.words.release()
        self._map.close()
        os.close(self.fd)
        if self.owner is not None:
            self.owner.close()


@dataclass(frozen=True, slots=True)
class EventSlot:
    """The place of an event in a page."""

    page: EventPage
    at: int
    """The index of its first word."""
    serial: int

    @property
    def is_there(self) -> bool:
        """Whether the event has not been given up by the process that made it."""
        return bool(self.page.words[self.at] == self.serial)

    @property
    def recorded(self) -> int:
        """The number of the last record; 0 for an event that was never recorded, or was given up."""
        return int(self.page.words[self.at + 1]) if self.is_there else 0

    @property
    def finished(self) -> int:
        """The number of the last record whose work is done."""
        return int(self.page.words[self.at + 2])

    def count(self) -> int:
        """Count a record. Returns its number."""
        self.page.words[self.at + 1] += 1
        return int(self.page.words[self.at + 1])

    def uncount(self) -> None:
        """Undo `count`, as the work was not queued."""
        self.page.words[self.at + 1] -= 1

    @property
    def done_nbytes(self) -> int:
        """Bytes from the beginning of the page to the number of the last record whose work is done."""
        return 8 * (self.at + 2)

    def finish(self, record: int) -> None:
        """Note that the work before a record is done."""
        self.page.words[self.at + 2] = record

    def reached(self, record: int) -> bool:
        """Whether the work before a record is done, or the event was given up."""
        return not self.is_there or self.finished >= record

    @property
    def is_over(self) -> bool:
        """Whether the process has ended that would finish it."""
        return self.page.owner is not None and self.page.owner.has_ended()


class EventPages:
    """The pages that one process has made or opened. The caller locks.

    Args:
        name: of the memory of pages that are made here.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._pages: Final[list[EventPage]] = []
        self._opened: dict[tuple[int, bytes], EventPage] = {}
        self._serial = 0

    def take(self) -> EventSlot:
        """Make an event."""
        page = next((each for each in self._pages if each.free), None) or self._new_page()
        at = _FIRST + page.free.pop() * _WORDS
        self._serial += 1
        page.words[at + 1] = page.words[at + 2] = 0
        page.words[at] = self._serial
        return EventSlot(page, at, self._serial)

    def _new_page(self) -> EventPage:
        page = EventPage(sealed_memory(self._name, EVENT_PAGE_NBYTES))
        page.key = secrets.token_bytes(16)
        self._pages.append(page)
        return page

    def give_back(self, slot: EventSlot) -> EventPage | None:
        """Give up an event. Returns the other process's page of which no event is open any more, which is the caller's
        to close; None for any other."""
        page = slot.page
        if page.owner is None:
            page.words[slot.at] = 0
            page.free.append((slot.at - _FIRST) // _WORDS)
            return None
        page.users -= 1
        if page.users:
            return None
        self._opened = {key: each for key, each in self._opened.items() if each is not page}
        return page

    @staticmethod
    def export(slot: EventSlot) -> bytes:
        """Export an event of this process.

        Raises:
            Refused: it is another process's.
        """
        if slot.page.owner is not None:
            raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event exports it")
        place = (slot.at - _FIRST) // _WORDS
        return _HANDLE.pack(_MARK, slot.page.key, os.getpid(), slot.page.fd, place, slot.serial)

    def open(self, exported: bytes) -> EventSlot:
        """Open an event of another process.

        Raises:
            Refused: there is no such event.
        """
        if len(exported) != EVENT_NBYTES:
            raise Refused(CudaCode.INVALID_HANDLE, f"an exported event has {EVENT_NBYTES} bytes, not {len(exported)}")
        mark, key, pid, fd, place, serial = _HANDLE.unpack(exported)
        if mark != _MARK or not 0 < pid != os.getpid() or place >= _EVENTS:
            raise Refused(CudaCode.INVALID_HANDLE, "this is no exported event of another process")
        page = self._opened.get((pid, key)) or _open_page(pid, fd, key)
        slot = EventSlot(page, _FIRST + place * _WORDS, serial)
        if not serial or not slot.is_there:
            if not page.users:
                page.close()
            raise Refused(CudaCode.INVALID_HANDLE, "the event has been given up")
        self._opened[pid, key] = page
        page.users += 1
        return slot

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        for page in (*self._pages, *self._opened.values()):
            page.close()
        self._pages.clear()
        self._opened.clear()


def _open_page(pid: int, fd: int, key: bytes) -> EventPage:
    owner = page = None
    try:
        owner = Other(pid)
        mine = owner.open(fd, writable=True)
        if sealed_size(mine) == EVENT_PAGE_NBYTES:
            page = EventPage(mine, owner)
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
