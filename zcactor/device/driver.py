"""The seam to a GPU's driver: memory that other processes can map, streams, and events that order work between them.

Handles, streams and events are ints. A device is the index of a GPU among those that this process sees. Each call names
it, because a program's threads come and go, and the driver makes the device current for the length of the call. Any
thread may make any call. No call waits for work on a stream.

`tests.conformance.device` is the suite that each implementation passes.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CAPTURED", "EVENT_NBYTES", "LEGACY_STREAM", "PAGE_NBYTES", "PATTERNS", "THREAD_STREAM", "CudaCode",
    "GpuDriver", "GpuFacts", "Refused",
]  # fmt: skip

EVENT_NBYTES: Final = 36
"""Bytes of an exported event, which name the process that does the work and the place of the event there."""
PAGE_NBYTES: Final = mmap.PAGESIZE
"""Bytes of a page of the host, of which `GpuDriver.dma_buf` takes whole ones."""
PATTERNS: Final = (1, 2, 4, 8, 16)
"""Bytes that the pattern of a fill may have: those of all plain dtypes."""

CAPTURED: Final = (
    "the stream is captured into a graph, as in torch.cuda.graph: pass arrays, and use what was received, before the "
    "capture or behind it"
)
"""The reason against work on a stream that is captured: it would be a part of the graph."""

LEGACY_STREAM: Final = 1
"""``CU_STREAM_LEGACY``: the default stream of a device, for a library that says which one it means."""
THREAD_STREAM: Final = 2
"""``CU_STREAM_PER_THREAD``: the default stream of the calling thread, so another one in each thread."""


class CudaCode(IntEnum):
    """The errors that callers tell apart, by CUDA's numbers (``CUresult``)."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    INVALID_DEVICE = 101
    PEER_ACCESS_UNSUPPORTED = 217
    INVALID_HANDLE = 400
    ILLEGAL_ADDRESS = 700
    ALREADY_PINNED = 712
    NOT_PINNED = 713
    NOT_SUPPORTED = 801
    CAPTURE_UNSUPPORTED = 900
    UNKNOWN = 999


class Refused(Exception):
    """A call that a driver refuses. The driver makes a `zcactor.DeviceError` of it, with the call's name.

    Args:
        code: CUDA's number.
        reason: the mistake, in words.
    """

    def __init__(self, code: CudaCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU that this process sees."""

    index: int
    uuid: str
    """``GPU-``, or ``MIG-`` for a slice of a GPU, and 32 hexadecimal digits in five groups: the same in all processes
    of a host."""
    name: str
    total: int
    """Bytes of its memory."""


class GpuDriver(Protocol):
    """A driver of the GPUs that this process sees.

    Raises:
        DeviceError: any call may raise it, with the name of the call and a `CudaCode`.
        DeviceUnavailable: a call with a device that is not there.
        ForkedProcess: any call in a child that was forked after the driver was made.
    """

    kind: Literal["cuda", "fake"]
    granularity: int
    """Bytes of which sizes and offsets of extents are multiples."""
    exports: bool
    """Whether memory leaves the process, by descriptors."""
    shared_events: bool
    """Whether events can be exported."""
    exports_to_cards: bool
    """Whether `dma_buf` and `flush` work."""

    def devices(self) -> Sequence[GpuFacts]:
        """The GPUs that this process sees, by index."""

    def can_access(self, device: int, peer: int) -> bool:
        """Whether `device` can read and write the memory of `peer`."""

    def free(self, device: int) -> int:
        """Bytes of the GPU's memory that are not allocated."""

    # ---- memory

    def reserve(self, device: int, nbytes: int) -> int:
        """Reserve addresses, without memory behind them. Returns the first."""

    def unreserve(self, device: int, address: int, nbytes: int) -> None:
        """Give up a reservation in which nothing is mapped."""

    def create(self, device: int, nbytes: int) -> int:
        """Allocate memory of the GPU, a multiple of `granularity`. Returns its handle.

        Raises:
            DeviceError: with `CudaCode.OUT_OF_MEMORY` where the GPU has no room.
        """

    def map(self, device: int, address: int, handle: int, nbytes: int, writable: bool) -> bool:
        """Map all `nbytes` of a handle's memory at `address` of a reservation, for `device` and the GPUs that reach it.
        Returns whether the device refuses writes through this mapping.

        Raises:
            DeviceError: with `CudaCode.PEER_ACCESS_UNSUPPORTED` where `device` cannot access that memory.
        """

    def unmap(self, device: int, address: int, nbytes: int) -> None:
        """Undo `map`. All work on the memory must be done."""

    def release(self, device: int, handle: int) -> None:
        """Give up a handle. The memory lives on while it is mapped, or while another process has it."""

    def export(self, device: int, address: int, nbytes: int) -> int:
        """Export memory that is mapped. Returns a descriptor, which belongs to the caller.

        Args:
            device: the GPU.
            address: where the memory is mapped.
            nbytes: all its bytes.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where `exports` is False, or the memory is another process's.
        """

    def import_(self, device: int, fd: int, nbytes: int, uuid: str) -> int:
        """Make a handle of memory that another process has exported.

        Args:
            device: the GPU by which it is reached.
            fd: the descriptor, which stays the caller's.
            nbytes: bytes of the memory.
            uuid: of the GPU whose memory it is. Numbers of GPUs are other ones in other processes.

        Raises:
            DeviceError: with `CudaCode.INVALID_VALUE` where `fd` is not such memory of `nbytes` bytes.
        """

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
        """Queue a copy of `rows` rows. Each address is one of a GPU that `device` reaches, or of this process.

        Memory of this process must stay as it is until the copy is done.

        Args:
            device: the device of `stream`.
            destination: address of the first row's first byte.
            source: the same of the source.
            rows: number of rows, each of `row_nbytes` bytes.
            row_nbytes: bytes of a row.
            strides: bytes from one row to the next, of destination and source; at least `row_nbytes`, or any for one
                row.
            stream: 0 or `LEGACY_STREAM` for the device's default stream, the result of `stream`, or `THREAD_STREAM`.
        """

    def fill(self, device: int, address: int, pattern: bytes, count: int, stream: int) -> None:
        """Queue writing `pattern` `count` times, one behind the other; it has as many bytes as `PATTERNS` allows."""

    def pin(self, address: int, nbytes: int) -> None:
        """Lock memory of this process in place, so that copies of it need no staging by the driver. Until `unpin` the
        GPUs use the pages that are there now, also where the system gives these addresses others. No copy, of any
        library, may lie across an end of the memory.

        Raises:
            DeviceError: with `CudaCode.ALREADY_PINNED` where some of it is pinned; with another code where the system
                locks no more memory.
        """

    def unpin(self, address: int, nbytes: int) -> None:
        """Undo `pin`. All copies of the memory must be done.

        Raises:
            DeviceError: with `CudaCode.NOT_PINNED` where no pinned memory begins there.
        """

    def dma_buf(self, device: int, address: int, nbytes: int) -> int:
        """A descriptor (dma-buf) by which a network card registers an extent that is mapped. It belongs to the caller,
        and the extent must stay mapped for as long as the card has it.

        Args:
            device: the device whose memory it is.
            address: the address of the extent.
            nbytes: all its bytes. A range of several extents is not for this call: CUDA may return the first one only.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where `exports_to_cards` is False; with `CudaCode.INVALID_VALUE`
                where address or size is no multiple of `PAGE_NBYTES`.
        """

    def flush(self, device: int) -> None:
        """Return when all that network cards have written to the GPU's memory is visible to work that is queued later,
        on this GPU or another.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where the driver cannot see to that.
        """

    def owner_of(self, pointer: int) -> tuple[int, int, int] | None:
        """The device whose memory `pointer` is in, with address and bytes of that extent; None for other memory."""

    # ---- order

    def stream(self, device: int) -> int:
        """Make a stream, which runs beside all others."""

    def idle(self, device: int, stream: int) -> bool:
        """Whether all work is done that was queued on the stream. Errors are as for `done`."""

    def end_stream(self, device: int, stream: int) -> None:
        """Give up a stream. The work that is queued on it is still done."""

    def event(self, device: int) -> int:
        """Make an event, which can be exported where `shared_events` says so."""

    def end_event(self, device: int, event: int) -> None:
        """Give up an event, made here or opened."""

    def record(self, device: int, event: int, stream: int) -> None:
        """Let the event stand for everything that is queued on the stream now. Only in the process that made it."""

    def record_all(self, device: int, event: int) -> None:
        """Let the event stand for everything that this process has queued on the device now, on any stream. Only in the
        process that made it. CUDA before 12.5 waits for that work instead."""

    def done(self, device: int, event: int) -> bool:
        """Whether the work is done that the event stands for; true for one that was never recorded.

        Raises:
            DeviceError: fatal, where that work has broken the device's context. Any other error says nothing about the
                work: it goes on, and the question is asked again.
        """

    def wait(self, device: int, stream: int, event: int) -> None:
        """Hold back what is queued on the stream after this, until the event's work is done.

        The work is that of the last `record` before this call. A wait ends with the process that would do the work."""

    def event_page(self) -> int:
        """A descriptor of the memory with the events that this process exports, which belongs to the caller.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where `shared_events` is False.
        """

    def add_event_page(self, fd: int, process: int) -> None:
        """Let the events of another process be opened. Idempotent.

        Args:
            fd: its `event_page`; it stays the caller's.
            process: a descriptor of the process (pidfd_open(2)), which stays the caller's.

        Raises:
            DeviceError: with `CudaCode.INVALID_VALUE` where `fd` is no such memory; with `CudaCode.NOT_SUPPORTED` where
                `shared_events` is False.
        """

    def promise_event(self, device: int) -> int:
        """Make an event that stands for work of which `keep_promise` tells the outcome. It is not recorded.

        Raises:
            DeviceError: as `export_event`.
        """

    def keep_promise(self, device: int, event: int, done: bool) -> None:
        """Tell everybody that the work of a promised event is done, or that it never will be. Once for each event."""

    def export_event(self, device: int, event: int) -> bytes:
        """Export what an event that was made here stands for now. Returns `EVENT_NBYTES` bytes.

        Raises:
            DeviceError: with `CudaCode.NOT_SUPPORTED` where `shared_events` is False, or the work of too many exported
                events is not done.
        """

    def lose_events(self) -> None:
        """Let everybody go on who waits for exported work that is not done, as the context of a GPU is broken. Promised
        events stay as they are. Idempotent; nothing where events are not shared."""

    def open_event(self, device: int, exported: bytes) -> int:
        """Open another process's event, whose page was added.

        Raises:
            DeviceError: with `CudaCode.INVALID_HANDLE` where there is no such event.
        """

    def event_is_lost(self, device: int, event: int) -> bool:
        """Whether the process that would do the event's work has ended before that was done, or has told that it never
        will be."""
