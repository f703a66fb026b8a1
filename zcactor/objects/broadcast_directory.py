"""The owner's answers to readers that ask for the place of an object's bytes: `zcactor.objects.broadcast` decides."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from zcactor.errors import ObjectLost
from zcactor.objects.broadcast import OWNER, Copy, Spread
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.objectstore.store import Block, Store

__all__ = ["MAX_VIEWS", "MAX_WAITING", "PATIENCE", "BroadcastDirectory", "BroadcastService"]

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


class BroadcastService:
    """The questions of readers, about objects of a store.

    Args:
        pid: of the process.
        store: of the process.
        directory: the answers.
    """

    def __init__(self, pid: int, store: Store, directory: BroadcastDirectory) -> None:
        self._pid = pid
        self._store = store
        self._directory = directory

    @remote(6)
    async def source(
        self, object_id: int, offset: int, nbytes: int, machine: str, failed: bytes, authenticate: int
    ) -> tuple[bytes, int, int]:
        """The source of an object's bytes for the caller, who holds a lease on it: a process, and the id and the offset
        of the copy there; an empty process id stands for this process. See `BroadcastDirectory.source`.

        Raises:
            ObjectLost: the object is gone.
        """
        block = self._store.lookup(object_id)
        if block is None:
            raise ObjectLost(f"object {object_id:x} is no longer held by its owner, pid {self._pid}")
        reader = caller().peer_process
        return (await self._directory.source(reader, block, offset, nbytes, machine, failed, authenticate))[:3]

    @remote(7)
    async def located(
        self, object_id: int, offset: int, nbytes: int, copy_id: int, copy_offset: int, machine: str, failed: bytes,
        authenticate: int,
    ) -> None:  # fmt: skip
        """Note the end of the caller's transfer of an object of ours, and the id of its copy; 0 where it has none."""
        block = self._store.lookup(object_id)
        if block is not None:
            reader = caller().peer_process
            copy = Copy(reader, copy_id, copy_offset, machine) if copy_id else None
            self._directory.ended(reader, block, offset, nbytes, copy, failed, authenticate)
