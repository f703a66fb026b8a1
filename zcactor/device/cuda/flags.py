"""Events that streams of several processes share: numbers in pinned memory that a GPU writes and waits for.

CUDA's own events between processes (``cuIpcGetEventHandle``) leave a stream that waits for one stopped for ever when
the process ends that would do the work, and the contexts of that stream with it. A number can be written by anybody:
when a process ends, those that wait for its work are told so, and go on. Looking at one is no call of the driver.

The calls are ``cuStreamWriteValue64`` and ``cuStreamWaitValue64`` (CUDA Driver API, "Stream Memory Operations").
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zcactor.device.cuda.endings import Endings
from zcactor.device.driver import CudaCode, Refused
from zcactor.device.event_pages import EVENT_PAGE_NBYTES, EventPages

if TYPE_CHECKING:
    from zcactor.device.cuda.calls import CudaCalls
    from zcactor.device.event_pages import EventPage, EventSlot

__all__ = ["CudaFlags"]

_LOST: Final = 1 << 62
"""Added to the number of a record whose work is never done. Streams that wait for a record compare 64 bits as signed
numbers, so they go on."""


@dataclass(slots=True)
class _Event:
    device: int
    slot: EventSlot


class CudaFlags:
    """The shared events of one process. Any thread may use them.

    Args:
        cuda: the calls of CUDA.
    """

    def __init__(self, cuda: CudaCalls) -> None:
        self._cuda: Final = cuda
        self._api: Final = cuda.api
        self._lock: Final = threading.Lock()
        self._pages: Final = EventPages("zcactor-cuda-events")
        self._events: Final[dict[int, _Event]] = {}
        self._next = 1
        self._addresses: Final[dict[EventPage, int]] = {}
        """The GPUs' address of each page."""
        self._unfinished: list[EventSlot] = []
        """Slots without an event, whose numbers a GPU will still write."""
        self._passed: Final[dict[EventPage, list[tuple[int, int]]]] = {}
        """For each page of another process the events of CUDA's behind waits that may last, with their GPUs."""
        self._left: list[EventPage] = []
        """Pages of other processes that are closed when all streams have passed their waits."""
        self._probes: Final[dict[int, int]] = {}
        """An event of CUDA's for each device, which is never recorded: its state is that of the context."""
        self._behind: Final[dict[int, tuple[int, int]]] = {}
        """For each device a stream for what comes after all of its work, and an event of CUDA's for that work."""
        self._endings: Final = Endings(self._lose)

    # ---- events

    def make(self, device: int) -> int:
        """Make an event.

        Raises:
            DeviceError: the driver refuses to pin memory.
        """
        with self._lock:
            return self._add(device, self._take())

    def _take(self) -> EventSlot:
        waiting, self._unfinished = self._unfinished, []
        for slot in waiting:
            self._give_back(slot)
        slot = self._pages.take()
        try:
            self._reach(slot.page)
        except BaseException:
            self._pages.give_back(slot)
            raise
        return slot

    def _give_back(self, slot: EventSlot) -> None:
        """Let the place of an event be used again, once no GPU writes there any more."""
        if slot.finished < slot.recorded:
            self._unfinished.append(slot)
        else:
            self._pages.give_back(slot)

    def _reach(self, page: EventPage) -> int:
        """The address of a page for GPUs, which is pinned for it."""
        address = self._addresses.get(page)
        if address is None:
            flags = self._api.CU_MEMHOSTREGISTER_PORTABLE | self._api.CU_MEMHOSTREGISTER_DEVICEMAP
            self._cuda.ask("event", -1, "cuMemHostRegister", page.address, EVENT_PAGE_NBYTES, flags)
            address = int(self._cuda.ask("event", -1, "cuMemHostGetDevicePointer", page.address, 0))
            self._addresses[page] = address
        return address

    def _add(self, device: int, slot: EventSlot) -> int:
        event, self._next = self._next, self._next + 1
        self._events[event] = _Event(device, slot)
        return event

    def _find(self, event: int) -> _Event:
        found = self._events.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return found

    def _own(self, device: int, event: int) -> _Event:
        found = self._find(event)
        if found.device != device or found.slot.page.owner is not None:
            raise Refused(CudaCode.INVALID_HANDLE, f"{event} is no event that was made for GPU {device}")
        return found

    def end(self, event: int) -> None:
        """Give up an event.

        Raises:
            Refused: there is no such event.
        """
        with self._lock:
            slot = self._find(event).slot
            del self._events[event]
            if slot.page.owner is None:
                self._give_back(slot)
            elif (page := self._pages.give_back(slot)) is not None:
                self._left.append(page)
                self._close_left()

    def _close_left(self) -> None:
        left, self._left = self._left, []
        for page in left:
            passed = self._passed.get(page, [])
            if all(self._has_passed(each) for _, each in passed):
                self._endings.forget(page)
                for _, each in self._passed.pop(page, []):
                    self._api.cuEventDestroy(each)
                self._api.cuMemHostUnregister(page.address)
                del self._addresses[page]
                page.close()
            else:
                self._left.append(page)

    # ---- order

    def record(self, device: int, event: int, stream: int) -> None:
        """Let the event stand for everything that is queued on the stream now.

        Raises:
            Refused: it was not made here for this GPU.
            DeviceError: the driver refuses.
        """
        with self._lock:
            self._record(device, event, stream)

    def record_all(self, device: int, event: int) -> None:
        """Let the event stand for everything that is queued on the device now.

        Raises:
            Refused: it was not made here for this GPU.
            DeviceError: the driver refuses.
        """
        with self._lock:
            if device not in self._behind:
                beside = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
                stream = int(self._cuda.ask("record_all", device, "cuStreamCreate", beside))
                untimed = int(self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                self._behind[device] = stream, int(self._cuda.ask("record_all", device, "cuEventCreate", untimed))
            stream, mark = self._behind[device]
            self._cuda.record_all(device, mark)
            self._cuda.ask("record_all", device, "cuStreamWaitEvent", stream, mark, 0)
            self._record(device, event, stream)

    def _record(self, device: int, event: int, stream: int) -> None:
        found = self._own(device, event)
        if found.slot.finished < found.slot.recorded:  # the GPU writes there yet, maybe after a later record
            self._give_back(found.slot)
            found.slot = self._take()
        slot = found.slot
        number = slot.count()
        address = self._reach(slot.page) + slot.done_nbytes
        try:
            self._cuda.ask("record", device, "cuStreamWriteValue64", stream, address, number, 0)
        except BaseException:
            slot.uncount()
            raise

    def done(self, device: int, event: int) -> bool:
        """Whether the work before the last record is done.

        Raises:
            Refused: there is no such event.
            DeviceError: the context is broken, so that the work is never done.
        """
        slot = self._find(event).slot
        recorded = slot.recorded
        if slot.reached(recorded):
            return slot.finished < _LOST
        with self._cuda.current("done", device):
            self._cuda.is_ready("done", device, "cuEventQuery", self._probe(device))
        return False

    def _probe(self, device: int) -> int:
        probe = self._probes.get(device)
        if probe is None:
            with self._lock:
                if device not in self._probes:
                    flags = int(self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
                    self._probes[device] = int(self._cuda.ask("done", device, "cuEventCreate", flags))
                probe = self._probes[device]
        return probe

    def wait(self, device: int, event: int, stream: int) -> None:
        """Hold back what is queued on the stream after this, until the work of the last record is done, or never will
        be because its process has ended.

        Raises:
            Refused: there is no such event.
            DeviceError: the driver refuses.
        """
        with self._lock:
            slot = self._find(event).slot
            recorded = slot.recorded
            if slot.reached(recorded):
                return
            address = self._reach(slot.page) + slot.done_nbytes
            flags = self._api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            self._cuda.ask("wait", device, "cuStreamWaitValue64", stream, address, recorded, flags)
            if slot.page.owner is not None:
                self._passes(device, slot.page, stream)
                self._endings.watch(slot.page)

    def _passes(self, device: int, page: EventPage, stream: int) -> None:
        """Note that a stream will read the page. A handle does not tell streams apart, so each wait has an event, which
        is used again once the wait has ended."""
        passed = self._passed.setdefault(page, [])
        event = next((each for index, each in passed if index == device and self._has_passed(each)), None)
        if event is None:
            flags = int(self._api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            event = int(self._cuda.ask("wait", device, "cuEventCreate", flags))
            passed.append((device, event))
        self._cuda.ask("wait", device, "cuEventRecord", event, stream)

    def _has_passed(self, event: int) -> bool:
        """Whether the wait before an event of CUDA's has certainly ended."""
        return not self._api.cuEventQuery(event)[0]

    def is_lost(self, event: int) -> bool:
        """Whether the event's process ended before the work was done.

        Raises:
            Refused: there is no such event.
        """
        slot = self._find(event).slot
        if not slot.is_there or slot.page.owner is None:
            return False
        return slot.finished >= _LOST or (slot.finished < slot.recorded and slot.is_over)

    def _lose(self, page: EventPage) -> None:
        """Let streams pass that wait for a process which has ended. Its numbers say so to every process."""
        for slot in page.slots():
            if slot.finished < slot.recorded:
                slot.finish(_LOST + slot.recorded)

    # ---- between processes

    def export(self, device: int, event: int) -> bytes:
        """Export an event of this process.

        Raises:
            Refused: it was not made here for this GPU.
        """
        with self._lock:
            return self._pages.export(self._own(device, event).slot)

    def open(self, device: int, exported: bytes) -> int:
        """Open an event of another process.

        Raises:
            Refused: there is no such event.
            DeviceError: the driver refuses to pin memory.
        """
        with self._lock:
            self._close_left()
            slot = self._pages.open(exported)
            try:
                self._reach(slot.page)
            except BaseException:
                page = self._pages.give_back(slot)
                if page is not None:
                    page.close()
                raise
            return self._add(device, slot)

    def close(self) -> None:
        """Give everything back. All streams of this process have ended. Idempotent."""
        self._endings.close()
        with self._lock:
            for passed in self._passed.values():
                for _, each in passed:
                    self._api.cuEventDestroy(each)
            for probe in self._probes.values():
                self._api.cuEventDestroy(probe)
            for stream, mark in self._behind.values():
                self._api.cuStreamDestroy(stream)
                self._api.cuEventDestroy(mark)
            for page in self._addresses:
                self._api.cuMemHostUnregister(page.address)
            for page in self._left:
                page.close()
            self._passed.clear()
            self._probes.clear()
            self._behind.clear()
            self._addresses.clear()
            self._events.clear()
            self._left.clear()
            self._pages.close()
