"""Steps of reducers: their operations have an order of their own, and all ranks agree in their end.

A rank whose hook fails, or which adds fewer arrays, starts fewer operations than the others. So the operations of a
step have numbers of their own, which those of the group's order do not follow. At the end of its block each rank says
how many operations it has started, what it has added, and the error of its block. With these *ends* all ranks fail the
operations that one of them has not started, and decide alike whether the step has succeeded.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from zcactor.collectives.operations import SPOILED, Collective, Publication, Ranked, Refusal
from zcactor.errors import GroupMismatch, ProtocolError
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.process.context import LocalProcess

__all__ = ["MOST", "STEPS", "ReducerStep", "RefusedStep", "StepEnded", "is_later", "place_of", "step_of"]

STEPS: Final = 1 << 43
"""The numbers of operations from here on belong to steps; ``zcactor/native/seat.c`` has it, too. A PUSH frame's key has
44 bits for the number, from 1 on."""
_OPERATION_BITS: Final = 16
_STEP: Final = (STEPS >> _OPERATION_BITS) - 1
"""The greatest number of a step, and a mask: behind it come the first ones again."""
_LISTS, _FIRST = 1, 2
"""The places in a step of the exchange of lists, and of the first operation. The step itself has place 0."""
MOST: Final = (1 << _OPERATION_BITS) - 1 - _FIRST
"""Operations of a step, at most. The last number of all would not fit a key."""
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(list[str]).decode


def step_of(seq: int) -> int:
    """The number of the step that an operation belongs to."""
    return (seq - STEPS) >> _OPERATION_BITS


def place_of(seq: int) -> str:
    """The place of an operation in the order of its group, or in a reducer's step, for messages."""
    if seq < STEPS:
        return f"operation {seq}"
    place = seq & (1 << _OPERATION_BITS) - 1
    step = f"step {step_of(seq)} of its reducers"
    return f"operation {place - _FIRST} of {step}" if place >= _FIRST else f"the end of {step}"


def is_later(number: int, than: int) -> bool:
    """Whether step `number` is step `than`, or comes after it. Numbers begin anew after 2^27 steps."""
    return (number - than) & _STEP < _STEP // 2


class StepEnded(Exception):
    """An operation was not started by a rank that has ended its step. The step's own error says why."""


class ReducerStep(Collective):
    """The end of one step of a reducer, as one member sees it. It is there from the beginning of the block on.

    Args:
        process, call, signature: as for all operations; `call` gets None, or the error of the step.
    """

    held = True

    def __init__(self, process: LocalProcess, call: Call, signature: str = "reducer") -> None:
        super().__init__(process, call, signature)
        self.number = -1
        self.items: Sequence[str] = ()
        """The arrays that this rank has added, in their order, as texts that have to agree."""
        self._started = 0
        self._least = MOST
        """The operations that each of the ranks has started which have ended their step."""

    def place(self, member: Ranked) -> int:
        """See `Collective.place`."""
        own: Any = member
        self.number = own.next_step
        own.next_step = (self.number + 1) & _STEP
        own.steps[self.number] = self
        return self._at(0)

    def _at(self, place: int) -> int:
        return STEPS + (self.number << _OPERATION_BITS) + place

    def next_place(self) -> int:
        """The number of the next operation of the step.

        Raises:
            ValueError: there are too many.
        """
        if self._started == MOST:
            raise ValueError(
                f"a step of a reducer has {MOST} operations at most, and this is one more: use several reducers"
            )
        self._started += 1
        return self._at(_FIRST + self._started - 1)

    def excuse_for(self, seq: int) -> StepEnded | None:
        """The error of an operation of the step that another rank does not start any more."""
        return StepEnded() if seq >= self._at(_FIRST + self._least) else None

    # ---------------------------------------------------------------- ends

    def end(self, items: Sequence[str], error: BaseException | None) -> None:
        """Say that this rank starts no more operations of the step. Idempotent.

        Args:
            items: the arrays that it has added, as texts.
            error: the cause for which the step fails on all ranks.
        """
        if self.told or self.member_is_gone:
            return
        self.told = True
        self.items = items
        digest = blake2b(_encode(list(items)), digest_size=16).hexdigest()
        own = Publication(f"reducer({digest})", offset=self._started, failure=error)
        self.member.publish(self, own)
        self.arrived(self.member.rank, own)

    @property
    def member_is_gone(self) -> bool:
        """Whether the group has broken, or never had this step."""
        return self.seq < 0 or self.call.known

    def arrived(self, rank: int, publication: Publication) -> None:
        """Take the end of a rank."""
        if rank == self.member.rank and not self.told:
            return  # the member enters our own one at the beginning
        if self.published.setdefault(rank, publication) is not publication:
            raise ProtocolError(f"rank {rank} ended a step of a reducer twice")
        self._least = min(self._least, max(publication.offset, 0))
        member: Any = self.member
        behind = range(self._at(_FIRST + self._least), self._at(_FIRST + MOST))
        for operation in [each for seq, each in member.operations.items() if seq in behind]:
            operation.excuse(StepEnded())
        if len(self.published) == self.member.size:
            self._decide()

    def _decide(self) -> None:
        """Decide by the ends of all ranks, which each rank has, whether the step has succeeded."""
        member: Any = self.member
        ends = [self.published[rank] for rank in range(self.member.size)]
        failures = [end.failure for end in ends if end.failure is not None]
        causes = [failure for failure in failures if not issubclass(type(failure), GroupMismatch)]
        if any(end.signature == SPOILED for end in ends):
            member.report(self.seq, causes[0])
        if causes:
            self.conclude(causes[0])
        elif len({end.signature for end in ends}) > 1:
            lists = Lists(self)
            lists.call.retrieved = True
            member.begin(lists)
        elif failures:
            self.conclude(failures[0])
        else:
            first = ends[0].offset
            other = next((rank for rank, end in enumerate(ends) if end.offset != first), None)
            if other is None:
                self.conclude(None)
            else:
                texts = f"{first} operations in a step", f"{ends[other].offset} operations in a step"
                self.conclude(GroupMismatch((0, other), texts))

    def conclude(self, error: BaseException | None) -> None:
        """End the step on this rank."""
        member: Any = self.member
        member.over(self)
        if error is None:
            self.complete(None)
        else:
            self._fail(error)

    def reported(self, rank: int, failure: BaseException | None) -> None:
        """See `Collective.reported`: the end of a rank was refused elsewhere."""
        if failure is not None:
            self.conclude(failure)

    def abandon(self, error: BaseException) -> None:
        """See `Collective.abandon`."""
        self._leave()
        self.call.fail(error)

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not ended the step; none where this one has not, and waits for nobody."""
        return super().missing if self.told else ()


class RefusedStep(Refusal, ReducerStep):
    """A step for which this rank got no reducer: it publishes the error as its end, at the beginning."""

    held = False
    told = True


class Lists(Collective):
    """The exchange of the lists of all ranks, for the first difference.

    Args:
        end: of the step.
    """

    def __init__(self, end: ReducerStep) -> None:
        super().__init__(end.process, Call(end.process.process, end.process.loop, end.process.thread), "reducer lists")
        self._step = end

    def place(self, member: Ranked) -> int:
        """See `Collective.place`."""
        del member
        return self._step._at(_LISTS)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        return Publication(self.signature, _encode(list(self._step.items)))

    def run(self) -> None:
        """Find the first difference from rank 0."""
        try:
            lists = [_decode(self.published[rank].data) for rank in range(self.member.size)]
        except (TypeError, msgspec.DecodeError) as error:
            raise ProtocolError(f"a rank has sent no list of its arrays: {error}") from error
        found = []
        for rank, theirs in enumerate(lists):
            at = next((at for at, (a, b) in enumerate(zip(lists[0], theirs, strict=False)) if a != b), None)
            if at is None and len(theirs) != len(lists[0]):
                at = min(len(theirs), len(lists[0]))
            if at is not None:
                found.append((at, rank))
        if not found:
            raise ProtocolError("the ranks have added the same, and said otherwise")
        at, rank = min(found)
        texts = [
            each[at] if at < len(each) else f"the end of its block after {at - 1} arrays"
            for each in (lists[0], lists[rank])
        ]
        self._leave()
        self._step.conclude(GroupMismatch((0, rank), (texts[0], texts[1])))

    def worked(self, failure: BaseException | None = None) -> None:
        """See `Collective.worked`: it fails on this rank alone, and the step with it."""
        self._leave()
        self._step.conclude(failure)

    def _fail(self, error: BaseException) -> None:
        self._leave()
        self._step.conclude(error)

    def abandon(self, error: BaseException) -> None:
        """See `Collective.abandon`. The step hears of it, too."""
        del error
        self._leave()
