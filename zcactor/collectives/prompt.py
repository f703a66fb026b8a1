"""Sums of small arrays that a rank has made before: the call is known to be right, and so is the way to its result.

This is the short way for the calls that programs repeat most. It does what `zcactor.collectives.reductions.Eager` does
and sends the same frames, so each rank may take either.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from zcactor.api.future import ObjectRef
from zcactor.collectives.borrowing import Borrowing
from zcactor.collectives.folding import native_kind
from zcactor.collectives.operations import Collective, Publication
from zcactor.collectives.reductions import Eager, signature_of
from zcactor.collectives.starting import start
from zcactor.errors import ProtocolError
from zcactor.native import hot
from zcactor.process.context import call_deadline
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from zcactor.collectives.kinds import Array
    from zcactor.collectives.member import Member
    from zcactor.process.context import LocalProcess

__all__ = ["Prompt", "Recipe", "remember", "repeated"]

_MOST: Final = 256
"""Kinds of calls that a member remembers, at most: a program has a few."""
_LABEL: Final = "Group.allreduce"


class Recipe(NamedTuple):
    """The facts of an allreduce of a small array, which its dtype, its shape and its kind determine."""

    signature: str
    op: str
    kind: str
    """The name that the loop in C has for it."""
    divisor: int
    """The number that a mean is divided by; 0 for sums."""
    nbytes: int
    counts: Any
    """The figures of the process; see `zcactor.collectives.groups.Counts`."""


class Prompt(Eager):
    """An allreduce of a small array by a recipe.

    As long as all publications are the same call with an input of the right size, `published` has the inputs alone.

    Args:
        process, call: as for all operations.
        recipe: for the array.
        array: this rank's input, which is borrowed until the end.
    """

    odd = False
    """Whether a rank has published something else; then `published` has its whole publication."""

    def __init__(self, process: LocalProcess, call: Call, recipe: Recipe, array: Array) -> None:
        Collective.__init__(self, process, call, recipe.signature)
        self.recipe, self.array = recipe, array
        self.taken: dict[int, Any] = self.published
        self.borrowing = Borrowing(array)

    def take(self, rank: int, signature: str, data: Any) -> None:
        """Take what `rank` has published. With the last publication, reduce.

        Raises:
            ProtocolError: it has published before.
        """
        taken, recipe, member = self.taken, self.recipe, self.member
        if rank in taken:
            raise ProtocolError(f"rank {rank} published operation {self.seq} of a group twice")
        kind = type(data)
        nbytes = data.nbytes if kind is np.ndarray else len(data) if kind is bytes else -1
        if signature == recipe.signature and nbytes == recipe.nbytes:
            taken[rank] = data
        else:
            self.odd = True
            taken[rank] = Publication(signature, data)
        if len(taken) < member.size:
            return
        if self.odd or self.failure is not None:
            self._look()
            return
        array = self.array
        try:
            ordered = tuple([taken[each] for each in range(member.size)])
            result = hot.folded(recipe.kind, ordered, array, recipe.divisor)
        except (MemoryError, ValueError) as error:  # of this member alone; the others must not wait for it
            self.worked(error)
            return
        recipe.counts.bytes_reduced += recipe.nbytes * member.size
        self.call.complete_plain(result)
        self.borrowing.end()
        member.ended(self)

    def arrived(self, rank: int, publication: Publication) -> None:
        """See `Collective.arrived`."""
        if publication.failure is None:
            self.take(rank, publication.signature, publication.data)
            return
        self.odd = True
        if self.taken.setdefault(rank, publication) is not publication:
            raise ProtocolError(f"rank {rank} published operation {self.seq} of a group twice")
        if len(self.taken) == self.member.size:
            self._look()

    def _look(self) -> None:
        """Find the error: all ranks have published, and not all the same call, or one has failed."""
        for rank, each in self.taken.items():
            if type(each) is not Publication:
                self.published[rank] = Publication(self.signature, each)
        self._all_told()


def remember(member: Member, array: Array, op: str) -> None:
    """Remember an allreduce of a small array, whose arguments were checked, for the next ones like it."""
    kind = native_kind(array.dtype, op)
    if kind is None or array.dtype.kind == "c" or not member.rails.flat or len(member.recipes) >= _MOST:
        return
    signature = signature_of("allreduce", array.dtype, array.shape, op, "")
    divisor = member.size if op == "mean" else 0
    member.recipes[array.dtype, array.shape, op] = Recipe(
        signature, op, kind, divisor, array.nbytes, member.groups.counts
    )


def repeated(member: Member, x: Any, op: str, timeout: float | None) -> ObjectRef[Any] | None:
    """Start an allreduce like one that was remembered. Any thread may call this.

    Returns:
        The reference to its result; None where there was none like it.
    """
    if type(x) is not np.ndarray or type(op) is not str:
        return None
    recipe = member.recipes.get((x.dtype, x.shape, op))
    if recipe is None:
        return None
    process = member.process
    if timeout is not None or threading.get_ident() != process.thread or call_deadline.get() is not None:
        return start(member, _LABEL, timeout, lambda process, call: Prompt(process, call, recipe, x))
    call = Call(process.process, process.loop, process.thread)
    call.label = _LABEL
    reference: ObjectRef[Any] = ObjectRef(call)
    flags = x.flags
    straight = flags.c_contiguous and flags.aligned
    member.begin_whole(Prompt(process, call, recipe, x), x if straight else x.tobytes())
    return reference
