"""Events that streams of several processes share: numbers in pinned memory that a GPU writes and waits for.

CUDA's own events between processes (``cuIpcGetEventHandle``) leave a stream that waits for one stopped for ever when
the process ends that would do the work, and the contexts of that stream with it. A number can be written by anybody:
when a process ends, those that wait for its work are told so, and go on. Looking at one is no call of the driver.

Within a process CUDA's own events order work. A number is written where an event is exported: by a stream beside all
others, which waits for the event.

The calls are ``cuStreamWriteValue64`` and ``cuStreamWaitValue64`` (CUDA Driver API, "Stream Memory Operations").
"""

from __future__ import annotations

import os
import select
import threading
from typing import TYPE_CHECKING, Final

from zcactor.device.driver import CudaCode, Refused
from zcactor.device.event_pages import EVENT_PAGE_NBYTES, EventPage, EventPages

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.device.cuda.calls import CudaCalls
    from zcactor.device.event_pages import EventSlot

__all__ = ["CudaFlags", "Endings"]


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


class CudaFlags:
    """The exported events of one process, and those that it has promised or opened, which have negative numbers. Any
    thread may use them.

    Args:
        cuda: the calls of CUDA.
    """

    def __init__(self, cuda: CudaCalls) -> None:
        self._cuda: Final = cuda
        self._api: Final = cuda.api
        self._lock: Final = threading.RLock()  # a finalizer that makes arrays may run inside it
        self._pages: Final = EventPages("zcactor-cuda-events")
        self._recorded: Final = threading.RLock()
        """For the two below. No driver is called inside it: a finalizer that records may run in any thread, also where
        the driver waits for that thread."""
        self._exported: Final[dict[int, EventSlot]] = {}
        """The places of the last records of events of this process."""
        self._exporting: Final[set[int]] = set()
        """The events with a record that is being exported, and is still the last one."""
        self._opened: Final[dict[int, EventSlot]] = {}
        self._next = -1
        self._addresses: Final[dict[EventPage, int]] = {}
        """The GPUs' address of each page."""
        self._passed: Final[dict[EventPage, list[tuple[int, int]]]] = {}
        """For each page of another process the events of CUDA's behind waits that may last, with their GPUs."""
        self._left: list[EventPage] = []
        """Pages of other processes that are closed when all streams have passed their waits."""
        self._probes: Final[dict[int, int]] = {}
        """An event of CUDA's for each device, which is never recorded: its state is that of the context."""
        self._writers: Final[dict[int, list[int]]] = {}
        """For each device the streams that write numbers. One that waits holds no other number back."""
        self._endings: Final = Endings(EventPage.lose)

    def _reach(self, page: EventPage) -> int:
        """The address of a page for GPUs, which is pinned for it."""
        address = self._addresses.get(page)
        if address is None:
            flags = self._api.CU_MEMHOSTREGISTER_PORTABLE | self._api.CU_MEMHOSTREGISTER_DEVICEMAP
            self._cuda.ask("export_event", -1, "cuMemHostRegister", page.address, EVENT_PAGE_NBYTES, flags)
            address = int(self._cuda.ask("export_event", -1, "cuMemHostGetDevicePointer", page.address, 0))
            self._addresses[page] = address
        return address

    # ---- events of this process

    def page(self) -> int:
        """A descriptor of the page with the exported events of this process, which is the caller's."""
        with self._lock:
            return self._pages.fd()

    def promise(self) -> int:
        """Make an event that is not recorded.

        Raises:
            Refused: there is no place for it.
        """
        with self._lock:
            return self._add(self._pages.promise())

    def keep(self, event: int, *, done: bool) -> None:
        """Tell the outcome of a promised event, without a lock: its holder may wait for CUDA, and CUDA for work behind
        this event.

        Raises:
            Refused: there is no such event.
        """
        self._pages.keep(self._find(event), done=done)

    def export(self, device: int, event: int) -> bytes:
        """Export the last record of an event of this process, or a promised one.

        Raises:
            Refused: there is no place for it, or the event is another process's.
            DeviceError: the driver refuses.
        """
        with self._lock:
            with self._recorded:
                slot = self._find(event) if event < 0 else self._exported.get(event)
                if slot is None:
                    self._exporting.add(event)
            if slot is None:
                slot = self._pages.take()
                try:
                    address = self._reach(slot.page) + slot.nbytes_before
                    stream = self._writer(device)
                    self._cuda.ask("export_event", device, "cuStreamWaitEvent", stream, event, 0)
                    self._cuda.ask("export_event", device, "cuStreamWriteValue64", stream, address, slot.number, 0)
                except BaseException:
                    with self._recorded:
                        self._exporting.discard(event)
                    self._pages.give_up(slot)
                    raise
                with self._recorded:
                    if event in self._exporting:
                        self._exporting.remove(event)
                        self._exported[event] = slot
            return self._pages.export(slot)

    def _writer(self, device: int) -> int:
        """A stream on which nothing is queued."""
        writers = self._writers.setdefault(device, [])
        for stream in writers:
            if not self._api.cuStreamQuery(stream)[0]:
                return stream
        beside = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        writers.append(int(self._cuda.ask("export_event", device, "cuStreamCreate", beside)))
        return writers[-1]

    def lose(self) -> None:
        """See `zcactor.device.driver.GpuDriver.lose_events`."""
        with self._lock:
            self._pages.lose()

    def forget(self, event: int) -> None:
        """Forget an event of this process, which is recorded again or has ended. Peers wait for what they know."""
        with self._recorded:
            self._exporting.discard(event)
            self._exported.pop(event, None)

    # ---- events of other processes

    def add_page(self, fd: int, process: int) -> None:
        """Know the page of another process.

        Raises:
            Refused: the memory is no page.
        """
        with self._lock:
            self._left += self._pages.ended()
            self._pages.add(fd, process)

    def _close_left(self) -> None:
        left, self._left = self._left, []
        for page in left:
            if all(self._has_passed(each) for _, each in self._passed.get(page, [])):
                self._endings.forget(page)
                for _, each in self._passed.pop(page, []):
                    self._api.cuEventDestroy(each)
                if page in self._addresses:
                    self._api.cuMemHostUnregister(page.address)
                    del self._addresses[page]
                page.close()
            else:
                self._left.append(page)

    def open(self, exported: bytes) -> int:
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
                self._pages.leave(slot)
                raise
            return self._add(slot)

    def _add(self, slot: EventSlot) -> int:
        event, self._next = self._next, self._next - 1
        self._opened[event] = slot
        return event

    def _find(self, event: int) -> EventSlot:
        found = self._opened.get(event)
        if found is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return found

    def end(self, event: int) -> None:
        """Give up an event that was promised or opened.

        Raises:
            Refused: there is no such event.
        """
        with self._lock:
            self._pages.leave(self._find(event))
            del self._opened[event]

    def done(self, device: int, event: int) -> bool:
        """Whether the work is done.

        Raises:
            Refused: there is no such event.
            DeviceError: the context is broken, so that the work is never done.
        """
        slot = self._find(event)
        if slot.passed():
            return slot.done()
        with self._cuda.current("done", device):
            self._cuda.is_ready("done", device, "cuEventQuery", self._probe(device))
        return False

    def _probe(self, device: int) -> int:
        probe = self._probes.get(device)
        if probe is None:
            with self._lock:
                if device not in self._probes:
                    self._probes[device] = self._cuda.make_event("done", device)
                probe = self._probes[device]
        return probe

    def wait(self, device: int, event: int, stream: int) -> None:
        """Hold back what is queued on the stream after this, until the work is done, or never will be because its
        process has ended.

        Raises:
            Refused: there is no such event.
            DeviceError: the driver refuses.
        """
        with self._lock, self._cuda.relaxed("wait", device):
            slot = self._find(event)
            if slot.passed():
                return
            address = self._reach(slot.page) + slot.nbytes_before
            flags = self._api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            self._cuda.ask("wait", device, "cuStreamWaitValue64", stream, address, slot.number, flags)
            self._passes(device, slot.page, stream)
            self._endings.watch(slot.page)

    def _passes(self, device: int, page: EventPage, stream: int) -> None:
        """Note that a stream will read the page. A handle does not tell streams apart, so each wait has an event, which
        is used again once the wait has ended."""
        passed = self._passed.setdefault(page, [])
        found = next((each for each in passed if each[0] == device and self._has_passed(each[1])), None)
        if found is None:
            found = device, self._cuda.make_event("wait", device)
        else:
            passed.remove(found)  # a finalizer may wait meanwhile
        self._cuda.ask("wait", device, "cuEventRecord", found[1], stream)
        passed.append(found)

    def _has_passed(self, event: int) -> bool:
        """Whether the wait before an event of CUDA's has certainly ended."""
        return not self._api.cuEventQuery(event)[0]

    def is_lost(self, event: int) -> bool:
        """Whether the event's process ended before the work was done.

        Raises:
            Refused: there is no such event.
        """
        return self._find(event).lost()

    def close(self) -> None:
        """Give everything back. All streams of this process have ended. Idempotent."""
        self._endings.close()
        with self._lock:
            for passed in self._passed.values():
                for _, each in passed:
                    self._api.cuEventDestroy(each)
            for probe in self._probes.values():
                self._api.cuEventDestroy(probe)
            for stream in [each for streams in self._writers.values() for each in streams]:
                self._api.cuStreamDestroy(stream)
            for page in self._addresses:
                self._api.cuMemHostUnregister(page.address)
            for page in self._left:
                page.close()
            self._passed.clear()
            self._probes.clear()
            self._writers.clear()
            self._addresses.clear()
            self._exported.clear()
            self._opened.clear()
            self._left.clear()
            self._pages.close()
