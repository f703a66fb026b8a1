"""The events of the fake GPUs of one process, whose numbers its engines write."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from zcactor.device.driver import CudaCode, Refused
from zcactor.device.event_pages import EventPages
from zcactor.device.fake import system

if TYPE_CHECKING:
    from zcactor.device.event_pages import EventSlot

__all__ = ["FakeEvents"]


class FakeEvents:
    """The events that one process has made or opened. Any thread may use them."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._pages: Final = EventPages(f"{system.NAME}-events")
        self._events: Final[dict[int, EventSlot]] = {}
        self._next = 1

    def make(self) -> int:
        """Make an event."""
        with self._lock:
            return self._add(self._pages.take())

    def _add(self, slot: EventSlot) -> int:
        event, self._next = self._next, self._next + 1
        self._events[event] = slot
        return event

    def _find(self, event: int) -> EventSlot:
        found = self._events.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return found

    def end(self, event: int) -> None:
        """Give up an event."""
        with self._lock:
            slot = self._find(event)
            del self._events[event]
            page = self._pages.give_back(slot)
            if page is not None:
                page.close()

    def begin(self, event: int) -> int:
        """Count a record of the event. Returns its number, for `finish`."""
        with self._lock:
            slot = self._find(event)
            if slot.page.owner is not None:
                raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event records it")
            return slot.count()

    def finish(self, event: int, record: int) -> None:
        """Note that the work before a record is done."""
        with self._lock:
            slot = self._events.get(event)  # it may have been given up meanwhile
            if slot is not None and record > slot.finished:
                slot.finish(record)

    def recorded(self, event: int) -> int:
        """The number of the event's last record; 0 for one that was never recorded."""
        with self._lock:
            return self._find(event).recorded

    def reached(self, event: int, record: int) -> bool:
        """Whether the work before a record is done, or will never be: its process has ended, or the event has."""
        with self._lock:
            slot = self._events.get(event)
            return slot is None or slot.reached(record) or slot.is_over

    def done(self, event: int) -> bool:
        """Whether the work before the last record is done."""
        with self._lock:
            slot = self._find(event)
            return slot.reached(slot.recorded)

    def is_lost(self, event: int) -> bool:
        """Whether the event's process ended before the work was done."""
        with self._lock:
            slot = self._find(event)
            return slot.is_over and not slot.reached(slot.recorded)

    def export(self, event: int) -> bytes:
        """Export an event of this process."""
        with self._lock:
            return self._pages.export(self._find(event))

    def open(self, exported: bytes) -> int:
        """Open an event of another process."""
        with self._lock:
            return self._add(self._pages.open(exported))

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        with self._lock:
            self._pages.close()
            self._events.clear()
