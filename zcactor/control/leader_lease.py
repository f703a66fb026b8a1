"""The lease of a head that others may depose: its rights by its term, its members and the clock.

`zcactor.control.quorum` decides; here are the clock, and the questions of members.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from zcactor.control.quorum import LeaderState, Quorum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zcactor.control.head_log import Term

__all__ = ["LeaderLease"]

_LOOK: Final = 0.1
"""Seconds between two looks at whether this head may act."""


class LeaderLease:
    """The lease of one head in one term. Used on the loop's thread.

    Args:
        term: the term.
        members: the nodes on record when it began, by the ids of their processes.
        patience: seconds that nodes go on without a head.
        clock: the clock of terms.
    """

    def __init__(
        self, term: Term, members: Iterable[str], patience: float, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        self._term = term
        self._clock = clock
        self._quorum = Quorum(patience)
        self._quorum.begin(term.epoch, term.valid_until(), members, clock())

    @property
    def state(self) -> LeaderState:
        """The present state."""
        now, until = self._clock(), self._term.valid_until()
        if until == -math.inf:
            self.depose()
        else:
            self._quorum.renew(until, now)
        return self._quorum.state(now)

    @property
    def in_term(self) -> bool:
        """Whether nobody else can lead at present."""
        return self._clock() < self._term.valid_until()

    def now(self) -> float:
        """The time, for `serves`."""
        return self._clock()

    def joining(self, member: str) -> None:
        """Note that the log is asked to add or remove a member."""
        self._quorum.joining(member)

    def joined(self, member: str) -> None:
        """Note that a member is on record."""
        self._quorum.joined(member)

    def left(self, member: str) -> None:
        """Note that a member is on record no more."""
        self._quorum.left(member)

    def serves(self, member: str, asked: float) -> None:
        """Note that a member, which has joined or returned, serves this head, by its answer to a question that was
        asked at `asked`."""
        if self.state is not LeaderState.FOLLOWING:
            self._quorum.reported(member, self._quorum.epoch, asked, self._clock())

    def ended(self, member: str) -> None:
        """Note that a member on record has ended."""
        if self.state is not LeaderState.FOLLOWING:
            self._quorum.ended(member, self._clock())

    def depose(self) -> None:
        """Note that the term is over. Idempotent."""
        if self._quorum.state(self._clock()) is not LeaderState.FOLLOWING:
            self._quorum.depose()

    async def lasts(self) -> bool:
        """Wait while the log does not say whether the term goes on. Returns whether it does.

        Cancelling ends the wait.
        """
        while self.state is LeaderState.ADRIFT:  # noqa: ASYNC110  # a clock decides
            await asyncio.sleep(_LOOK)
        return self.state is not LeaderState.FOLLOWING

    def lacks_half(self) -> bool:
        """Whether less than half of the members on record have served this head since its term began."""
        return self._quorum.lacks_half()

    @property
    def silent(self) -> frozenset[str]:
        """The members on record when the term began that have neither come nor ended."""
        return self._quorum.silent

    def force(self) -> None:
        """Have this head act without half of its members, at the word of an operator who knows that they have ended.
        Those that are silent still get the time that they need to end."""
        self._quorum.force(self._clock())

    async def settled(self, lacks: Callable[[], None] = lambda: None) -> bool:
        """Wait until this head may act: at least half of the members on record serve it, and the others have ended.

        Args:
            lacks: called once where less than half serve it by now.

        Returns:
            Whether it may; False where the term is over.

        Cancelling ends the wait.
        """
        told = False
        while (state := self.state) is not LeaderState.LEADING:
            if state is LeaderState.FOLLOWING:
                return False
            if self._quorum.settle(self._clock()) is not None:
                continue
            if self.lacks_half() and not told and self.state is LeaderState.TAKING_OVER:
                told = True
                lacks()
            await asyncio.sleep(_LOOK)
        return True

    def age(self) -> float | None:
        """The age in seconds of the knowledge that members may stay; None where they have to seek another head."""
        return None if self.state is LeaderState.FOLLOWING else self._quorum.age(self._clock())
