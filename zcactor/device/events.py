"""Moments: points in the work of a GPU's streams that other work is ordered after, on the GPU and not on the host."""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol
from weakref import WeakValueDictionary

from zcactor.device.driver import LEGACY_STREAM
from zcactor.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.device.driver import GpuDriver

__all__ = [
    "DEFAULT", "EVERYWHERE", "OTHERS", "PATIENCE", "EventKeeper", "EventPool", "Moment", "lanes", "ordered", "pending",
]  # fmt: skip

DEFAULT: Final = 0
"""The lane of each GPU's default stream."""
EVERYWHERE: Final = -1
"""The lane of work on a stream that nobody here keeps, or on several."""
OTHERS: Final = -2
"""The lane of another process's work."""
lanes: Final = itertools.count(1)
"""The lanes of streams that the program makes."""
PATIENCE: Final = 60.0
"""Seconds for which a driver may refuse to say whether work is done, as it does while a program captures a graph."""


_LOST: Final = (
    "the process that computes the array, or one that the array is computed from, has ended, or lost its GPU, before "
    "the work was done; compute the value again"
)


class EventKeeper(Protocol):
    """The keeper of events."""

    def take_back(self, event: int) -> None:
        """Take back an event whose moment was dropped."""

    def lane(self, stream: int) -> int:
        """The lane of a stream, by its handle; see `EventPool.lane`."""


class Moment:
    """All work that was on a stream when an event was recorded. The event is used again after the moment is dropped.

    Args:
        pool: keeps the event and gets it back; None for an event that nobody takes back.
        driver: the driver.
        device: the GPU that the event belongs to here.
        event: the recorded event.
        lane: the lane of the stream; `OTHERS` for one of another process.
    """

    loss: ClassVar[str] = _LOST
    """The text of `ObjectLost` where the work is lost."""
    spoils_libraries: ClassVar[bool] = True
    """Whether its loss counts for all that libraries write which had the bytes; see `zcactor.device.work.lend`."""

    __slots__ = ("__weakref__", "_done", "_pool", "_refused_at", "device", "driver", "event", "lane")

    def __init__(self, pool: EventKeeper | None, driver: GpuDriver, device: int, event: int, lane: int) -> None:
        self._pool = pool
        self._done = False
        self._refused_at = 0.0
        """The time since which the driver does not say whether the work is done; 0 where it does."""
        self.driver: Final = driver
        self.device: Final = device
        self.event: Final = event
        self.lane: Final = lane

    def done(self) -> bool:
        """Whether the work is known to be done. The driver is asked until it is: errors that are not fatal say nothing
        about the work.

        Raises:
            DeviceError: that work, or other work, has broken the GPU's context; or the driver has refused to answer for
                `PATIENCE` seconds.
        """
        if not self._done:
            try:
                self._done = self.driver.done(self.device, self.event)
                self._refused_at = 0.0
            except DeviceError as error:
                now = time.monotonic()
                self._refused_at = self._refused_at or now
                if error.fatal or now - self._refused_at > PATIENCE:
                    raise
        return self._done

    @property
    def is_unknown(self) -> bool:
        """Whether the driver gave no answer when it was asked last."""
        return self._refused_at > 0

    def order(self, device: int, stream: int) -> None:
        """Let later work on a stream begin after this work. Nobody waits on the host.

        Raises:
            DeviceError: the driver refuses.
        """
        in_turn = self._pool is not None and self.device == device and self.lane == self._pool.lane(stream) >= DEFAULT
        if not in_turn and not self.done():
            self.driver.wait(device, stream, self.event)

    def is_lost(self) -> bool:
        """Whether the process that would do the work has ended before."""
        return not self._done and self.lane == OTHERS and self.driver.event_is_lost(self.device, self.event)

    @property
    def key(self) -> tuple[object, ...]:
        """The same for moments of the same work of another process."""
        return id(self.driver), self.device, self.event

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
        self.driver: Final = driver
        self._device: Final = device
        self._free: deque[int] = deque()
        self._lanes: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
        """The program's streams, by their handles."""
        self.made = 0
        """Number of events that were made."""

    def keep(self, stream: int, keeper: Any) -> None:
        """Note that a stream of the program has a lane of its own. A driver hands out the handle of a stream that has
        ended again, so handles do not tell streams apart.

        Args:
            stream: the handle.
            keeper: ends the stream; its ``lane`` is one of `lanes`.
        """
        self._lanes[stream] = keeper

    def leave(self, stream: int, keeper: Any) -> None:
        """Undo `keep`, before the driver may hand the handle out again."""
        if self._lanes.get(stream) is keeper:
            del self._lanes[stream]

    def keeper(self, stream: int) -> Any:
        """The object that keeps a stream of the program, by its handle; None for another stream."""
        return self._lanes.get(stream)

    def lane(self, stream: int) -> int:
        """The lane of a stream, by its handle: a number that no other stream ever has. `EVERYWHERE` for one of another
        library, which may have ended, and another have its handle by now."""
        keeper = self._lanes.get(stream)
        if keeper is not None:
            return int(keeper.lane)
        return DEFAULT if stream in {0, LEGACY_STREAM} else EVERYWHERE

    def record(self, stream: int) -> Moment:
        """Record an event on a stream.

        Raises:
            DeviceError: the driver refuses. No event is lost.
        """
        moment = Moment(self, self.driver, self._device, self._take(), self.lane(stream))
        self.driver.record(self._device, moment.event, stream)
        return moment

    def record_all(self) -> Moment:
        """Record an event behind all that this process has queued on the GPU, on whichever stream.

        Raises:
            DeviceError: the driver refuses. No event is lost.
        """
        moment = Moment(self, self.driver, self._device, self._take(), EVERYWHERE)
        self.driver.record_all(self._device, moment.event)
        return moment

    def is_idle(self, stream: int) -> bool:
        """Whether all work is known to be done that was queued on a stream.

        Raises:
            DeviceError: the context is broken.
        """
        try:
            return self.driver.idle(self._device, stream)
        except DeviceError as error:
            if error.fatal:
                raise
            return False

    def _take(self) -> int:
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                event = self.driver.event(self._device)
                self._free.append(event)
                self.made += 1
                for _ in range(self.STEP - 1):
                    self._free.append(self.driver.event(self._device))
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
