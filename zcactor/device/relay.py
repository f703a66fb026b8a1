"""Events of arrays that are computed here from arrays that other processes have yet to compute.

A stream that waits for another process's work goes on when that process ends. So the end of the stream's own work does
not say whether the array is right. Peers get an event whose outcome this process tells, once it knows that of all work
that the array depends on.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from zcactor.device.events import pending
from zcactor.device.imports import OpenEvent
from zcactor.errors import DeviceError

if TYPE_CHECKING:
    from zcactor.device.events import Moment
    from zcactor.device.memory import GpuMemory

__all__ = ["EventRelay"]

_FIRST_PAUSE: Final = 0.0005
_LAST_PAUSE: Final = 0.005
"""Seconds between looks at work that is not done. A look is one at a number in memory. They grow while nothing is
told."""


class EventRelay:
    """The promised events of one process whose outcome is not known. Any thread may use it. A thread of its own tells
    outcomes, as the loop may be waiting for a GPU that waits for one of them."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._promised: list[tuple[Moment, list[Moment]]] = []
        self._runs = False

    def promise(self, gpu: GpuMemory, writes: list[Moment]) -> Moment:
        """Make a moment that peers may wait for. It is done when all `writes` are, and lost as soon as one is lost.

        Raises:
            DeviceError: see `zcactor.device.driver.GpuDriver.promise_event`.
        """
        with self._lock:
            if not self._runs:  # the new thread waits for the lock, and ends where it finds no promise
                threading.Thread(target=self._run, name="zcactor-gpu-relay", daemon=True).start()
                self._runs = True
            moment = OpenEvent(gpu, gpu.driver.promise_event(gpu.index)).moment()
            self._promised.append((moment, writes))
        return moment

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            with self._lock:
                promised, self._promised = self._promised, []
            try:
                left = [each for each in promised if not _is_told(*each)]
            except BaseException:  # a defect: another thread takes the promises over with the next one
                with self._lock:
                    self._promised += promised
                    self._runs = False
                raise
            pause = min(1.1 * pause, _LAST_PAUSE) if len(left) == len(promised) else _FIRST_PAUSE
            del promised
            with self._lock:
                self._promised += left
                if not self._promised:
                    self._runs = False
                    return
            del left
            time.sleep(pause)  # neither another process's page nor a driver tells when a number in memory changes


def _is_told(moment: Moment, writes: list[Moment]) -> bool:
    """Tell the outcome of a promised moment, if it is known. Returns whether it is told."""
    try:
        done = not pending(writes)
        lost = not done and any(each.is_lost() for each in writes)
    except DeviceError as error:  # a broken context does no work any more
        done, lost = False, error.fatal
    if done or lost:
        try:
            moment.driver.keep_promise(moment.device, moment.event, done)
        except DeviceError:  # peers wait, so it is told at the next look, unless it was told before
            return moment.is_lost() or moment.done()
    return done or lost
