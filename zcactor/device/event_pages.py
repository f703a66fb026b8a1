"""Events of GPUs in memory that other processes map, so that work is ordered between processes.

A page holds 510 numbers, one in each place. An exported event is a place and a number: its work is done when the place
has that number or a higher one. Numbers in a place only rise, so that a place serves another event as soon as its work
is done, and streams that wait for the former one go on. Reading and writing such a number is one access. The drivers
differ in how they are written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from zcactor.device.driver import EVENT_NBYTES, CudaCode, Refused
from zcactor.device.sealed import sealed_memory, sealed_size

__all__ = ["EVENT_PAGE_NBYTES", "EventPage", "EventPages", "EventSlot", "Other"]


class Other:
    """Another process of this host, and whether it has ended.

    Args:
        pidfd: a descriptor of it (pidfd_open(2)), which stays the caller's.
    """

    def __init__(self, pidfd: int) -> None:
        self._fd = os.dup(pidfd)
        self._ended = False

    def fileno(self) -> int:
        """A descriptor that becomes readable when it ends; -1 after `close`."""
        return self._fd

    def has_ended(self) -> bool:
        """Whether it has ended."""
        if not self._ended and self._fd >= 0:
            poll = select.poll()  # of this call: one is for one thread at a time
            poll.register(self._fd, select.POLLIN)
            self._ended = bool(poll.poll(0))
        return self._ended

    def close(self) -> None:
        """Watch it no more. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


EVENT_PAGE_NBYTES: Final = 4096
"""Bytes of a page."""
_FIRST: Final = 2
"""Words of a page before its places: 16 random bytes tell whether it is the page that a handle means."""
_PLACES: Final = EVENT_PAGE_NBYTES // 8 - _FIRST
_HANDLE: Final = struct.Struct("<8s16sIQ")
"""An exported event: mark, the page's random bytes, place in the page, number."""
_MARK: Final = b"zcgpuevt"
_LOST: Final = 1 << 62
"""Added to the number in a place whose process has ended. Streams that wait for a number compare 64 bits as signed
ones, so they go on."""


class EventPage:
    """A page of events.

    Args:
        fd: the memory; it stays the caller's.
        owner: the other process whose page it is, which the page closes; None for one of this process.
    """

    def __init__(self, fd: int, owner: Other | None = None) -> None:
        self.owner: Final = owner
        self._map: Final = mmap.mmap(fd, EVENT_PAGE_NBYTES, mmap.MAP_SHARED)
        self.words: Final = memoryview(self._map).cast("Q")
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

    @property
    def is_over(self) -> bool:
        """Whether the process has ended that would write the numbers."""
        return self.owner is not None and self.owner.has_ended()

    def lose(self) -> None:
        """Let everybody go on who waits for the process of the page, which has ended."""
        for at in range(_FIRST, _FIRST + _PLACES):
            if self.words[at] < _LOST:
                self.words[at] += _LOST

    def close(self) -> None:
        """Give it back to the system."""
        self.words.release()
        self._map.close()
        if self.owner is not None:
            self.owner.close()


@dataclass(frozen=True, slots=True)
class EventSlot:
    """A place and a number, for the work of one event."""

    page: EventPage
    at: int
    """The index of the word."""
    number: int
    promised: bool = False
    """Whether `EventPages.keep` tells the outcome."""

    @property
    def nbytes_before(self) -> int:
        """Bytes of the page before the number."""
        return 8 * self.at

    def done(self) -> bool:
        """Whether the work is done."""
        return bool(self.page.words[self.at] % _LOST >= self.number)

    def passed(self) -> bool:
        """Whether nobody waits for the work any more: it is done, or was lost with its process."""
        return bool(self.page.words[self.at] >= self.number)

    def lost(self) -> bool:
        """Whether the process has ended before the work was done."""
        over = self.passed() or self.page.is_over  # before the look at the number, which its end may have followed
        return over and not self.done()

    def finish(self) -> None:
        """Note that the work is done."""
        self.page.words[self.at] = self.number

    def lose(self) -> None:
        """Let everybody go on who waits for the work, as it is never done. The place serves no other event."""
        self.page.words[self.at] += _LOST


class EventPages:
    """The page of one process, and those of others that it knows. The caller locks.

    Args:
        name: of the memory of the page that is made here.
    """

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._fd = -1
        self._own: EventPage | None = None
        self._free: deque[int] = deque(range(_FIRST, _FIRST + _PLACES))
        self._taken: deque[EventSlot] = deque()
        self._others: dict[bytes, EventPage] = {}

    def _page(self) -> EventPage:
        if self._own is None:
            fd = -1
            try:
                fd = sealed_memory(self._name, EVENT_PAGE_NBYTES)
                own = EventPage(fd)
            except OSError as error:  # too many descriptors are open: threads wait for the work of arrays instead
                if fd >= 0:
                    os.close(fd)
                reason = f"the system has no memory for events: {error.strerror}"
                raise Refused(CudaCode.NOT_SUPPORTED, reason) from error
            own.key = secrets.token_bytes(16)
            self._fd, self._own = fd, own
        return self._own

    def fd(self) -> int:
        """A descriptor of the page that is made here, which is the caller's."""
        self._page()
        return os.dup(self._fd)

    def take(self, *, promised: bool = False) -> EventSlot:
        """Take a place, until `EventSlot.finish`; `promised` where `keep` tells the outcome.

        Raises:
            Refused: none is left: the work of as many events is not done as there are places.
        """
        page = self._page()
        waiting, self._taken = self._taken, deque()
        for slot in waiting:
            if slot.done():
                self._free.append(slot.at)
            else:
                self._taken.append(slot)
        if not self._free:
            reason = f"the work of {_PLACES} exported events is not done, and there are no more places"
            raise Refused(CudaCode.NOT_SUPPORTED, reason)
        at = self._free.popleft()
        slot = EventSlot(page, at, int(page.words[at]) + 1, promised)
        self._taken.append(slot)
        return slot

    def lose(self) -> None:
        """Let everybody go on who waits for work of this process that is not done. Idempotent."""
        for slot in self._taken:
            if not (slot.promised or slot.passed()):
                slot.lose()

    def promise(self) -> EventSlot:
        """Take a place for an event that is opened here at once; see `leave`. Its outcome is told by `keep`.

        Raises:
            Refused: see `take`.
        """
        slot = self.take(promised=True)
        slot.page.users += 1
        return slot

    def keep(self, slot: EventSlot, *, done: bool) -> None:
        """Tell the outcome of a promised event.

        Raises:
            Refused: it is no such event.
        """
        if slot.page is not self._own or slot.passed():
            raise Refused(CudaCode.INVALID_HANDLE, "this is no promised event whose outcome is open")
        if done:
            slot.finish()
        else:
            slot.lose()

    def give_up(self, slot: EventSlot) -> None:
        """Undo `take`, as nobody will write the number."""
        self._taken.remove(slot)
        self._free.append(slot.at)

    def export(self, slot: EventSlot) -> bytes:
        """The handle of an event of this process.

        Raises:
            Refused: it is another process's.
        """
        if slot.page is not self._own:
            raise Refused(CudaCode.INVALID_HANDLE, "only the process that made an event exports it")
        return _HANDLE.pack(_MARK, slot.page.key, slot.at - _FIRST, slot.number)

    # ---- other processes

    def add(self, fd: int, process: int) -> None:
        """Know the page of another process. Idempotent.

        Args:
            fd: the memory, which stays the caller's.
            process: a descriptor of the process, which stays the caller's.

        Raises:
            Refused: these are no page and no process.
        """
        if sealed_size(fd) != EVENT_PAGE_NBYTES:
            raise Refused(CudaCode.INVALID_VALUE, f"descriptor {fd} is no page of events")
        try:
            owner = Other(process)
        except OSError as error:
            raise Refused(CudaCode.INVALID_VALUE, f"descriptor {process} is no process: {error.strerror}") from error
        page = EventPage(fd, owner)
        if page.key in self._others or (self._own is not None and page.key == self._own.key):
            page.close()
        else:
            self._others[page.key] = page

    def open(self, exported: bytes) -> EventSlot:
        """Open an event of another process, whose page is known.

        Raises:
            Refused: there is no such event.
        """
        if len(exported) != EVENT_NBYTES:
            raise Refused(CudaCode.INVALID_HANDLE, f"an exported event has {EVENT_NBYTES} bytes, not {len(exported)}")
        mark, key, place, number = _HANDLE.unpack(exported)
        page = self._others.get(key)
        if mark != _MARK or page is None or place >= _PLACES or not 0 < number < _LOST:
            raise Refused(CudaCode.INVALID_HANDLE, "this is no exported event of a process whose page is known")
        page.users += 1
        return EventSlot(page, _FIRST + place, number)

    def leave(self, slot: EventSlot) -> None:
        """Undo `open`, or `promise` but for its place."""
        slot.page.users -= 1

    def ended(self) -> list[EventPage]:
        """The pages of processes that have ended, in which no event is open. They are the caller's to close, and not
        known any more."""
        found = [each for each in self._others.values() if not each.users and each.is_over]
        self._others = {key: each for key, each in self._others.items() if each not in found}
        return found

    def close(self) -> None:
        """Give everything back to the system. Idempotent."""
        for page in (*([self._own] if self._own is not None else []), *self._others.values()):
            page.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._own = -1, None
        self._others.clear()
