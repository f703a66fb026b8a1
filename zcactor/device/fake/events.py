"""The events of the fake GPUs of one process: counts of records, and places in pages for other processes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from zcactor.device.driver import CudaCode, Refused
from zcactor.device.event_pages import EventPages, EventSlot
from zcactor.device.fake import system

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FakeEvents"]


@dataclass(slots=True)
class _Own:
    """An event that was made here."""

    recorded: int = 0
    """The number of the last record; 0 before the first."""
    pending: set[int] = field(default_factory=set)
    """The numbers of records whose work is not done. A later one may be done earlier, on another stream."""
    exported: EventSlot | None = None
    """The place of the last record, where it was exported."""


class FakeEvents:
    """The events that one process has made or opened. Any thread may use them."""

    def __init__(self) -> None:
        self._lock: Final = threading.RLock()  # a finalizer that makes arrays may run inside it
        self._pages: Final = EventPages(f"{system.NAME}-events")
        self._events: Final[dict[int, _Own | EventSlot]] = {}
        self._ended: Final[dict[int, _Own]] = {}
        """Events that were given up before their work was done."""
        self._promised: Final[dict[tuple[int, int], EventSlot]] = {}
        """The places of exported records that are not done, by event and record."""
        self._next = 1

    def make(self) -> int:
        """Make an event."""
        with self._lock:
            return self._add(_Own())

    def _add(self, made: _Own | EventSlot) -> int:
        event, self._next = self._next, self._next + 1
        self._events[event] = made
        return event

    def _find(self, event: int) -> _Own | EventSlot:
        found = self._events.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return found

    def end(self, event: int) -> None:
        """Give up an event."""
        with self._lock:
            found = self._find(event)
            del self._events[event]
            if isinstance(found, EventSlot):
                self._pages.leave(found)
            elif found.pending:
                self._ended[event] = found

    def begin(self, event: int) -> int:
        """Count a record of the event. Returns its number, for `finish`."""
        with self._lock:
            found = self._find(event)
            if isinstance(found, EventSlot):
                raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event records it")
            found.recorded += 1
            found.pending.add(found.recorded)
            found.exported = None
            return found.recorded

    def finish(self, event: int, record: int) -> None:
        """Note that the work before a record is done."""
        with self._lock:
            found = self._ended.get(event) or self._events[event]
            if isinstance(found, _Own):
                found.pending.discard(record)
                if not found.pending:
                    self._ended.pop(event, None)
            slot = self._promised.pop((event, record), None)
            if slot is not None:
                slot.finish()

    def passed(self, event: int) -> Callable[[], bool] | None:
        """A function that tells whether the work before the last record is done, or will never be, as its process has
        ended. None where it is. To give the event up changes nothing for those that wait."""
        with self._lock:
            found = self._find(event)
            if isinstance(found, EventSlot):
                return None if found.passed() else lambda: found.passed() or found.page.is_over
            record, pending = found.recorded, found.pending
            return (lambda: record not in pending) if record in pending else None

    def done(self, event: int) -> bool:
        """Whether the work before the last record is done."""
        with self._lock:
            found = self._find(event)
            return found.done() if isinstance(found, EventSlot) else found.recorded not in found.pending

    def is_lost(self, event: int) -> bool:
        """Whether the event's process ended before the work was done."""
        with self._lock:
            found = self._find(event)
            return isinstance(found, EventSlot) and found.lost()

    def page(self) -> int:
        """A descriptor of the page with the exported events of this process."""
        with self._lock:
            return self._pages.fd()

    def add_page(self, fd: int, process: int) -> None:
        """Know the page of another process."""
        with self._lock:
            for page in self._pages.ended():
                page.close()
            self._pages.add(fd, process)

    def export(self, event: int) -> bytes:
        """Export the last record of an event of this process."""
        with self._lock:
            found = self._find(event)
            if isinstance(found, EventSlot):
                return self._pages.export(found)
            if found.exported is None:
                found.exported = self._pages.take()
                if found.recorded in found.pending:
                    self._promised[event, found.recorded] = found.exported
                else:
                    found.exported.finish()
            return self._pages.export(found.exported)

    def lose(self) -> None:
        """See `zcactor.device.driver.GpuDriver.lose_events`."""
        with self._lock:
            self._pages.lose()

    def promise(self) -> int:
        """Make an event that is not recorded."""
        with self._lock:
            return self._add(self._pages.promise())

    def keep(self, event: int, *, done: bool) -> None:
        """Tell the outcome of a promised event."""
        with self._lock:
            found = self._find(event)
            if not isinstance(found, EventSlot):
                raise Refused(CudaCode.INVALID_HANDLE, f"nothing was promised of event {event}")
            self._pages.keep(found, done=done)

    def open(self, exported: bytes) -> int:
        """Open another process's event."""
        with self._lock:
            return self._add(self._pages.open(exported))

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        with self._lock:
            self._events.clear()
            self._ended.clear()
            self._promised.clear()
            self._pages.close()
