"""The work that is queued on the bytes of one object, on any streams: later work is ordered after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.device.events import ordered, pending
from zcactor.errors import ObjectLost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.device.events import Moment

__all__ = ["LOST", "Work"]

LOST = "the process that computes the array has ended before the work on its GPU was done; compute the value again"
"""The text of `ObjectLost` for an array that is never computed."""

_LOOKED_AT = 16
"""Number of reads from which on those that are done are forgotten: an array that is read often keeps few events."""


class Work:
    """The last writes and all unfinished reads of one object's bytes.

    Args:
        after: the work after which the bytes may be used at all.
    """

    __slots__ = ("_reads", "_writes")

    def __init__(self, after: Iterable[Moment] = ()) -> None:
        self._writes = list(after)
        self._reads: list[Moment] = []

    def before_reading(self, device: int, stream: int) -> None:
        """Let later work on a stream begin after all writes.

        Raises:
            DeviceError: the driver refuses.
            ObjectLost: the process that writes has ended before that was done.
        """
        if any(moment.is_lost() for moment in self._writes):
            raise ObjectLost(LOST)
        ordered(self._writes, device, stream)

    def before_writing(self, device: int, stream: int) -> None:
        """Let later work on a stream begin after all writes and reads.

        Raises:
            DeviceError: the driver refuses.
        """
        ordered(self._writes, device, stream)
        ordered(self._reads, device, stream)

    def has_read(self, moment: Moment) -> None:
        """Note a read that is before `moment`."""
        self._reads.append(moment)
        if len(self._reads) >= _LOOKED_AT:
            self._reads = pending(self._reads)

    def has_written(self, moment: Moment) -> None:
        """Note a write that is before `moment`, and after all other work."""
        self._writes = [moment]
        self._reads = []

    def comes_after(self, moment: Moment) -> None:
        """Note a write of the owner, which is before all work here."""
        self._writes.append(moment)

    def writes(self) -> list[Moment]:
        """The writes that are not done.

        Raises:
            DeviceError: the GPU's context is broken.
        """
        self._writes = pending(self._writes)
        return self._writes

    def all(self) -> list[Moment]:
        """All work that was noted, done or not."""
        return [*self._writes, *self._reads]
