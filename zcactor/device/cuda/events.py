"""CUDA's own events, which order the work of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.device.driver import CudaCode, Refused

if TYPE_CHECKING:
    from zcactor.device.cuda.calls import CudaCalls

__all__ = ["CudaEvents"]


class CudaEvents:
    """The events that one process has made. Any thread may use them.

    Args:
        cuda: the calls of CUDA.
    """

    def __init__(self, cuda: CudaCalls) -> None:
        self._cuda: Final = cuda
        self._events: Final[dict[int, int]] = {}
        """The device of each event."""

    def make(self, device: int) -> int:
        """Make an event."""
        flags = int(self._cuda.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        made = int(self._cuda.ask("event", device, "cuEventCreate", flags))
        self._events[made] = device
        return made

    def check(self, event: int) -> int:
        """The device of an event.

        Raises:
            Refused: there is no such event.
        """
        device = self._events.get(event)
        if device is None:
            raise Refused(CudaCode.INVALID_HANDLE, f"there is no event {event}")
        return device

    def end(self, event: int) -> None:
        """Give up an event."""
        self._cuda.ask("end_event", self.check(event), "cuEventDestroy", event)
        del self._events[event]

    def record(self, device: int, event: int, stream: int) -> None:
        """Let the event stand for everything that is queued on the stream now."""
        if self.check(event) != device:
            raise Refused(CudaCode.INVALID_HANDLE, f"{event} is no event that was made for GPU {device}")
        self._cuda.ask("record", device, "cuEventRecord", event, stream)

    def record_all(self, device: int, event: int) -> None:
        """Let the event stand for everything that is queued on the device now."""
        if self.check(event) != device:
            raise Refused(CudaCode.INVALID_HANDLE, f"{event} is no event that was made for GPU {device}")
        self._cuda.record_all(device, event)

    def done(self, device: int, event: int) -> bool:
        """Whether the work before the last record is done."""
        self.check(event)
        with self._cuda.current("done", device):
            return self._cuda.is_ready("done", device, "cuEventQuery", event)

    def wait(self, device: int, event: int, stream: int) -> None:
        """Hold back what is queued on the stream after this, until the work of the last record is done."""
        self.check(event)
        self._cuda.ask("wait", device, "cuStreamWaitEvent", stream, event, 0)

    def close(self) -> None:
        """Give everything back. All streams of this process have ended. Idempotent."""
        for event in self._events:
            self._cuda.api.cuEventDestroy(event)
        self._events.clear()
