"""A head's log in memory: of a head that ends with its process, or of several heads in one process, for tests."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from zcactor.control.head_log import MAX_NBYTES, Deposed, LastingTerm, LeaderAt, applied, check_batch
from zcactor.control.leading import Leading

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from zcactor.control.head_log import Candidate, Change, HeadState, Term

__all__ = ["MemoryBook", "MemoryLog"]


class MemoryBook:
    """The memory that the logs of one cluster's heads share."""

    def __init__(self) -> None:
        self.state: dict[str, dict[str, bytes]] = {}
        self.epoch = 0
        self.leading = Leading()
        self.waiting: deque[asyncio.Future[None]] = deque()
        """The candidates, the one first that has waited longest."""

    def led(self) -> bool:
        """Whether somebody leads."""
        return self.leading.leader is not None

    def wake(self) -> None:
        """Let the next candidate try."""
        while self.waiting:
            candidate = self.waiting.popleft()
            if not candidate.done():
                candidate.set_result(None)
                return


class MemoryLog:
    """The log of one head; see `zcactor.control.head_log.HeadLog`.

    Args:
        book: the memory that it shares with the logs of other heads; None where there are no others.
    """

    recipe_nbytes: int = MAX_NBYTES - (64 << 10)  # the rest is for keys, and for other entries of the batch

    def __init__(self, book: MemoryBook | None = None) -> None:
        self._book = book or MemoryBook()
        self._term: Term | None = None

    async def campaign(self, me: Candidate) -> Term:
        book = self._book
        while book.led():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            book.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and not book.led():
                    book.wake()  # it was our turn, and is the next one's
                raise
        book.epoch += 1
        self._term = LastingTerm(book.epoch)
        book.leading.lead(LeaderAt(book.epoch, me.address))
        return self._term

    def _check(self, term: Term) -> None:
        leader = self._book.leading.leader
        if leader is None or leader.epoch != term.epoch:
            raise Deposed(term.epoch, self._book.epoch)

    async def load(self, term: Term) -> HeadState:
        self._check(term)
        return applied(self._book.state, ())

    async def record(self, term: Term, changes: Sequence[Change]) -> None:
        check_batch(changes)
        self._check(term)
        state = self._book.state
        for kind, key, value in changes:  # in place: a head with many actors records each of them several times
            if value is not None:
                state.setdefault(kind, {})[key] = value
            elif kind in state:
                state[kind].pop(key, None)
                if not state[kind]:
                    del state[kind]

    def leaders(self) -> AsyncIterator[LeaderAt | None]:
        return self._book.leading.changes()

    async def resign(self, term: Term) -> None:
        leader = self._book.leading.leader
        if leader is not None and leader.epoch == term.epoch:
            self._book.leading.lead(None)
            self._book.wake()

    async def aclose(self) -> None:
        if self._term is not None:
            await self.resign(self._term)
