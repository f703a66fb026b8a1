"""The owner's answers to readers that ask for the place of an object's bytes: `zcactor.objects.broadcast` decides."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from zcactor.objects.broadcast import OWNER, Copy, Spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.objectstore.store import Block

__all__ = ["MAX_VIEWS", "MAX_WAITING", "PATIENCE", "BroadcastDirectory"]

MAX_VIEWS: Final = 64
"""Different stretches of one object that are tracked; further stretches are pulled from the owner."""
MAX_WAITING: Final = 512
"""Questions that wait for an answer in one process. The answering actor has at most 1,000 open calls, and the end of a
transfer is reported by such a call, too."""
PATIENCE: Final = 60.0
"""Seconds that a question waits: as long as a data socket may be silent (`zcactor.transport.tcp.data.PATIENCE`). After
that the reader that holds up the others hangs, and the owner serves once more. A transfer that has run as long without
a report of its end holds up nobody either."""


class _Asked:
    """A `Spread`, with the readers that wait for its decisions."""

    __slots__ = ("_begun", "_time", "answers", "spread")

    def __init__(self, time: Callable[[], float]) -> None:
        self.spread = Spread()
        self.answers: dict[bytes, asyncio.Future[Copy]] = {}
        self._begun: dict[bytes, float] = {}  # times at which transferring readers were answered
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
        """End the transfers that began at the time `begun` or before."""
        running = self.spread.running
        self._begun = {reader: since for reader, since in self._begun.items() if reader in running}
        for reader, since in self._begun.items():
            if since <= begun:
                self.spread.ended(reader, None)

    def drop(self, reader: bytes) -> None:
        """Drop a reader that has ended, or does not wait any more."""
        answer = self.answers.pop(reader, None)
        if answer is not None and not answer.done():
            answer.set_result(OWNER)
        if self.spread.knows(reader):
            self.spread.left(reader)
            self.decide()


class BroadcastDirectory:
    """The objects of one process whose bytes other processes take from each other. Used on the loop's thread.

    The knowledge of an object ends with the object.

    Args:
        time: function that returns seconds on a monotonic clock.
    """

    def __init__(self, time: Callable[[], float] = time.monotonic) -> None:
        self._time = time
        self._asked: WeakKeyDictionary[Block, dict[tuple[int, int, int], _Asked]] = WeakKeyDictionary()
        self._waiting = 0

    def spread(self, block: Block, offset: int, nbytes: int, authenticate: int = 0) -> Spread | None:
        """The decisions about these bytes of an object; None where no reader has asked for them."""
        asked = self._asked.get(block, {}).get((offset, nbytes, authenticate))
        return None if asked is None else asked.spread

    async def source(
        self, reader: bytes, block: Block, offset: int, nbytes: int, machine: str, failed: bytes = b"",
        authenticate: int = 0,
    ) -> Copy:  # fmt: skip
        """Return the place from which a reader is to take bytes of an object, once it can begin. Cancelling withdraws
        the question.

        Args:
            reader: process id of the reader, which holds a lease on the object.
            block: the object.
            offset: offset of the bytes from the start of the arena.
            nbytes: number of bytes that it reads.
            machine: name of the reader's machine.
            failed: id of the process that it was sent to before, without success.
            authenticate: 1: only copies that were authenticated on their way are offered.
        """
        stretches = self._asked.setdefault(block, {})
        asked = stretches.get((offset, nbytes, authenticate))
        if asked is None:
            if len(stretches) >= MAX_VIEWS:
                return OWNER
            asked = stretches[offset, nbytes, authenticate] = _Asked(self._time)
        asked.spread.gone(failed)
        asked.drop(reader)  # a reader that asks again has given up its earlier question
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
            if asked.answers.get(reader) is answer:  # the question was not answered
                asked.drop(reader)

    def ended(
        self, reader: bytes, block: Block, offset: int, nbytes: int, copy: Copy | None, failed: bytes = b"",
        authenticate: int = 0,
    ) -> None:  # fmt: skip
        """End the transfer of a reader.

        Args:
            reader, block, offset, nbytes, failed, authenticate: as in `source`.
            copy: the copy that the reader has now, or None.
        """
        asked = self._asked.get(block, {}).get((offset, nbytes, authenticate))
        if asked is not None:
            asked.spread.gone(failed)
            asked.spread.ended(reader, copy)
            asked.decide()

    def left(self, process: bytes) -> None:
        """Forget a peer that has ended, or has to connect anew."""
        if self._asked:
            for stretches in list(self._asked.values()):
                for asked in stretches.values():
                    asked.drop(process)
