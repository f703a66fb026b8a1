"""The driver of fake GPUs."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
import uuid
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from zcactor.device.driver import (
    CAPTURED,
    LEGACY_STREAM,
    PATTERNS,
    THREAD_STREAM,
    CudaCode,
    GpuDriver,
    GpuFacts,
    Refused,
)
from zcactor.device.fake.engine import FakeEngine
from zcactor.device.fake.events import FakeEvents
from zcactor.device.fake.memory import GRANULARITY, FakeMemory
from zcactor.device.fake.options import FakeOptions
from zcactor.device.visible import visible
from zcactor.errors import DeviceError, DeviceUnavailable, ForkedProcess

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

__all__ = ["CALLS", "FakeGpuDriver", "host_uuids"]

CALLS: Final = frozenset(name for name in vars(GpuDriver) if not name.startswith("_"))
"""The calls of the driver, each of which the option ``fail`` can make fail."""
_QUERIES: Final = frozenset({"done", "idle"})
"""The calls that the option ``refuse`` makes fail."""
_UNSAFE: Final = frozenset(
    {"reserve", "unreserve", "create", "map", "unmap", "release", "pin", "unpin", "done", "idle", "event", "end_event",
     "stream", "end_stream", "free"}
)  # fmt: skip
"""The calls that CUDA refuses to a thread in global mode while another thread captures a stream."""
_IN_NO_CAPTURE: Final = frozenset({"record_all"})
"""The calls that CUDA refuses then in each mode."""
_WITHOUT_CONTEXT: Final = frozenset({"can_access", "free", "keep_promise"})
"""The calls for a GPU that make no context."""
_MOMENTARY: Final = (CudaCode.CAPTURE_UNSUPPORTED, CudaCode.INVALID_HANDLE, CudaCode.OUT_OF_MEMORY)
"""Errors by which CUDA refuses to answer, while the work goes on."""
_STREAMS: Final = 1 << 32
"""Streams and devices are one number: device times this, and the stream's number in its engine. 0 is each device's
default stream."""


class FakeGpuDriver:
    """Fake GPUs; see `zcactor.device.driver.GpuDriver` for all calls. It ends with the last reference to it.

    Args:
        options: as `FakeOptions` reads them.
        variable: the value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.

    Raises:
        ValueError: an option is unknown or malformed.
    """

    kind: Literal["cuda", "fake"] = "fake"
    granularity: int = GRANULARITY

    def __init__(self, options: str = "", variable: str | None = None) -> None:
        self._options: Final = FakeOptions.parse(options, CALLS)
        self.exports: bool = self._options.export != "none"
        self.shared_events: bool = self._options.events == "ipc"
        self.exports_to_cards: bool = self._options.dmabuf
        uuids = _uuids(self._options.devices)
        self._numbers: Final = visible(uuids, variable)
        """The GPU's number among those of the host, by the index."""
        self._facts: Final = [
            GpuFacts(index, uuids[number], "Fake GPU", self._options.memory)
            for index, number in enumerate(self._numbers)
        ]
        self._memory: Final = FakeMemory(self._options)
        self._events: Final = FakeEvents()
        self._engines: Final = [FakeEngine(index, self._options) for index in range(len(self._numbers))]
        self._lock: Final = threading.RLock()  # a finalizer that makes arrays may run inside it
        self._calls_left = 0 if self._options.fail not in CALLS else self._options.fail_at
        self._refusals: Final = random.Random(f"{self._options.seed}/refusals")
        self._captures: Final = random.Random(f"{self._options.seed}/captures")
        self.captured: Final[set[int]] = set()
        """The streams that a test lets the program capture into graphs, in CUDA's global mode."""
        self.captures_are_valid: bool = True
        """Whether no call has invalidated those captures."""
        self._local: Final = threading.local()
        """The default streams of each thread."""
        self._pid: Final = os.getpid()
        self.close: Final = weakref.finalize(self, _end, self._pid, self._engines, self._memory, self._events)
        """End all streams, and give all memory back. Idempotent."""

    @contextmanager
    def _call(self, name: str, device: int = -1) -> Iterator[None]:
        """Check a call before it does anything, and name it in errors."""
        if os.getpid() != self._pid:
            raise ForkedProcess("a forked process cannot use the GPUs of its parent: start it by spawn")
        if device >= len(self._numbers) or device < -1:
            raise DeviceUnavailable(f"there is no GPU {device}: this process sees {len(self._numbers)}")
        if device >= 0 and (broken := self._engines[device].broken) is not None:
            raise DeviceError(name, broken.code, device, True, broken.reason)
        if name == self._options.fail:
            with self._lock:
                self._calls_left -= 1
                if not self._calls_left:
                    self._fail(name, device)
        if self._options.refuse and name in _QUERIES:
            with self._lock:
                refused, code = self._refusals.random() < self._options.refuse, self._refusals.choice(_MOMENTARY)
            if refused:
                raise DeviceError(name, code, device, False, "the option refuse made it fail for now")
        if self.prohibits(name, relaxed=True):
            raise DeviceError(name, CudaCode.CAPTURE_UNSUPPORTED, device, False, "another thread captures a stream")
        try:
            if device >= 0 and name not in _WITHOUT_CONTEXT:
                self._memory.use(self._numbers[device])
            yield
        except Refused as error:
            raise DeviceError(name, error.code, device, False, error.reason) from error

    def _fail(self, name: str, device: int) -> None:
        breaks = self._options.breaks
        for engine in (self._engines if device < 0 else [self._engines[device]]) if breaks else ():
            engine.give_up(Refused(CudaCode.ILLEGAL_ADDRESS, "the option fail broke the context"))
        raise DeviceError(name, CudaCode.UNKNOWN, device, breaks, "the option fail made it fail")

    def prohibits(self, call: str, *, relaxed: bool) -> bool:
        """Whether the program captures a stream just now, and a capture refuses that call, which invalidates it.

        Args:
            call: the call.
            relaxed: whether the calling thread says that its calls have nothing to do with captures of other threads,
                by cuThreadExchangeStreamCaptureMode, as a driver does for each of its calls.
        """
        if call not in _IN_NO_CAPTURE and (relaxed or call not in _UNSAFE):
            return False
        with self._lock:
            meets = self._captures.random() < self._options.captures
        if self.captured:
            self.captures_are_valid = False
        return meets or bool(self.captured)

    # ---- devices

    def devices(self) -> Sequence[GpuFacts]:
        with self._call("devices"):
            return list(self._facts)

    def can_access(self, device: int, peer: int) -> bool:
        with self._call("can_access", max(device, peer)):
            return device == peer or self._options.peer == "all"

    def free(self, device: int) -> int:
        with self._call("free", device):
            return self._memory.free(self._numbers[device])

    # ---- memory

    def reserve(self, device: int, nbytes: int) -> int:
        with self._call("reserve", device):
            return self._memory.reserve(nbytes)

    def unreserve(self, device: int, address: int, nbytes: int) -> None:
        with self._call("unreserve", device):
            self._memory.unreserve(address, nbytes)

    def create(self, device: int, nbytes: int) -> int:
        with self._call("create", device):
            return self._memory.create(self._numbers[device], nbytes)

    def map(self, device: int, address: int, handle: int, nbytes: int, writable: bool) -> bool:
        with self._call("map", device):
            return self._memory.map(self._numbers[device], address, handle, nbytes, writable)

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        with self._call("unmap", device):
            self._memory.unmap(address, nbytes)

    def release(self, device: int, handle: int) -> None:
        with self._call("release", device):
            self._memory.release(handle)

    def export(self, device: int, address: int, nbytes: int) -> int:
        with self._call("export", device):
            return self._memory.export(address, nbytes)

    def import_(self, device: int, fd: int, nbytes: int, uuid: str) -> int:
        with self._call("import_", device):
            return self._memory.import_(fd, nbytes)

    def copy(
        self,
        device: int,
        destination: int,
        source: int,
        rows: int,
        row_nbytes: int,
        strides: tuple[int, int],
        stream: int,
    ) -> None:
        with self._call("copy", device):
            if rows < 0 or row_nbytes < 0 or (rows > 1 and min(strides) < row_nbytes):
                raise Refused(CudaCode.INVALID_VALUE, f"{rows} rows of {row_nbytes} bytes, {strides} bytes apart")
            if not rows or not row_nbytes:
                return
            if rows == 1:
                strides = row_nbytes, row_nbytes
            memory, number = self._memory, self._numbers[device]
            into, outof = ((rows - 1) * stride + row_nbytes for stride in strides)
            of_host = memory.pinned(destination, into), memory.pinned(source, outof)

            def run() -> None:
                write = memory.engines(number, destination, into, write=True, pinned=of_host[0])
                read = memory.engines(number, source, outof, write=False, pinned=of_host[1])
                if into == outof == rows * row_nbytes:
                    ctypes.memmove(write, read, into)
                else:
                    shape = rows, row_nbytes
                    np.copyto(_array(write, into, shape, strides[0]), _array(read, outof, shape, strides[1]))

            self._engines[device].submit(self._stream(device, stream), run, is_work=True)

    def fill(self, device: int, address: int, pattern: bytes, count: int, stream: int) -> None:
        with self._call("fill", device):
            width = len(pattern)
            if width not in PATTERNS or count < 0 or address % min(width, 4):
                raise Refused(CudaCode.INVALID_VALUE, f"a pattern of {width} bytes, {count} times at {address:#x}")
            if not count:
                return
            memory, number, nbytes = self._memory, self._numbers[device], width * count

            def run() -> None:
                write = memory.engines(number, address, nbytes, write=True)
                part = min(width, 4)
                shape = count, width // part
                words = np.ndarray(shape, f"<u{part}", _buffer(write, nbytes))
                words[...] = np.frombuffer(pattern, f"<u{part}")

            self._engines[device].submit(self._stream(device, stream), run, is_work=True)

    def pin(self, address: int, nbytes: int) -> None:
        with self._call("pin"):
            self._memory.pin(address, nbytes)

    def unpin(self, address: int, nbytes: int) -> None:
        with self._call("unpin"):
            self._memory.unpin(address)

    def dma_buf(self, device: int, address: int, nbytes: int) -> int:
        with self._call("dma_buf", device):
            return self._memory.dma_buf(address, nbytes)

    def flush(self, device: int) -> None:
        with self._call("flush", device):
            if not self.exports_to_cards:
                raise Refused(CudaCode.NOT_SUPPORTED, "no network card writes to this GPU's memory")

    def owner_of(self, pointer: int) -> tuple[int, int, int] | None:
        with self._call("owner_of"):
            found = self._memory.owner_of(pointer)
            if found is None:
                return None
            number, address, nbytes = found
            return self._numbers.index(number) if number in self._numbers else -1, address, nbytes

    # ---- order

    def _stream(self, device: int, stream: int) -> int:
        if stream in self.captured:
            raise Refused(CudaCode.CAPTURE_UNSUPPORTED, CAPTURED)
        if stream == LEGACY_STREAM:
            return 0
        if stream == THREAD_STREAM:
            own = vars(self._local).setdefault("streams", {})
            if device not in own:
                own[device] = self._engines[device].add_stream()
            return int(own[device])
        of, number = divmod(stream, _STREAMS)
        if stream and of != device + 1:
            raise Refused(CudaCode.INVALID_HANDLE, f"{stream} is no stream of GPU {device}")
        return number

    def stream(self, device: int) -> int:
        with self._call("stream", device):
            return (device + 1) * _STREAMS + self._engines[device].add_stream()

    def idle(self, device: int, stream: int) -> bool:
        with self._call("idle", device):
            return self._engines[device].is_idle(self._stream(device, stream))

    def end_stream(self, device: int, stream: int) -> None:
        with self._call("end_stream", device):
            if not stream:
                raise Refused(CudaCode.INVALID_HANDLE, "the default stream does not end")
            self._engines[device].end_stream(self._stream(device, stream))

    def event(self, device: int) -> int:
        with self._call("event", device):
            return self._events.make()

    def end_event(self, device: int, event: int) -> None:
        with self._call("end_event", device):
            self._events.end(event)

    def record(self, device: int, event: int, stream: int) -> None:
        with self._call("record", device):
            number, events = self._stream(device, stream), self._events
            self._engines[device].check(number)
            count = events.begin(event)
            self._engines[device].submit(number, lambda: events.finish(event, count))

    def record_all(self, device: int, event: int) -> None:
        with self._call("record_all", device):
            events = self._events
            count = events.begin(event)
            self._engines[device].submit_behind(lambda: events.finish(event, count))

    def done(self, device: int, event: int) -> bool:
        with self._call("done", device):
            return self._events.done(event)

    def wait(self, device: int, stream: int, event: int) -> None:
        with self._call("wait", device):
            number, passed = self._stream(device, stream), self._events.passed(event)
            self._engines[device].check(number)
            if passed is not None and self._options.waits:
                self._engines[device].submit(number, lambda: None, passed)

    def _check_shared(self) -> None:
        if not self.shared_events:
            raise Refused(CudaCode.NOT_SUPPORTED, "events are not shared between processes")

    def event_page(self) -> int:
        with self._call("event_page"):
            self._check_shared()
            return self._events.page()

    def add_event_page(self, fd: int, process: int) -> None:
        with self._call("add_event_page"):
            self._check_shared()
            self._events.add_page(fd, process)

    def promise_event(self, device: int) -> int:
        with self._call("promise_event", device):
            self._check_shared()
            return self._events.promise()

    def keep_promise(self, device: int, event: int, done: bool) -> None:
        with self._call("keep_promise"):  # a broken context does no harm to it
            self._events.keep(event, done=done)

    def export_event(self, device: int, event: int) -> bytes:
        with self._call("export_event", device):
            self._check_shared()
            return self._events.export(event)

    def lose_events(self) -> None:
        with self._call("lose_events"):
            self._events.lose()

    def open_event(self, device: int, exported: bytes) -> int:
        with self._call("open_event", device):
            self._check_shared()
            return self._events.open(exported)

    def event_is_lost(self, device: int, event: int) -> bool:
        with self._call("event_is_lost", device):
            return self._events.is_lost(event)

    # ---- for tests

    @property
    def copied(self) -> Counter[str]:
        """Bytes of the host that were copied, as pinned memory and as other (``pageable``)."""
        return self._memory.copied

    def hold(self, device: int, stream: int, until: Callable[[], bool]) -> None:
        """Begin nothing on a stream until a function is true: a test holds work back for certain, where the option
        ``late`` depends on how fast the test goes on.

        Args:
            device: the device of `stream`.
            stream: the stream.
            until: called again and again, by any thread; it takes the place of an earlier one.

        Raises:
            DeviceError: there is no such stream.
        """
        with self._call("hold", device):
            self._engines[device].hold(self._stream(device, stream), until)

    def rests(self, device: int) -> bool:
        """Whether nothing runs on a GPU, and all that is queued is held back, or waits for an event."""
        with self._call("rests", device):
            return self._engines[device].rests()


def _array(address: int, nbytes: int, shape: tuple[int, int], stride: int) -> npt.NDArray[np.uint8]:
    return np.ndarray(shape, np.uint8, _buffer(address, nbytes), strides=(stride, 1))


def _buffer(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def _end(pid: int, engines: Sequence[FakeEngine], memory: FakeMemory, events: FakeEvents) -> None:
    if os.getpid() != pid:
        return  # a forked child has neither the threads nor a share in the memory
    for engine in engines:
        engine.close()
    memory.close()
    events.close()


def host_uuids(options: str) -> list[str]:
    """The UUIDs of the fake GPUs of this host, in their order, without making any.

    Raises:
        ValueError: an option is unknown or malformed.
    """
    return _uuids(FakeOptions.parse(options, CALLS).devices)


def _uuids(count: int) -> list[str]:
    """The UUIDs of the host's GPUs. Another kernel, name or network is another host."""
    facts = [Path("/proc/sys/kernel/random/boot_id").read_text(), socket.gethostname()]
    facts.append(str(os.stat("/proc/self/ns/net").st_ino))
    common = str(uuid.uuid5(uuid.NAMESPACE_OID, "zcactor fake GPU\n" + "\n".join(facts)))
    return [f"GPU-{common[:-2]}{number:02x}" for number in range(count)]
