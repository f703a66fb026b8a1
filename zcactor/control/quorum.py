"""The right of a head to act, and the duty of a member to end: decided by epochs, halves and times. Pure.

A head's term may end while the log is silent, because nothing renews it then. The head is *adrift*: it gives no orders,
and no other head can begin. Its members may stay, or an outage of the log would end the cluster. So that no head takes
living members of another for lost, two rules exclude each other:

- Members stay with an adrift head only as long as it hears from **more than half** of the members on record.
- A new head acts only once **at least half** of them have accepted its epoch, and those that are silent have ended.

A member serves one epoch, the greatest that it has seen, so no member counts for both.

Times are those of each process's own clock, and are never compared with those of another. A member's life is prolonged
by answers to its own questions alone, and counts from the question: a frame that was held up says nothing about the
present. An adrift head tells the age of its knowledge, and the member takes that off. So a member that has not accepted
an epoch ends at most `patience` seconds after half of them have. `GRACE` covers the drift of clocks.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Final

from zcactor.control.head_log import Deposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["GRACE", "TRANSITIONS", "Allegiance", "LeaderEvent", "LeaderState", "Quorum"]

GRACE: Final = 2.0
"""Seconds beyond `patience` until members that are silent have ended: for the drift of clocks, and for the time that an
end takes."""


class LeaderState(enum.Enum):
    """The state of a head."""

    FOLLOWING = "following"
    """Another head leads, or none. This one gives no orders."""
    TAKING_OVER = "taking over"
    """A head that asks members for reports and answers look-ups. It places, frees and declares nothing."""
    LEADING = "leading"
    """A head that decides."""
    ADRIFT = "adrift"
    """Its term has ended by the clock, and the log does not say more. It keeps its sessions and refuses requests."""


class LeaderEvent(enum.Enum):
    """An event in the life of a head."""

    TERM_BEGUN = "term begun"
    SETTLED = "settled"
    """All members on record have reported, or those that have not have ended."""
    EXPIRED = "expired"
    """The term has ended by the clock."""
    RENEWED_UNSETTLED = "renewed before it was settled"
    RENEWED = "renewed"
    DEPOSED = "deposed"
    """A greater epoch was seen, or the log says that the term is over."""


_S, _E = LeaderState, LeaderEvent
TRANSITIONS: Final[Mapping[tuple[LeaderState, LeaderEvent], LeaderState]] = {
    (_S.FOLLOWING, _E.TERM_BEGUN): _S.TAKING_OVER,
    (_S.TAKING_OVER, _E.SETTLED): _S.LEADING,
    (_S.TAKING_OVER, _E.EXPIRED): _S.ADRIFT,
    (_S.LEADING, _E.EXPIRED): _S.ADRIFT,
    (_S.ADRIFT, _E.RENEWED): _S.LEADING,
    (_S.ADRIFT, _E.RENEWED_UNSETTLED): _S.TAKING_OVER,
    (_S.FOLLOWING, _E.DEPOSED): _S.FOLLOWING,
    (_S.TAKING_OVER, _E.DEPOSED): _S.FOLLOWING,
    (_S.LEADING, _E.DEPOSED): _S.FOLLOWING,
    (_S.ADRIFT, _E.DEPOSED): _S.FOLLOWING,
}
"""All events that can happen in each state. Any other is a defect of the caller's."""


class Quorum:
    """The rights of one head.

    Every method that takes `now` looks at the clock's effect first: after a pause, queued frames run before timers do.

    Args:
        patience: seconds that members go on without a head.
    """

    def __init__(self, patience: float) -> None:
        self.epoch = 0
        """The epoch of the last term; 0 before the first."""
        self._patience = patience
        self._state = LeaderState.FOLLOWING
        self._until = -math.inf
        self._settled = False
        self._founders: frozenset[str] = frozenset()
        """The members on record when the term began. Those that join later have no part in the half: heads before this
        one do not know them."""
        self._recorded: set[str] = set()
        self._doubtful: set[str] = set()
        self._accepted: set[str] = set()
        self._reported: set[str] = set()
        self._heard: dict[str, float] = {}
        """For each member the time of the last question that it has answered."""
        self._half_at = math.inf
        """The time at which half of the founders had accepted the epoch."""

    def _turn(self, event: LeaderEvent) -> None:
        self._state = TRANSITIONS[self._state, event]

    # ---------------------------------------------------------------- the term

    def begin(self, epoch: int, until: float, members: Iterable[str], now: float) -> None:
        """Begin a term.

        Args:
            epoch: of the term.
            until: the time until which it is valid.
            members: the members on record, as the log has them within the term.
            now: the time.
        """
        self._turn(LeaderEvent.TERM_BEGUN)
        self.epoch = epoch
        self._until = until
        self._settled = False
        self._founders = frozenset(members)
        self._recorded = set(self._founders)
        self._doubtful.clear()
        self._accepted.clear()
        self._reported.clear()
        self._heard.clear()
        self._half_at = math.inf if self._founders else now

    def force(self, now: float) -> None:
        """Waive the half, at the word of an operator who knows that the other members have ended."""
        self._half_at = min(self._half_at, now)

    def lacks_half(self) -> bool:
        """Whether less than half of the members on record when the term began have accepted the epoch, and nobody has
        waived that."""
        return self._half_at == math.inf

    @property
    def silent(self) -> frozenset[str]:
        """The members on record when the term began that have neither reported nor ended."""
        return self._founders - self._reported

    def renew(self, until: float, now: float) -> None:
        """Note until when the term is valid."""
        if self._state is not LeaderState.FOLLOWING:
            self._until = until
            self.state(now)

    def see(self, epoch: int) -> bool:
        """Note an epoch that was met anywhere. Returns whether it deposes this head."""
        if epoch <= self.epoch:
            return False
        self.depose()
        return True

    def depose(self) -> None:
        """Note that the term is over."""
        self._turn(LeaderEvent.DEPOSED)
        self._until = -math.inf

    def state(self, now: float) -> LeaderState:
        """The state at a time."""
        if self._state in {LeaderState.TAKING_OVER, LeaderState.LEADING} and now >= self._until:
            self._turn(LeaderEvent.EXPIRED)
        elif self._state is LeaderState.ADRIFT and now < self._until:
            self._turn(LeaderEvent.RENEWED if self._settled else LeaderEvent.RENEWED_UNSETTLED)
        return self._state

    # ---------------------------------------------------------------- members

    def joining(self, member: str) -> None:
        """Note that the log is asked to add or remove a member; until `joined` or `left` it may have done either."""
        self._doubtful.add(member)

    def joined(self, member: str) -> None:
        """Note that a member is on record."""
        self._doubtful.discard(member)
        self._recorded.add(member)

    def left(self, member: str) -> None:
        """Note that a member is no longer on record."""
        self._doubtful.discard(member)
        self._recorded.discard(member)
        self._heard.pop(member, None)

    def accepted(self, member: str, epoch: int, asked: float, now: float) -> None:
        """Note that a member serves an epoch, in answer to a question that was asked at `asked`."""
        if epoch != self.epoch or self.state(now) is LeaderState.FOLLOWING:
            return
        self._heard[member] = max(asked, self._heard.get(member, -math.inf))
        self._accepted.add(member)
        if 2 * len(self._accepted & self._founders) >= len(self._founders):
            self._half_at = min(self._half_at, now)

    def ended(self, member: str, now: float) -> None:
        """Note that a member has ended, as its host says: it serves no other head."""
        self.accepted(member, self.epoch, -math.inf, now)
        self._reported.add(member)

    def reported(self, member: str, epoch: int, asked: float, now: float) -> None:
        """Note the report of a member, which serves the epoch then."""
        self.accepted(member, epoch, asked, now)
        if member in self._accepted and epoch == self.epoch:
            self._reported.add(member)

    def settle(self, now: float) -> frozenset[str] | None:
        """Begin to act, where that is allowed.

        Returns:
            The members that are lost; None where this head may not act yet.
        """
        if self.state(now) is not LeaderState.TAKING_OVER:
            return None
        silent = self.silent
        if silent and now < self._half_at + self._patience + GRACE:
            return None
        self._settled = True
        self._turn(LeaderEvent.SETTLED)
        return silent

    # ---------------------------------------------------------------- rights

    def asks(self, now: float) -> bool:
        """Whether this head may ask members for reports, and answer look-ups."""
        return self.state(now) in {LeaderState.TAKING_OVER, LeaderState.LEADING}

    def acts(self, now: float) -> bool:
        """Whether this head may place, free and declare lost: to be asked before each request and each order."""
        return self.state(now) is LeaderState.LEADING

    def age(self, now: float) -> float | None:
        """The age in seconds of the knowledge that members may stay with this head; None where they must seek another.

        With a valid term it is 0. An adrift head knows that more than half of the members on record served it when they
        answered last. Members of whose record the log's answer is missing count as such that do not.
        """
        match self.state(now):
            case LeaderState.FOLLOWING:
                return None
            case LeaderState.ADRIFT:
                sure = self._recorded - self._doubtful
                times = sorted((self._heard[member] for member in sure & self._heard.keys()), reverse=True)
                needed = len(self._recorded | self._doubtful) // 2 + 1
                return now - times[needed - 1] if len(times) >= needed else None
            case _:
                return 0.0


class Allegiance:
    """The duties of one member, or of a worker, towards heads.

    Args:
        patience: seconds that it goes on without a head.
        now: the time.
    """

    def __init__(self, patience: float, now: float) -> None:
        self.epoch = 0
        """The greatest epoch that was seen: the one that is served."""
        self._patience = patience
        self._until = now + patience

    def accept(self, epoch: int) -> None:
        """Check an order or a question before it is carried out. A greater epoch than before is served from now on.

        Raises:
            Deposed: the epoch is over.
        """
        if epoch < self.epoch:
            raise Deposed(epoch, self.epoch)
        self.epoch = epoch

    def heard(self, epoch: int, asked: float, age: float | None) -> None:
        """Note the answer of a head to the question whether this member may stay with it.

        Args:
            epoch: of that head.
            asked: the time at which the question was asked.
            age: of the head's knowledge, from `Quorum.age`; None where the member has to seek another head.
        """
        if epoch == self.epoch and age is not None:
            self._until = max(self._until, asked - age + self._patience)

    def ends_at(self) -> float:
        """The time at which this member ends its workers and itself, unless it hears from a head before."""
        return self._until
