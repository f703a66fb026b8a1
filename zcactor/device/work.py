"""The work that is queued on the bytes of one object, on any streams: later work is ordered after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from zcactor.device.driver import LEGACY_STREAM, THREAD_STREAM
from zcactor.device.events import OTHERS, ordered, pending
from zcactor.errors import DeviceError, ForkedProcess, ObjectLost

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zcactor.device.driver import GpuDriver
    from zcactor.device.events import EventPool, Moment

__all__ = ["LibraryLoan", "Work", "lend", "lent_others", "looks", "moments_of", "of_others"]

_LOOKS: Final = 8
"""The part of the time waited so far that a pause takes, as 1 / `_LOOKS`: the end is noticed that much too late."""
_LOOKED_AT = 16
"""Number of reads from which on those that are done are forgotten: an array that is read often keeps few events."""


def looks(moments: Iterable[Moment], first: float, last: float) -> Iterator[float]:
    """Look at moments until the work of all is done. Between two looks the caller waits for the seconds that come,
    which grow from `first` to `last`.

    Raises:
        DeviceError: see `Moment.done`.
        ObjectLost: a process that would do some of the work has ended. No wait of a driver would end then.
    """
    begun, pause = time.monotonic(), first
    left = list(moments)
    while left := pending(left):
        _check_all(left)
        yield pause
        pause = min(max(first, (time.monotonic() - begun) / _LOOKS), last)


class LibraryLoan:
    """The bytes of a holder at a library that works on streams which nobody here keeps, as long as this lives. Such a
    stream may end at any time, so it is never asked: the bytes are ordered after all that this process has queued.

    Args:
        holder: the holder, which the library's object keeps by this.
    """

    __slots__ = ("__weakref__", "holder")

    def __init__(self, holder: Any) -> None:
        self.holder: Final = holder


_lent: Final[dict[tuple[object, ...], Moment]] = {}
"""The writes of other processes that were not done when a library got their bytes, by `Moment.key`. Finalizers use it,
so each step is one that needs no lock."""


def lend(others: Iterable[Moment]) -> None:
    """Note that a library has bytes that other processes have yet to compute: until that is done, all that libraries
    compute in this process may be computed from them, on whichever stream and GPU. It may be for ever where the bytes
    are lost, as nobody knows which of the library's objects had them.

    Args:
        others: the other processes' writes.
    """
    _lent.update((moment.key, moment) for moment in others if moment.spoils_libraries)


def lent_others(driver: GpuDriver) -> list[Moment]:
    """The writes of other processes from which libraries may have computed their results.

    Args:
        driver: of the GPUs.

    Raises:
        DeviceError: a GPU's context is broken.
    """
    found = []
    for key, moment in _lent.copy().items():
        if moment.driver is driver:
            if moment.done():
                _lent.pop(key, None)
            else:
                found.append(moment)
    return found


class Work:
    """The last writes and all unfinished reads of one object's bytes.

    Among the writes are those of other processes: of the owner, and of the makers of arrays from which the bytes are
    computed here. When such a process ends before its work is done, streams that wait for the work go on, and what they
    compute is wrong. So the writes of others count until they are done, also where the work that has read them is over.

    Args:
        after: the work after which the bytes may be used at all.
        sealed: whether nobody writes to the bytes here.
    """

    __slots__ = ("_given", "_loans", "_reads", "_sealed", "_writes")

    def __init__(self, after: Iterable[Moment] = (), *, sealed: bool = False) -> None:
        self._writes = list(after)
        self._reads: list[Moment] = []
        self._sealed = sealed
        self._given: dict[tuple[EventPool, int], object] = {}
        """Streams of libraries that have the bytes, each with the object that keeps it."""
        self._loans: list[tuple[EventPool, ref[object]]] = []

    def give(self, pool: EventPool, stream: int, kept: object, loan: object) -> None:
        """Note that a library has the bytes. All that it queues on a stream counts as work on them: as writes until
        `seal`, and from then on as reads. Where nobody keeps the stream, or it is another one in each thread, that is
        all that it queues anywhere.

        Args:
            pool: the events of the stream's GPU.
            stream: the stream.
            kept: the object that keeps the stream; None for a stream that nobody keeps.
            loan: lives as long as the library has the bytes; they are kept by it.
        """
        if stream in {0, LEGACY_STREAM}:
            self._given.setdefault((pool, 0), None)
        elif kept is not None and stream != THREAD_STREAM:
            self._given.setdefault((pool, stream), kept)
        elif (lent := (pool, ref(loan))) not in self._loans:
            self._loans.append(lent)

    def unseal(self) -> None:
        """Undo `seal`."""
        self._sealed = False

    @property
    def is_given(self) -> bool:
        """Whether a library has had the bytes."""
        return bool(self._given or self._loans)

    def _of_libraries(self) -> list[Moment]:
        """The work that libraries have queued on the bytes up to now."""
        given = list(self._given)
        found = [pool.record(stream) for pool, stream in given if not pool.is_idle(stream)]
        pools = [pool for pool, _ in (*given, *self._loans)]
        others = lent_others(pools[0].driver) if pools and _lent else []
        if self._loans:
            loans = self._loans
            lasting = [each for each in loans if each[1]() is not None]
            behind = [pool.record_all() for pool in {pool for pool, _ in loans}]
            self._loans = [*lasting, *self._loans[len(loans) :]]
            if len(lasting) == len(loans):
                found += behind
            elif self._sealed:  # nothing more comes of the others, so this is noted
                self._reads += behind
            else:
                self._writes = _each_once([*self._writes, *behind, *others])
        return [*found, *others]

    def _written(self) -> list[Moment]:
        if self._sealed or not self.is_given:
            return self._writes
        found = self._of_libraries()
        return [*self._writes, *found]

    def seal(self) -> None:
        """Note that nobody writes to the bytes from now on. Idempotent.

        Raises:
            ObjectLost: the bytes are never computed.
            DeviceError: the driver refuses.
        """
        writes = self._written()
        _check_all(writes)
        self._writes, self._sealed = writes, True

    def before_reading(self, device: int, stream: int) -> list[Moment]:
        """Let later work on a stream begin after all writes. Returns the writes of other processes that are not done:
        what is computed from the bytes is lost when these are.

        Raises:
            DeviceError: the driver refuses.
            ObjectLost: the process that writes has ended before that was done.
        """
        writes = self._written()
        _check_all(writes)
        ordered(writes, device, stream)
        return of_others(writes)

    def before_writing(self, device: int, stream: int) -> list[Moment]:
        """Let later work on a stream begin after all writes and reads. Returns the same as `before_reading`, for work
        that reads the bytes, too.

        Raises:
            DeviceError: the driver refuses.
        """
        writes = self._written()
        ordered(writes, device, stream)
        ordered(self._reads, device, stream)
        return of_others(writes)

    def has_read(self, moment: Moment) -> None:
        """Note a read that is before `moment`."""
        self._reads.append(moment)
        if len(self._reads) >= _LOOKED_AT:
            self._reads = pending(self._reads)

    def has_written(self, moment: Moment, others: Sequence[Moment] = (), *, whole: bool) -> None:
        """Note a write that is before `moment`, and after all other work.

        Args:
            moment: after the write.
            others: the writes of other processes from which the new bytes are computed.
            whole: whether all bytes were written, so that nothing depends on former writes.
        """
        former = [] if whole else of_others(self._writes)
        # Those of others come first: a thread that waits learns of a loss, also where `moment` never comes.
        self._writes = [*_each_once([*others, *former]), moment] if others or former else [moment]
        self._reads = []

    def comes_after(self, moment: Moment) -> None:
        """Note a write of the owner, which is before all work here."""
        self._writes.append(moment)

    def writes(self) -> list[Moment]:
        """The writes that are not done.

        Raises:
            DeviceError: the GPU's context is broken.
            ObjectLost: the bytes are never computed.
        """
        self._writes = pending(self._writes)
        writes = self._written()
        _check_all(writes)
        return writes

    def all(self) -> list[Moment]:
        """All work of this process that was noted, done or not. Where a library has the bytes, the driver is asked.

        Raises:
            DeviceError: the driver does not answer for now.
        """
        try:
            found = self._of_libraries()
        except ForkedProcess:
            found = []
        except DeviceError as error:
            if not error.fatal:
                raise
            found = []  # nothing more is done
        return [each for each in (*self._writes, *self._reads, *found) if each.lane != OTHERS]

    @property
    def left(self) -> list[Moment] | Work:
        """The work to wait for once the bytes are dropped, for `moments_of`. Finalizers take it, and ask no driver:
        where a library has the bytes, this object is asked later."""
        return self if self.is_given else self.all()


def of_others(moments: Iterable[Moment]) -> list[Moment]:
    """The moments of other processes' work that is not done.

    Raises:
        DeviceError: a GPU's context is broken.
    """
    return [each for each in moments if each.lane == OTHERS and not each.done()]


def _check_all(writes: Iterable[Moment]) -> None:
    """Check that each write is done, or will be.

    Raises:
        ObjectLost: one is not.
    """
    for moment in writes:
        if moment.is_lost():
            raise ObjectLost(moment.loss)


def _each_once(moments: Iterable[Moment]) -> list[Moment]:
    """The moments, one of each work: bytes are often computed from several parts of the same array."""
    return list({moment.key: moment for moment in moments}.values())


def moments_of(left: list[Moment] | Work) -> list[Moment]:
    """The moments of the work that `Work.left` has given.

    Raises:
        DeviceError: the driver does not answer for now.
    """
    return left.all() if isinstance(left, Work) else left
