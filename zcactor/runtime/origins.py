"""Who takes the bytes of an object from where: what its owner decides.

Processes that cannot map the owner's arena pull the bytes. A pulled copy is an object of the reader's own, and as good
as the first: so who comes next is sent to it, and an array that goes to many hosts goes down a tree. The owner decides,
one object at a time, because it knows who asked: `Spread` without any I/O, and `Origins`, which answers for it. The
reader's side is `zcactor.runtime.locations`.

That readers serve as sources while the owner keeps the directory is Hoplite's idea (Zhuang et al., "Hoplite: Efficient
and Fault-Tolerant Collective Communication for Task-Based Distributed Systems", SIGCOMM 2021).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.objectstore.store import Block

__all__ = ["AT_ONCE", "OWNER", "Copy", "Origins", "Spread"]

AT_ONCE: Final = 2
"""Transfers of one object that run from one place. With one, a tree of N readers is N deep where a reader is slow; with
two it is about log2 N deep, and each gets half of a link."""
MAX_COPIES: Final = 1024
"""Copies of one object that its owner remembers: every one of so many hosts."""
MAX_VIEWS: Final = 64
"""Different stretches of one object that are kept apart; further ones are pulled from the owner."""
MAX_WAITING: Final = 512
"""Questions that wait for their answer in one process. The actor that answers has 1,000 calls open at most, and that
a transfer has ended is told by such a call, too."""
PATIENCE: Final = 60.0
"""Seconds that a question waits: as long as a data socket may be silent (`zcactor.transport.tcp_data.PATIENCE`). After
that whoever holds the others up hangs, and the owner serves once more. A transfer that has run for as long, and whose
end nobody has told, holds up nobody either."""


class Copy(NamedTuple):
    """A place where all bytes of an object are."""

    process: bytes
    """Its process id; empty for the owner's own object."""
    id: int
    """Of the object there."""
    offset: int
    """Bytes from the start of the arena there."""
    machine: str
    """See `Process.machine`."""


OWNER: Final = Copy(b"", 0, 0, "")


class Spread:
    """Who takes the bytes of one object from where: the decisions of its owner, without any I/O.

    A reader that asks waits until `decide` has a place for it: a copy on its own machine, which it maps; else one from
    which fewer than `AT_ONCE` transfers run. The owner itself counts as such a place for the first `AT_ONCE` transfers,
    and after those only while there is no copy. Of readers on one machine one transfers, and the others wait for it.

    Attributes:
        copies: by process.
        running: of each reader that transfers, where from, and its machine.
        waiting: the machine of each reader that has no place yet, in the order in which they asked.
        direct: transfers from the owner, ever.
    """

    def __init__(self) -> None:
        self.copies: dict[bytes, Copy] = {}
        self.running: dict[bytes, tuple[Copy, str]] = {}
        self.waiting: dict[bytes, str] = {}
        self.direct = 0

    def ask(self, reader: bytes, machine: str) -> None:
        """A reader wants the bytes. It has none, whatever was known of it, and transfers nothing."""
        self.left(reader)
        self.waiting[reader] = machine

    def decide(self) -> list[tuple[bytes, Copy]]:
        """Those of the readers that wait no longer, and where each takes the bytes from."""
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
        """The transfer of a reader is over, and it has a copy now, or it has not."""
        self.running.pop(reader, None)
        if copy is not None:
            self.copies[reader] = copy
            if len(self.copies) > MAX_COPIES:
                del self.copies[next(iter(self.copies))]

    def gone(self, process: bytes) -> None:
        """There is no copy at a process any more, or it cannot be reached."""
        self.copies.pop(process, None)

    def knows(self, process: bytes) -> bool:
        """Whether it matters here that a process is gone."""
        return process in self.copies or process in self.running or process in self.waiting

    def left(self, process: bytes) -> None:
        """Nothing is known of a process any more, and it wants nothing."""
        self.copies.pop(process, None)
        self.running.pop(process, None)
        self.waiting.pop(process, None)


class _Asked:
    """A `Spread`, and those who wait for its decisions."""

    __slots__ = ("_begun", "_time", "answers", "spread")

    def __init__(self, time: Callable[[], float]) -> None:
        self.spread = Spread()
        self.answers: dict[bytes, asyncio.Future[Copy]] = {}
        self._begun: dict[bytes, float] = {}  # when those that transfer were answered
        self._time = time

    def decide(self) -> None:
        again = True
        while again:
            again = False
            for reader, copy in self.spread.decide():
                answer = self.answers.pop(reader)
                if answer.done():  # its task was cancelled
                    self.spread.left(reader)
                    again = True
                else:
                    answer.set_result(copy)
                    self._begun[reader] = self._time()

    def forget(self, begun: float) -> None:
        """Transfers that began by that time count as ended."""
        running = self.spread.running
        self._begun = {reader: since for reader, since in self._begun.items() if reader in running}
        for reader, since in self._begun.items():
            if since <= begun:
                self.spread.ended(reader, None)

    def drop(self, reader: bytes) -> None:
        """It is gone, or waits no longer."""
        answer = self.answers.pop(reader, None)
        if answer is not None and not answer.done():
            answer.set_result(OWNER)
        if self.spread.knows(reader):
            self.spread.left(reader)
            self.decide()


class Origins:
    """The objects of one process that others take from each other. On the loop's thread.

    What is known of an object goes with it.

    Args:
        time: seconds on a clock that never goes back.
    """

    def __init__(self, time: Callable[[], float] = time.monotonic) -> None:
        self._time = time
        self._asked: WeakKeyDictionary[Block, dict[tuple[int, int, int], _Asked]] = WeakKeyDictionary()
        self._waiting = 0

    def spread(self, block: Block, offset: int, nbytes: int, authenticate: int = 0) -> Spread | None:
        """What is known of these bytes of an object; None where nobody has asked."""
        asked = self._asked.get(block, {}).get((offset, nbytes, authenticate))
        return None if asked is None else asked.spread

    async def source(
        self, reader: bytes, block: Block, offset: int, nbytes: int, machine: str, failed: bytes = b"",
        authenticate: int = 0,
    ) -> Copy:  # fmt: skip
        """Where a reader is to take bytes of an object from; answered when it can begin. Cancelling it is as if the
        reader had not asked.

        Args:
            reader: its process id. It holds a lease on the object.
            block: the object.
            offset: bytes from the start of the arena.
            nbytes: of what it reads.
            machine: the reader's.
            failed: the process that it was sent to before and got nothing from.
            authenticate: 1: it is sent to copies only that were authenticated on their way.
        """
        stretches = self._asked.setdefault(block, {})
        asked = stretches.get((offset, nbytes, authenticate))
        if asked is None:
            if len(stretches) >= MAX_VIEWS:
                return OWNER
            asked = stretches[offset, nbytes, authenticate] = _Asked(self._time)
        asked.spread.gone(failed)
        asked.drop(reader)  # who asks again has given up what it asked before
        answer: asyncio.Future[Copy] = asyncio.get_running_loop().create_future()
        asked.answers[reader] = answer
        asked.spread.ask(reader, machine)
        now = self._time()
        asked.forget(now - PATIENCE)
        asked.decide()
        if not answer.done() and self._waiting >= MAX_WAITING:
            asked.drop(reader)
        if answer.done():
            return answer.result()
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE):
                return await answer
        except TimeoutError:
            asked.forget(now)
            asked.decide()
            return OWNER
        finally:
            self._waiting -= 1
            if asked.answers.get(reader) is answer:  # it was not answered
                asked.drop(reader)

    def ended(
        self, reader: bytes, block: Block, offset: int, nbytes: int, copy: Copy | None, failed: bytes = b"",
        authenticate: int = 0,
    ) -> None:  # fmt: skip
        """The transfer of a reader is over.

        Args:
            reader, block, offset, nbytes, failed, authenticate: as in `source`.
            copy: what the reader has now, if it has.
        """
        asked = self._asked.get(block, {}).get((offset, nbytes, authenticate))
        if asked is not None:
            asked.spread.gone(failed)
            asked.spread.ended(reader, copy)
            asked.decide()

    def left(self, process: bytes) -> None:
        """A peer is gone, or has to connect anew."""
        if self._asked:
            for stretches in list(self._asked.values()):
                for asked in stretches.values():
                    asked.drop(process)
