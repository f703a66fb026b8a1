"""The distribution of an object's bytes: its owner decides which reader takes them from which place.

Processes that cannot map the owner's arena pull the bytes. A pulled copy is an object of the reader's own, and as good
as the original: later readers are sent to it, and an array for many hosts goes down a tree. The owner decides, for each
object by itself, because it knows the readers: `Spread` decides without any I/O, and
`zcactor.objects.broadcast_directory` answers for it. The reader's side is `zcactor.objects.locations`.

That readers serve as sources while the owner keeps the directory is Hoplite's idea (Zhuang et al., "Hoplite: Efficient
and Fault-Tolerant Collective Communication for Task-Based Distributed Systems", SIGCOMM 2021).
"""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

__all__ = ["AT_ONCE", "MAX_COPIES", "OWNER", "Copy", "Spread"]

AT_ONCE: Final = 2
"""Transfers of one object that run from one place at a time. With one, a tree of N readers is N deep where a reader is
slow; with two it is about log2 N deep, and each transfer gets half of a link."""
MAX_COPIES: Final = 1024
"""Copies of one object that its owner remembers: enough for the copies on as many hosts."""


class Copy(NamedTuple):
    """A place that has all bytes of an object."""

    process: bytes
    """Id of the process there; empty for the owner's own object."""
    id: int
    """Id of the object there."""
    offset: int
    """Offset in bytes from the start of the arena there."""
    machine: str
    """Name of the machine; see `Locations.machine`."""


OWNER: Final = Copy(b"", 0, 0, "")


class Spread:
    """The decisions of an owner about one object: which reader takes the bytes from which place. It does no I/O.

    A reader that asks waits until `decide` has a place for it: a copy on its own machine, which it maps, or otherwise a
    copy from which fewer than `AT_ONCE` transfers run. The owner itself counts as such a place for the first `AT_ONCE`
    transfers, and after those only while there is no copy. Of several readers on one machine one transfers, and the
    others wait for it.

    Attributes:
        copies: the copies by process.
        running: the source and the own machine of each reader that transfers.
        waiting: the machine of each reader without a place, in the order of their questions.
        direct: number of transfers from the owner so far.
    """

    def __init__(self) -> None:
        self.copies: dict[bytes, Copy] = {}
        self.running: dict[bytes, tuple[Copy, str]] = {}
        self.waiting: dict[bytes, str] = {}
        self.direct = 0

    def ask(self, reader: bytes, machine: str) -> None:
        """Enter a reader that wants the bytes. Earlier knowledge of the reader is dropped: it has no copy and transfers
        nothing."""
        self.left(reader)
        self.waiting[reader] = machine

    def decide(self) -> list[tuple[bytes, Copy]]:
        """Decide for waiting readers. Returns each reader that need not wait any more, with the place of its bytes."""
        load = Counter(copy.process for copy, _ in self.running.values())
        coming = {machine for _, machine in self.running.values()}
        near = {copy.machine: copy for copy in self.copies.values()}
        decided = []
        place: Copy | None = OWNER
        for reader, machine in list(self.waiting.items()):
            found = near.get(machine) if machine else None
            if found is None:
                if place is None or (machine and machine in coming):
                    continue
                found = place = self._place(load)
                if found is None:
                    continue
                load[found.process] += 1
                coming.add(machine)
                self.running[reader] = found, machine
                self.direct += found is OWNER
            del self.waiting[reader]
            decided.append((reader, found))
        return decided

    def _place(self, load: Counter[bytes]) -> Copy | None:
        if load[OWNER.process] < AT_ONCE and (self.direct < AT_ONCE or not self.copies):
            return OWNER
        copy = min(self.copies.values(), key=lambda copy: load[copy.process], default=None)
        return copy if copy is not None and load[copy.process] < AT_ONCE else None

    def ended(self, reader: bytes, copy: Copy | None) -> None:
        """End the transfer of a reader. `copy` is the copy that it has now, or None."""
        self.running.pop(reader, None)
        if copy is not None:
            self.copies[reader] = copy
            if len(self.copies) > MAX_COPIES:
                del self.copies[next(iter(self.copies))]

    def gone(self, process: bytes) -> None:
        """Forget the copy at a process, which has none any more or cannot be reached."""
        self.copies.pop(process, None)

    def knows(self, process: bytes) -> bool:
        """Whether the end of a process matters for this object."""
        return process in self.copies or process in self.running or process in self.waiting

    def left(self, process: bytes) -> None:
        """Forget everything about a process."""
        self.copies.pop(process, None)
        self.running.pop(process, None)
        self.waiting.pop(process, None)
