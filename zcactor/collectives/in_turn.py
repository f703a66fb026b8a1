"""Reductions of two ranks in which one of them does all the work: the ranks take turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.collectives.cost import MOST_IN_TURN_NBYTES
from zcactor.collectives.folding import Operand, operand_of, swift_nbytes
from zcactor.collectives.operations import Publication, Ranked
from zcactor.collectives.reductions import InPlace
from zcactor.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.collectives.kinds import Array
    from zcactor.objectstore.store import Block

__all__ = ["InTurn", "goes_in_turn"]


def goes_in_turn(size: int, array: Array, op: str) -> bool:
    """Whether the members of a group of `size` on one host take turns for arrays of the dtype and shape of `array`.
    Three ranks and more share the work: with them, a rank that waits for the result could not say which of the others
    have not called."""
    return size == 2 and array.nbytes <= MOST_IN_TURN_NBYTES and swift_nbytes(op, array.dtype, (), 0) is not None


class InTurn(InPlace):
    """One of two ranks reduces both inputs, by turns, and publishes its call together with the result. So there is one
    meeting, where there are two if both reduce.

    The rank that *gives* publishes nothing before it has the other one's input and has read it. Its publication is also
    the report that it is done, and nobody reads its own input.
    """

    result: Block

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        self.member, self.seq = member, seq
        if not self.gives:
            return super().begin(member, seq)
        self.held = True
        return Publication(self.signature, 0)

    @property
    def gives(self) -> bool:
        """Whether this rank reduces."""
        return self.seq % 2 == self.member.rank

    @property
    def own(self) -> Operand:
        """See `InPlace.own`."""
        return operand_of(self.array) if self.gives else super().own

    def weight(self, operands: Sequence[Operand], count: int) -> int | None:
        """See `InPlace.weight`. Arrays without gaps are reduced at once: that takes less time than to tell a thread."""
        return None if super().weight(operands, count) is None else 0

    @property
    def read_nbytes(self) -> int:
        """Bytes of the inputs that this rank has read."""
        return 2 * self.array.nbytes if self.gives else 0

    def run(self) -> None:
        """Reduce both inputs, on a thread where that takes long; or take the result."""
        if not self.gives:
            self.readers.clear()
            self.deliver(self.checked(self.published[1 - self.member.rank].data))
            return
        for rank, publication in self.published.items():
            if type(publication.data) is int:  # the short form for an array of its own without gaps
                owner = self.member.seats[rank].process
                self.published[rank] = publication._replace(owner=owner, offset=publication.data)
            elif not publication.owner:
                raise ProtocolError(f"rank {rank} did not say where its input is")
        self.result = self.process.store.allocate_apart(self.array.nbytes)
        self.work(0, self.count, Operand(self.result.address, None, self.result))

    def checked(self, result: Any) -> Array:
        """The result that the other rank has published.

        Raises:
            ProtocolError: it is no such array.
        """
        array = self.array
        if type(result) is not np.ndarray or result.dtype != array.dtype or result.shape != array.shape:
            raise ProtocolError(f"rank {1 - self.member.rank} gave no such result as {self.signature} has")
        return result

    def finish(self) -> None:
        """Publish the result, and give it."""
        store, block = self.process.store, self.result
        store.seal(block)
        store.export(block)
        result = np.asarray(block).view(self.array.dtype).reshape(self.array.shape)
        self.member.publish(self, Publication(self.signature, result))
        self.deliver(result)

    def _tell(self, failure: BaseException | None) -> None:
        if not self.gives:
            super()._tell(failure)
            return
        self.told = True
        if failure is not None:
            self.member.publish(self, Publication(self.signature, failure=failure))
        elif self.failure is not None:  # the group has broken
            self.member.report(self.seq, None)

    def _fail(self, error: BaseException) -> None:
        if self.gives and not self.told:  # another rank has made another call, or has failed
            self.told = True
            self.member.publish(self, Publication(self.signature))
        super()._fail(error)
