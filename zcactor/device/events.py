"""Moments: points in the work of a GPU's streams that other work is ordered after, on the GPU and not on the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.device.driver import GpuDriver

__all__ = ["EventKeeper", "EventPool", "Moment", "ordered", "pending"]


class EventKeeper(Protocol):
    """The keeper of events."""

    def take_back(self, event: int) -> None:
        """Take back an event whose moment was dropped."""


class Moment:
    """All work that was on a stream when an event was recorded. The event is used again after the moment is dropped.

    Args:
        pool: keeps the event and gets it back; None for an event that nobody takes back.
        driver: the driver.
        device: the GPU that the event belongs to here.
        event: the recorded event.
        stream: the stream; -1 for one of another process.
    """

    __slots__ = ("__weakref__", "_done", "_pool", "device", "driver", "event", "stream")

    def __init__(self, pool: EventKeeper | None, driver: GpuDriver, device: int, event: int, stream: int) -> None:
        self._pool = pool
        self._done = False
        self.driver: Final = driver
        self.device: Final = device
        self.event: Final = event
        self.stream: Final = stream

    def done(self) -> bool:
        """Whether the work is done. The driver is asked until it is.

        Raises:
            DeviceError: that work, or other work, has broken the GPU's context.
        """
        self._done = self._done or self.driver.done(self.device, self.event)
        return self._done

    def order(self, device: int, stream: int) -> None:
        """Let later work on a stream begin after this work. Nobody waits on the host.

        Raises:
            DeviceError: the driver refuses.
        """
        if not (self.stream == stream and self.device == device) and not self.done():
            self.driver.wait(device, stream, self.event)

    def is_lost(self) -> bool:
        """Whether the process that would do the work has ended before."""
        return not self._done and self.stream == -1 and self.driver.event_is_lost(self.device, self.event)

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.take_back(self.event)


class EventPool:
    """The events of one GPU, made `STEP` at a time: making them is slow. Any thread may use it.

    Args:
        driver: the driver.
        device: the GPU.
    """

    STEP: Final = 64
    """Events that are made at a time: a millisecond on today's drivers."""

    def __init__(self, driver: GpuDriver, device: int) -> None:
        self._driver: Final = driver
        self._device: Final = device
        self._free: deque[int] = deque()
        self.made = 0
        """Number of events that were made."""

    def record(self, stream: int) -> Moment:
        """Record an event on a stream.

        Raises:
            DeviceError: the driver refuses. No event is lost.
        """
        moment = Moment(self, self._driver, self._device, self._take(), stream)
        self._driver.record(self._device, moment.event, stream)
        return moment

    def is_idle(self, stream: int) -> bool:
        """Whether all work is done that was queued on a stream.

        Raises:
            DeviceError: the context is broken, or there is no such stream.
        """
        return self._driver.idle(self._device, stream)

    def _take(self) -> int:
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                event = self._driver.event(self._device)
                self._free.append(event)
                self.made += 1
                for _ in range(self.STEP - 1):
                    self._free.append(self._driver.event(self._device))
                    self.made += 1

    def take_back(self, event: int) -> None:
        """Take back an event. It runs in finalizers, so it takes no lock."""
        self._free.append(event)


def pending(moments: Iterable[Moment | None]) -> list[Moment]:
    """The moments whose work is not done.

    Raises:
        DeviceError: a GPU's context is broken.
    """
    return [each for each in moments if each is not None and not each.done()]


def ordered(moments: Iterable[Moment | None], device: int, stream: int) -> None:
    """Let later work on a stream begin after the work of all moments.

    Raises:
        DeviceError: the driver refuses.
    """
    for each in moments:
        if each is not None:
            each.order(device, stream)
