"""Streams of a program: the one that a task uses for each GPU."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from zcactor.device.events import lanes
from zcactor.device.memory import wait_on_host
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.device.memory import GpuMemory

__all__ = ["GpuStream", "current_stream", "streams"]

streams: ContextVar[Mapping[int, int]] = ContextVar("zcactor_gpu_streams", default=MappingProxyType({}))
"""The stream of this task, by the GPU's index; the default stream, 0, where there is no entry."""


def current_stream(device: int) -> int:
    """The stream on which this task queues work of a GPU."""
    return streams.get().get(device, 0)


class GpuStream:
    """A stream of a GPU: its work is done in order, beside that of all other streams.

    Args:
        gpu: the GPU.

    Raises:
        DeviceError: the driver makes no stream.
    """

    def __init__(self, gpu: GpuMemory) -> None:
        self._gpu: Final = gpu
        self.ptr: Final = gpu.driver.stream(gpu.index)
        """The driver's handle, a ``CUstream``."""
        self.lane: Final = next(lanes)
        """See `zcactor.device.events.EventPool.lane`."""
        gpu.events.keep(self.ptr, self)

    def done(self) -> bool:
        """Whether all work is done that was queued before.

        Raises:
            DeviceError: work has broken the GPU's context.
        """
        return self._gpu.events.is_idle(self.ptr)

    def synchronize(self) -> None:
        """Wait until all work is done that was queued before. This blocks the thread.

        Raises:
            DeviceError: work has broken the GPU's context.
        """
        wait_on_host([self._gpu.events.record(self.ptr)])

    def __cuda_stream__(self) -> tuple[int, int]:
        """The stream for other libraries: version 0 of the protocol, and the handle."""
        return 0, self.ptr

    def __del__(self) -> None:
        if hasattr(self, "ptr"):  # else the driver made none
            self._gpu.events.leave(self.ptr, self)
            with contextlib.suppress(ZcactorError):  # a finalizer has no caller; the driver ends streams with itself
                self._gpu.driver.end_stream(self._gpu.index, self.ptr)
