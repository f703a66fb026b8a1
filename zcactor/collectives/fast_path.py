"""Operations that a rank begins the short way: small sums that it has made before, barriers, and arrays that are given
as they are.

The short way does what `zcactor.collectives.member.Member.begin` does and sends the same frames, so each rank may take
either. The native part enters the publications into a meeting, and calls `FastPath.met` with the last one. After a
context switch a Python function costs a multiple of its warm time, so there are few of them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from zcactor.api.future import ObjectRef
from zcactor.collectives.exchanges import AllGather, Broadcast, as_passed
from zcactor.collectives.folding import native_kind
from zcactor.collectives.in_turn import InTurn
from zcactor.collectives.lending import SNAPSHOT, alias, snapshot
from zcactor.collectives.operations import Barrier, Collective, Publication
from zcactor.collectives.reductions import Eager, signature_of
from zcactor.collectives.starting import start
from zcactor.errors import ProtocolError
from zcactor.marshal.arrays import dtype_code, dtype_from_code
from zcactor.marshal.sharing import closable
from zcactor.native import hot
from zcactor.process.context import call_deadline
from zcactor.rpc.call import Call

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.collectives.kinds import Array
    from zcactor.collectives.member import Member
    from zcactor.process.context import LocalProcess

__all__ = ["FastPath", "Recipe", "begin_barrier", "begin_broadcast", "begin_gather", "remember", "repeated"]

_MOST: Final = 256
"""Kinds of calls that a member remembers, at most: a program has a few."""
_NOBODY: Final[set[int]] = set()
"""The readers of operations without memory that others read. Nobody is added to it."""
_new_ref, _new_call, _get_ident = ObjectRef.__new__, Call.__new__, threading.get_ident


class Recipe(NamedTuple):
    """The facts of an allreduce of a small array, which its dtype, its shape and its kind determine."""

    signature: str
    op: str
    kind: str
    """The name that the loop in C has for it."""
    divisor: int
    """The number that a mean is divided by; 0 for sums."""
    nbytes: int
    like: Array
    """An array of the dtype and the shape, without elements of its own."""
    counts: Any
    """The figures of the process; see `zcactor.collectives.groups.Counts`."""
    copied: list[int]
    """The copies of inputs, and their bytes; see `zcactor.objectstore.copies.CopyCounter.on_loop`."""
    in_turn: bool
    """Whether the ranks take turns, instead of sending the array in frames."""


class FastPath(Collective):
    """The base of operations that begin the short way. As long as all ranks publish the same call, there is nothing but
    the meeting. Otherwise `published` gets the publications, and they are looked at as those of all operations are.

    Args:
        member: the member that calls.
        call: the promise of the result.
        signature: the call as text.
        array: the value that this rank publishes.
        root: the rank whose array is broadcast.
        nbytes: bytes of the value of each rank; -1 where they may differ.
    """

    member: Member

    def __init__(
        self, member: Member, call: Call, signature: str, array: Array | None, root: int = 0, nbytes: int = -1
    ) -> None:
        # `Collective.__init__` does the same, in a call of its own.
        self.process = member.process
        self.member = member
        self.call = call
        self.signature = signature
        self.published = {}
        self.readers = _NOBODY
        self.meeting = hot.Meeting(signature, member.size, nbytes, self.met)
        self.array: Any = array
        self.root = root

    def met(self, values: tuple[Any, ...] | None) -> None:
        """Take the values of all ranks, by rank; None where the publications are not all of this call."""
        if values is None or self.failure is not None:
            self._look()
            return
        self._give(None)

    def _look(self) -> None:
        """Look at the publications as all operations do."""
        for rank, (signature, data) in self.meeting.publications().items():
            self.published[rank] = data if type(data) is Publication else Publication(signature, data)
        self._all_told()

    def take(self, rank: int, signature: str, data: Any) -> None:
        """Take the publication of `rank`, which is no more than a call and a value.

        Raises:
            ProtocolError: it has published before.
        """
        self.meeting.take(rank, signature, data)

    def arrived(self, rank: int, publication: Publication) -> None:
        """See `Collective.arrived`."""
        if publication.failure is None and not publication.owner:
            self.meeting.take(rank, publication.signature, publication.data)
            return
        if rank in self.meeting.missing:
            self.meeting.odd = True
        self.meeting.take(rank, publication.signature, publication)

    @property
    def missing_publications(self) -> tuple[int, ...]:
        """See `Collective.missing_publications`."""
        return self.meeting.missing  # type: ignore[no-any-return]

    def release(self) -> None:
        """See `Collective.release`. The meeting calls this operation no more."""
        self.meeting.close()
        super().release()

    def _give(self, result: Any) -> None:
        """Give the result, as `Collective.complete` does. The meeting has called, and calls no more."""
        member, seq = self.member, self.seq
        del member.operations[seq], member.meetings[seq]  # as `Member.ended` does
        if self.lent is not None:
            Collective.release(self)
        self.call.complete_plain(result)


class FastSum(FastPath, Eager):
    """An allreduce of a small array by a recipe.

    Attributes:
        recipe: for the array, which may have another dtype and shape by now.
        data: its bytes at the call.
    """

    recipe: Recipe
    data: bytes

    def met(self, values: tuple[Any, ...] | None) -> None:
        """See `FastPath.met`. Reduce."""
        if values is None or self.failure is not None:
            self._look()
            return
        recipe = self.recipe
        try:
            result = hot.folded(recipe.kind, values, recipe.like, recipe.divisor)
        except (MemoryError, ValueError) as error:  # of this member alone; the others must not wait for it
            self.worked(error)
            return
        recipe.counts.bytes_reduced += recipe.nbytes * len(values)
        member, seq = self.member, self.seq
        del member.operations[seq], member.meetings[seq]  # as `_give` does, in a call of its own
        self.call.complete_plain(result)


class FastInTurn(FastPath, InTurn):
    """An allreduce of two ranks by turns, by a recipe. Each input lies in the store of its rank, without gaps.

    Args:
        member, call: as for `FastPath`.
        recipe: for the array.
        array: this rank's input, to which nobody else can write; it is lent until the end.
        gives: whether this rank reduces.
    """

    out = None
    is_piece = False

    def __init__(self, member: Member, call: Call, recipe: Recipe, array: Array, gives: bool) -> None:
        super().__init__(member, call, recipe.signature, alias(array))
        if gives:
            self.held = True
        else:
            self.readers = {1 - member.rank}
        self.recipe = recipe
        if hot.lend(array):
            self.lent = array

    def met(self, values: tuple[Any, ...] | None) -> None:
        """See `FastPath.met`. Reduce both inputs, or take the result."""
        other = None if values is None else values[1 - self.member.rank]
        if self.failure is not None or type(other) is not (int if self.held else np.ndarray):
            self.shape, self.op, self.count = self.array.shape, self.recipe.op, self.array.size
            self._look()
            return
        try:
            if self.held:
                result = self._reduce(other)  # type: ignore[arg-type]
            else:
                self.readers.clear()
                result = self.checked(other)
        except Exception as error:  # of this member alone; the others must not wait for it
            self.worked(error)
            return
        self._give(result)

    def _reduce(self, offset: int) -> Array:
        """Reduce both inputs, the other one at `offset` in its rank's arena, and publish the result."""
        member, recipe, array = self.member, self.recipe, self.array
        store = self.process.store
        session = self.process.sessions.used[member.seats[1 - member.rank].process]
        mapped = session.connection.map(offset, recipe.nbytes)
        theirs = mapped.address
        if theirs % array.itemsize:
            raise ProtocolError(f"rank {1 - member.rank} has an input that is not aligned: it is at {offset}")
        block = store.allocate_apart(recipe.nbytes)
        inputs = (array, theirs) if member.rank == 0 else (theirs, array)
        hot.fold(recipe.kind, inputs, block.address, array.size, recipe.divisor)
        recipe.counts.bytes_reduced += 2 * recipe.nbytes
        block.sealed = True  # nothing else of `Store.seal`: there is no array yet
        store.export(block)
        result: Array = hot.array_over(block, block.address, array)
        self.told = True
        member.publish_to_all(self.seq, self, result)
        return result


class FastBarrier(FastPath, Barrier):
    """A barrier."""


class FastGather(FastPath, AllGather):
    """The arrays of all ranks for all, by reference."""

    def met(self, values: tuple[Any, ...] | None) -> None:
        """See `FastPath.met`."""
        if values is None or self.failure is not None:
            self._look()
            return
        self._give([*values])


class FastBroadcast(FastPath, Broadcast):
    """The array of one rank for all."""

    def met(self, values: tuple[Any, ...] | None) -> None:
        """See `FastPath.met`."""
        if values is None or self.failure is not None or type(values[self.root]) is not np.ndarray:
            self._look()
            return
        self._give(values[self.root])


def remember(member: Member, array: Array, op: str, make: Callable[..., Any]) -> None:
    """Remember an allreduce, whose arguments were checked, for the next ones like it, where these can be made the short
    way.

    Args:
        member: the member that calls.
        array, op: its arguments.
        make: the maker of the operation.
    """
    in_turn = make is InTurn and member.seats[0].process != member.seats[1].process
    if not in_turn and make is not Eager:
        return
    kind = native_kind(array.dtype, op)
    if kind is None or array.dtype.kind == "c" or not member.hierarchy.flat or len(member.recipes) >= _MOST:
        return
    dtype_from_code(dtype_code(array.dtype))  # the native part sends and takes arrays of dtypes that are known
    signature = signature_of("allreduce", array.dtype, array.shape, op, "")
    divisor = member.size if op == "mean" else 0
    member.recipes[array.dtype, array.shape, op] = Recipe(
        signature,
        op,
        kind,
        divisor,
        array.nbytes,
        np.broadcast_to(np.zeros((), array.dtype), array.shape),
        member.groups.counts,
        member.process.copies.on_loop(SNAPSHOT),
        in_turn,
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
    flags = x.flags
    if not flags.writeable and hot.claimed(x):
        return None  # `as_array` raises the error
    if recipe.in_turn:
        gives = member.seat.next % 2 == member.rank
        store = process.store
        offset = 0 if gives else hot.address(x) - store.arena.address
        if (
            timeout is not None
            or _get_ident() != process.thread
            or call_deadline.get() is not None
            or not (flags.c_contiguous and flags.aligned and 0 <= offset <= store.capacity - recipe.nbytes)
            or not (flags.owndata or closable(x))
            or (not gives and store.heap.is_private(offset))  # the other rank would not see what was written since
        ):
            return None
        call, ref = _promise(process, "Group.allreduce")
        member.begin_promptly(FastInTurn(member, call, recipe, x, gives), offset)
        return ref
    if timeout is not None or _get_ident() != process.thread or call_deadline.get() is not None:
        data = snapshot(process, x)
        return start(member, "Group.allreduce", timeout, lambda _, call: _sum(member, call, recipe, data))
    copied = recipe.copied
    copied[0] += 1
    copied[1] += recipe.nbytes
    call, ref = _promise(process, "Group.allreduce")
    operation = FastSum(member, call, recipe.signature, recipe.like, 0, recipe.nbytes)
    operation.recipe, operation.data = recipe, (data := x.tobytes())
    member.begin_promptly(operation, data)
    return ref


def _sum(member: Member, call: Call, recipe: Recipe, data: bytes) -> FastSum:
    operation = FastSum(member, call, recipe.signature, recipe.like, 0, recipe.nbytes)
    operation.recipe, operation.data = recipe, data
    return operation


def _promise(process: LocalProcess, what: str) -> tuple[Call, ObjectRef[Any]]:
    """Make the promise of an operation, and the reference to it, on the loop's thread."""
    call = _new_call(Call)
    call.owner, call.loop, call.thread = process.process, process.loop, process.thread
    call.label = what
    call.refs = 1
    ref: ObjectRef[Any] = _new_ref(ObjectRef)
    ref._call = call
    ref._drivers = None
    return call, ref


def _begin(
    kind: type[FastPath], member: Member, what: str, signature: str, timeout: float | None,
    array: Array | None = None, root: int = 0,
) -> ObjectRef[Any]:  # fmt: skip
    """Start an operation whose publication is its call and an array. Any thread may call this."""
    process = member.process
    if timeout is not None or _get_ident() != process.thread or call_deadline.get() is not None:
        return start(member, what, timeout, lambda _, call: kind(member, call, signature, array, root))
    call, ref = _promise(process, what)
    member.begin_promptly(kind(member, call, signature, array, root), array)
    return ref


def begin_barrier(member: Member, timeout: float | None) -> ObjectRef[None]:
    """Start a barrier. Any thread may call this."""
    return _begin(FastBarrier, member, "Group.barrier", "barrier()", timeout)


def begin_gather(member: Member, array: Array, timeout: float | None) -> ObjectRef[list[Array]]:
    """Start an allgather by reference. Any thread may call this."""
    passed = as_passed(member.process, array)
    return _begin(FastGather, member, "Group.allgather", "allgather(concat=False)", timeout, passed)


def begin_broadcast(member: Member, root: int, array: Array | None, timeout: float | None) -> ObjectRef[Array]:
    """Start a broadcast. Any thread may call this."""
    passed = None if array is None else as_passed(member.process, array)
    return _begin(FastBroadcast, member, "Group.broadcast", f"broadcast(root={root})", timeout, passed, root)
