"""Exchanges: operations that pass arrays and other values on as they are."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.api.future import ObjectRef, put
from zcactor.collectives.folding import array_at
from zcactor.collectives.kinds import Array, described
from zcactor.collectives.lending import lent_or_copied, snapshot
from zcactor.collectives.operations import Collective, Publication, Ranked, sealed
from zcactor.collectives.sources import Piece, lendable
from zcactor.collectives.staged import Staged
from zcactor.errors import ProtocolError
from zcactor.marshal.sharing import is_open
from zcactor.native import hot
from zcactor.process.tasks import all_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zcactor.objectstore.store import Block
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call
    from zcactor.transport.mapping import Mapped

__all__ = ["AllGather", "AllToAll", "Broadcast", "Concatenate", "ConcatenateOverHosts", "as_passed"]

_INTO_ONE = "group inputs into one array"
"""The counted reason for copies of the inputs of an `allgather` into its result."""


def as_passed(process: LocalProcess, array: Array) -> Array:
    """Return `array` as an argument arrives elsewhere: another array, read-only, over a copy when it is small, and
    otherwise over the same memory, which nobody may write to from now on, or over a copy where somebody can."""
    if array.nbytes < process.marshaller.eager_limit:
        copied: Array = array.copy()
        copied.flags.writeable = False
        return copied
    if not is_open(process.store, array):  # passed before, or received
        hot.keep(array)
        return array.view()
    passed: Array = process.marshaller.unpack(*process.marshaller.pack(array))
    return passed


class Broadcast(Collective):
    """The array of one rank for all."""

    def __init__(self, process: LocalProcess, call: Call, root: int, array: Array | None) -> None:
        super().__init__(process, call, f"broadcast(root={root})")
        self.root = root
        self.array = None if array is None else as_passed(process, array)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        return Publication(self.signature, self.array)

    def run(self) -> None:
        """Give the array of the root."""
        array = self.published[self.root].data
        if type(array) is bytes:  # the layout of an array on the root's GPU
            self.process.groups().receive_on_gpu(self, array)
            return
        if type(array) is not np.ndarray:
            raise ProtocolError(f"rank {self.root} sent no array for a broadcast")
        self.complete(array)


class AllGather(Collective):
    """The arrays of all ranks for all, by reference."""

    def __init__(self, process: LocalProcess, call: Call, array: Array, extra: str = "") -> None:
        super().__init__(process, call, f"allgather(concat=False{extra})")
        self.array = as_passed(process, array)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        return Publication(self.signature, self.array)

    def run(self) -> None:
        """Give the list of all arrays."""
        self.complete([self.published[rank].data for rank in range(self.member.size)])


class AllToAll(Collective):
    """A value of each rank for each rank."""

    def __init__(self, process: LocalProcess, call: Call, parts: Sequence[Any]) -> None:
        super().__init__(process, call, "alltoall()")
        self.parts = [put(part) for part in parts]

    def for_rank(self, rank: int, own: Publication) -> Publication:
        """The publication with the value for `rank`."""
        return own if own.failure is not None else own._replace(data=[self.parts[rank]])

    def run(self) -> None:
        """Give the references in the order of the ranks."""
        found: list[ObjectRef[Any]] = []
        for rank in range(self.member.size):
            data = [self.parts[rank]] if rank == self.member.rank else self.published[rank].data
            if type(data) is not list or len(data) not in (1, 2) or not isinstance(data[0], ObjectRef):
                raise ProtocolError(f"rank {rank} sent no reference")
            found.append(data[0])
        self.complete(found)


class _Rows(Collective):
    """The base of operations that put the arrays of all ranks one behind the other.

    Args:
        process, call: as for all operations.
        array: this rank's input.
        eager_nbytes: bytes of the largest input that travels in frames.
    """

    def __init__(self, process: LocalProcess, call: Call, array: Array, eager_nbytes: int) -> None:
        super().__init__(process, call, f"allgather({described(array.dtype, array.shape, rows=False)})")
        self.data: bytes | None = None
        """The bytes of a small input."""
        if array.nbytes <= eager_nbytes:
            self.data = snapshot(process, array)
            self.array = np.frombuffer(self.data, array.dtype).reshape(array.shape)
        else:
            self.array, self.lent = lent_or_copied(process, array)
        self.result: Any = None


class Concatenate(_Rows):
    """The arrays of all ranks, one behind the other along axis 0, in one array that all map. Each rank copies its own
    into it. Small ones travel in the frames; where all do, every member makes the result by itself.

    Args:
        process, call, array, eager_nbytes: as for `_Rows`.
    """

    def __init__(self, process: LocalProcess, call: Call, array: Array, eager_nbytes: int) -> None:
        super().__init__(process, call, array, eager_nbytes)
        self.rows: list[int] = []

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        self.readers = {rank for rank in range(member.size) if rank != member.rank}
        return Publication(self.signature, self.data, offset=len(self.array))

    def run(self) -> None:
        """Make the result here, or give or await the memory for it."""
        member = self.member
        publications = [self.published[rank] for rank in range(member.size)]
        self.rows = [publication.offset for publication in publications]
        shape = (sum(self.rows), *self.array.shape[1:])
        if all(publication.data is not None for publication in publications):
            self.complete(_of_frames(publications, shape, self.array.dtype))
            return
        self.shape = shape
        if self.seq % member.size == member.rank:
            block = self.process.store.allocate_apart(self._nbytes)
            block.written = True
            member.offer(self.seq, block)
            self.offered(member.rank, block)
        elif self.result is not None:
            self.offered(self.seq % member.size, self.result)

    @property
    def _nbytes(self) -> int:
        """Bytes of the result, once all have published."""
        return self.array.itemsize * math.prod(self.shape)

    def offered(self, rank: int, memory: Any) -> None:
        """Take the memory for the result, and copy our rows into it.

        Raises:
            ProtocolError: it has another size than the result, or another rank gives it.
        """
        giver = self.seq % self.member.size
        if rank != giver or (self.rows and memory.nbytes != self._nbytes):
            size = f"{memory.nbytes} bytes" + (f", and not {self._nbytes}," if self.rows else "")
            raise ProtocolError(f"rank {rank} gave {size} for the result of {self.signature}, which rank {giver} gives")
        self.result = result = memory
        if not self.rows or self.failure is not None:
            return
        self.working = True
        first = sum(self.rows[: self.member.rank]) * (result.nbytes // max(self.shape[0], 1))
        work, nbytes = self.process.groups().work, self.array.nbytes
        self.with_memory(result, lambda memory: work(lambda: self._copy(memory, first), self.worked, nbytes))

    def _copy(self, memory: Block | Mapped, start: int) -> None:
        target = array_at(memory.address + start, self.array.size, self.array.dtype, memory, writable=True)
        self.process.copies.copy_into(target.reshape(self.array.shape), self.array, _INTO_ONE)

    def finish(self) -> None:
        """Seal the result, because all members have written their rows."""
        self.complete(sealed(self.result, self.array.dtype, self.shape))


class ConcatenateOverHosts(_Rows, Staged):
    """The same over several hosts: the ranks of each host share a result there, and take the arrays of other hosts
    straight into it.

    Args:
        process, call, array, eager_nbytes: as for `_Rows`.
    """

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        own = super().begin(member, seq)
        self._near = [rank for rank in member.hierarchy.near(member.rank) if rank != member.rank]
        self.readers = {*self._near, *member.hierarchy.partners(member.rank)}
        self._piece: Piece | None = None
        if self.data is not None:
            own = own._replace(data=self.data)
        else:
            _, self._piece = lendable(self.process, self.array)
        return own._replace(offset=len(self.array))

    def for_rank(self, rank: int, own: Publication) -> Publication:
        """Our publication for `rank`, with our array for the ranks that take it."""
        lends = own.failure is None and rank in self.member.hierarchy.partners(self.member.rank)
        return own._replace(result=self._piece) if lends else own

    def run(self) -> None:
        """Make the result of the frames, or begin to take arrays."""
        publications = [self.published[rank] for rank in range(self.member.size)]
        self._rows = [publication.offset for publication in publications]
        self._shape = (sum(self._rows), *self.array.shape[1:])
        if all(publication.data is not None for publication in publications):
            self.complete(_of_frames(publications, self._shape, self.array.dtype))
        else:
            super().run()

    @property
    def waiting_for_us(self) -> Iterable[int]:
        """See `Staged`: the others of our host, who share the result. Other hosts have been told."""
        return self._near

    async def stages(self) -> None:
        """Put our array, and those that we take from other hosts, into the result of our host."""
        hierarchy, rank = self.member.hierarchy, self.member.rank
        row = self.array.itemsize * math.prod(self._shape[1:])
        near = hierarchy.near(rank)
        giver = near[self.seq % len(near)]
        if giver == rank:
            self.result = self.own_block(self._shape[0] * row)
            self.result.written = True
            for other in self._near:
                self.lend(other, self.result)
        else:
            self.result = await self.loan(giver, self._shape[0] * row)
        memory = await self.writable(self.result)
        first = list(itertools.accumulate(self._rows, initial=0))
        await all_of([
            self.compute(lambda: self._copy(self.array, memory, first[rank] * row), self.array.nbytes),
            *[
                self._take(other, memory, first[other] * row, self._rows[other] * row)
                for other in hierarchy.served(rank)
            ],
        ])  # fmt: skip
        self.done_with(hierarchy.served(rank))

    async def _take(self, rank: int, memory: Block | Mapped, start: int, nbytes: int) -> None:
        theirs = self.published[rank]
        given = len(theirs.data) if type(theirs.data) is bytes else getattr(theirs.result, "nbytes", -1)
        if given != nbytes:
            raise ProtocolError(f"rank {rank} gave {given} bytes to a group, and not {nbytes}")
        if type(theirs.data) is bytes:
            self._copy(np.frombuffer(theirs.data, self.array.dtype), memory, start)
        else:
            await self.bring(theirs.result, 0, nbytes, memory.address + start, memory)

    def _copy(self, array: Array, memory: Block | Mapped, start: int) -> None:
        target = array_at(memory.address + start, array.size, array.dtype, memory, writable=True)
        self.process.copies.copy_into(target.reshape(array.shape), array, _INTO_ONE)

    def finish(self) -> None:
        """Seal the result, because all members of our host have written their rows."""
        self.complete(sealed(self.result, self.array.dtype, self._shape))


def _of_frames(publications: Sequence[Publication], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The arrays of all ranks that came in frames, one behind the other."""
    result = np.empty(shape, dtype)
    low = 0
    for publication in publications:
        rows = publication.offset
        result[low : low + rows] = np.frombuffer(publication.data, dtype).reshape((rows, *shape[1:]))
        low += rows
    result.flags.writeable = False
    return result
