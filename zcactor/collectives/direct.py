"""The direct exchange: the owner of a part takes it from all at once, reduces it, and lends it finished to the others.

Within a host inputs are read through mappings, and the ranks of a host share one result. Between hosts each byte is
read once by each host that needs it, by the rank whose part it is or by that rank's partner (`hierarchy`).
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.collectives.folding import Operand, fold, fold_by_terms, native_kind, operand_of, wide_dtype
from zcactor.collectives.sources import InputPlace, Piece, lendable, operand_at, reach_inputs, source_of
from zcactor.collectives.staged import StagedReduction
from zcactor.errors import ProtocolError
from zcactor.machine import usable_cpus
from zcactor.objectstore.lease import RemoteLease
from zcactor.objectstore.store import Block
from zcactor.process.tasks import all_of
from zcactor.transport.tcp.flow import take_flows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zcactor.collectives.kinds import Array
    from zcactor.collectives.operations import Publication, Ranked
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call
    from zcactor.transport.bytes import Flow
    from zcactor.transport.mapping import Mapped

__all__ = ["Direct", "Inflow"]

PIECE_NBYTES: Final = 256 << 10
"""Bytes that are taken from a rank at once. 512 KiB took up to a tenth longer, and 64 KiB a third."""
PIECES_NBYTES: Final = 4 << 20
"""Bytes of a piece of each rank together."""
LEAST_NBYTES: Final = 1 << 20
"""Bytes of a part from which on it is taken in pieces: there are two at least."""
SHARE_NBYTES: Final = 8 << 20
"""Bytes of a part for one thread, where there are processors for several."""
MAX_THREADS: Final = 4
"""Threads that share a part. Each takes one of a connection's few data sockets; see `zcactor.transport.tcp.pull`."""
_LINE: Final = 64


# A thread takes a piece of each rank's input in turn and reduces them, so that they are in its processor's cache, and
# neither wait in memory for the last rank's bytes nor are read from there. On two cores that makes a reduce_scatter
# over four hosts a quarter faster (`python -m benchmarks.hosts group`). The bits are those of `fold`.
class Inflow:
    """The reduction of parts of arrays that come over TCP.

    Args:
        process: of the rank that reduces.
        op, dtype: as for `zcactor.collectives.folding.fold`.
    """

    def __init__(self, process: LocalProcess, op: str, dtype: np.dtype[Any]) -> None:
        self._process = process
        self._op = op
        self._dtype = dtype

    def is_worth_it(self, own: Operand, memories: Sequence[Any], count: int) -> bool:
        """Whether `count` elements of all inputs may come so, and the loop in C reduces them: it leaves the interpreter
        to others.

        Args:
            own: the input of this rank.
            memories: the memory of the others' inputs.
            count: number of elements.
        """
        return (
            count * self._dtype.itemsize >= LEAST_NBYTES
            and own.array is None
            and not own.address % self._dtype.alignment
            and native_kind(self._dtype, self._op) is not None
            and all(type(memory) is RemoteLease for memory in memories)
        )

    async def reduce(
        self, own: Operand, rank: int, memories: Sequence[RemoteLease], low: int, count: int, out: Operand
    ) -> bool:  # fmt: skip
        """Reduce a part of all inputs.

        Args:
            own: the part of the input of this rank.
            rank: the place of that input among the others.
            memories: the memory of the others' inputs, in the order of their ranks.
            low: number of the part's first element in those.
            count: number of elements.
            out: the result, from its first element on. No thread writes there when it is let go.

        Returns:
            Whether all were reduced. Otherwise a connection does not bring bytes so, or was lost, and the bytes of
            `out` have no meaning.
        """
        itemsize = self._dtype.itemsize
        threads = min(MAX_THREADS, max(usable_cpus() // 2, 1), count * itemsize // SHARE_NBYTES + 1)
        share = -(-count // threads)
        done = await all_of([
            self._share(
                own._replace(address=own.address + at * itemsize), rank, memories, low + at, min(share, count - at),
                out._replace(address=out.address + at * itemsize),
            )
            for at in range(0, count, share)
        ])  # fmt: skip
        return all(done)

    async def _share(
        self, own: Operand, rank: int, memories: Sequence[RemoteLease], low: int, count: int, out: Operand
    ) -> bool:  # fmt: skip
        itemsize = self._dtype.itemsize
        piece = min(PIECE_NBYTES, max(PIECES_NBYTES // len(memories) // _LINE, 1) * _LINE, count * itemsize)
        blocks = [self._process.placements.take(self._process.process, piece) for _ in memories]
        others = [Operand(block.address, None, block) for block in blocks]
        flows = await self._process.locations.flows(memories, low * itemsize, count * itemsize)
        if flows is None:
            return False
        if not await take_flows(flows, partial(self._take, flows, others, own, rank, count, piece // itemsize, out)):
            return False
        self._process.locations.flowed(count * itemsize * len(memories))
        return True

    def _take(
        self, flows: Sequence[Flow], others: Sequence[Operand], own: Operand, rank: int, count: int, piece: int,
        out: Operand,
    ) -> None:  # fmt: skip
        """Take `piece` elements of each flow in turn and reduce them, in a thread."""
        itemsize = self._dtype.itemsize
        buffer = ctypes.c_char * (piece * itemsize)
        views = [memoryview(buffer.from_address(each.address)).cast("B") for each in others]
        for flow in flows:  # here, so that owners do not take the processors before this thread has one
            flow.begin()
        for at in range(0, count, piece):
            n = min(piece, count - at)
            for flow, view in zip(flows, views, strict=True):
                flow.take(view[: n * itemsize])
            operands = [*others[:rank], own._replace(address=own.address + at * itemsize), *others[rank:]]
            fold(self._op, self._dtype, operands, out.address + at * itemsize, 0, n)


class Direct(StagedReduction):
    """A reduction over several hosts, in at most two levels.

    Args:
        process, call, what, op, array, out, rows, extra: as for `zcactor.collectives.reductions.Reduction`.
        bounds: the elements of the part that each rank reduces: its first, and the one after its last.
        share: whether the parts are put together to one result, on every host. Otherwise each rank keeps its own.
        whole: whether inputs are taken from every rank, and not sums from every host.
    """

    source: InputPlace

    def __init__(
        self, process: LocalProcess, call: Call, what: str, op: str, array: Array, out: Array | None = None,
        rows: tuple[int, int] | None = None, extra: str = "", *, bounds: Sequence[tuple[int, int]], share: bool,
        whole: bool,
    ) -> None:  # fmt: skip
        super().__init__(process, call, what, op, array, out, rows, extra)
        self._bounds = bounds
        self._share = share
        self._whole = whole
        self._taken = 0

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        own = super().begin(member, seq)
        hierarchy, rank = member.hierarchy, member.rank
        self._near = hierarchy.near(rank)
        self._wide = wide_dtype(self.array.dtype, self.op)
        self._lends = self._whole or len(self._near) == 1
        self.readers = set(self._near) - {rank}
        self._piece: Piece | None = None
        if self._lends:
            self.source, self._piece = lendable(self.process, self.array)
            self.readers.update(hierarchy.far(rank))
        else:
            self.source = source_of(self.process, self.array)
        if self._share and self._giver == rank:
            self.result = self.own_block(self.array.nbytes)
            self.result.written = True
        source = self.source
        return own._replace(owner=source.owner or self.process.process, offset=source.offset, layout=source.layout)

    def for_rank(self, rank: int, own: Publication) -> Publication:
        """Our publication for `rank`, with the memory of the result on our host, and our input on others."""
        if own.failure is not None:
            return own
        return own._replace(result=self.result if rank in self._near else self._piece)

    @property
    def _giver(self) -> int:
        """The rank of our host that gives the memory for the result; the ranks take turns."""
        return self._near[self.seq % len(self._near)]

    @property
    def waiting_for_us(self) -> Iterable[int]:
        """See `Staged`: the others of our host, who share the result. Other hosts have been told."""
        return [rank for rank in self._near if rank != self.member.rank]

    @property
    def read_nbytes(self) -> int:
        """Bytes of inputs, and of sums of other hosts, that this rank has read."""
        return self._taken

    # ---------------------------------------------------------------- stages

    async def stages(self) -> None:
        """Reduce our part, and then take the parts of others where the result is shared."""
        hierarchy, rank = self.member.hierarchy, self.member.rank
        await reach_inputs(self, [other for other in self._near if other != rank])
        if not self._lends:
            for other in hierarchy.served(rank):
                await self._lend_sum(other)
        low, high = self._bounds[rank]
        dtype = self.array.dtype
        nbytes = (high - low) * dtype.itemsize
        finished: Piece | None = None
        if not self._share:
            self.result = self.process.store.empty(self.shape, dtype)
            await self._reduce(low, high, operand_of(self.result))
        elif nbytes:
            shared = self._shared_result()
            if type(shared) is Block:
                finished = Piece(shared, shared.offset + low * dtype.itemsize, nbytes)
                await self._reduce(low, high, Operand(finished.address, None, finished))
            else:  # ours to lend is what lies in our own arena
                block = self.own_block(nbytes)
                finished = Piece(block, block.offset, nbytes)
                await self._reduce(low, high, Operand(block.address, None, block))
        self.done_with([other for other in hierarchy.far(rank) if self._lends_to_us(other)])
        if not self._share:
            return
        if finished is not None:
            for other in hierarchy.partners(rank):
                self.lend(other, finished)
        await self._put_together(finished)

    def _lends_to_us(self, other: int) -> bool:
        """Whether a rank of another host lends its input to ours, and not a part of its host's sum."""
        return self._whole or len(self.member.hierarchy.near(other)) == 1

    def _inputs(self, ranks: Iterable[int]) -> list[Operand]:
        """The inputs of ranks of our host."""
        found = []
        for rank in ranks:
            if rank == self.member.rank:
                found.append(self.source.operand)
            else:
                theirs = self.published[rank]
                found.append(operand_at(self.process, theirs.owner, theirs.offset, theirs.layout, self.array))
        return found

    async def _sum_of_host(self, low: int, high: int) -> Block:
        """Reduce elements of the inputs of our host, and round and divide nothing."""
        count = high - low
        block = self.own_block(count * self._wide.itemsize)
        inputs = self._inputs(self._near)
        self._taken += count * self.array.itemsize * len(inputs)
        await self.fold_to(inputs, Operand(block.address, None, block), low, count, self._widened, 0)
        return block

    @property
    def _widened(self) -> np.dtype[Any] | None:
        """The dtype of sums of hosts, where that is another one than that of the inputs."""
        return None if self._wide == self.array.dtype else self._wide

    async def _lend_sum(self, rank: int) -> None:
        """Lend a rank of another host its part of our host's sum."""
        low, high = self._bounds[rank]
        if low < high:
            block = await self._sum_of_host(low, high)
            self.lend(rank, Piece(block, block.offset, block.nbytes))

    async def _reduce(self, low: int, high: int, out: Operand) -> None:
        """Reduce elements of the inputs of all ranks to the memory of `out`."""
        hierarchy, dtype, size = self.member.hierarchy, self.array.dtype, self.member.size
        count = high - low
        if not count:
            return
        if len(hierarchy.ranks) == size and await self._as_they_arrive(low, count, out):
            self._taken += count * dtype.itemsize * (size if self._whole else size - 1)
            return
        if self._whole:
            near = dict(zip(self._near, self._inputs(self._near), strict=True))
            first = low * dtype.itemsize
            operands = await all_of([
                self._from_rank(rank, low, count) if rank not in near else _ready(_behind(near[rank], first))
                for rank in range(size)
            ])  # fmt: skip
            nbytes = count * dtype.itemsize * size
            await self.compute(
                lambda: fold_by_terms(self.op, dtype, operands, hierarchy.terms, out.address, 0, count), nbytes
            )  # fmt: skip
            self._taken += nbytes
            return
        operands = await all_of([self._from_host(host, low, count) for host in range(len(hierarchy.ranks))])
        await self.fold_to(operands, out, 0, count, None, size)
        self._taken += count * dtype.itemsize * (len(hierarchy.ranks) - 1)

    async def _as_they_arrive(self, low: int, count: int, out: Operand) -> bool:
        """Reduce elements of the inputs of all ranks as they arrive, where each rank has a host for itself. Returns
        whether that was possible; if not, what `out` has has no meaning."""
        rank, inflow = self.member.rank, Inflow(self.process, self.op, self.array.dtype)
        own = self.source.operand
        memories = [self._lent_by(other) for other in range(self.member.size) if other != rank]
        if not inflow.is_worth_it(own, memories, count):
            return False
        return await inflow.reduce(_behind(own, low * self.array.itemsize), rank, memories, low, count, out)

    def _lent_by(self, rank: int) -> Any:
        """The input of a rank on another host."""
        memory = self.published[rank].result
        if memory is None or memory.nbytes != self.array.nbytes:
            raise ProtocolError(f"rank {rank} lent no input of {self.array.nbytes} bytes to a group")
        return memory

    async def _from_rank(self, rank: int, low: int, count: int) -> Operand:
        """Elements of the input of a rank on another host."""
        itemsize = self.array.itemsize
        return await self.brought(self._lent_by(rank), low * itemsize, count * itemsize)

    async def _from_host(self, host: int, low: int, count: int) -> Operand:
        """Elements of the sum of a host."""
        hierarchy, rank = self.member.hierarchy, self.member.rank
        if host == hierarchy.hosts[rank]:
            if len(self._near) == 1:
                return _behind(self.source.operand, low * self.array.itemsize)
            block = await self._sum_of_host(low, low + count)
            return Operand(block.address, None, block, self._widened)
        other = hierarchy.partner(rank, host)
        if len(hierarchy.ranks[host]) == 1:
            return await self._from_rank(other, low, count)
        nbytes = count * self._wide.itemsize
        return await self.brought(await self.loan(other, nbytes), 0, nbytes, self._widened)

    # ---------------------------------------------------------------- the shared result

    def _shared_result(self) -> Any:
        """The memory of the result on our host."""
        if self.result is None:
            memory = self.published[self._giver].result
            if memory is None or memory.nbytes != self.array.nbytes:
                raise ProtocolError("the memory for a group's result was not named, or has another size")
            self.result = memory
        return self.result

    async def _put_together(self, finished: Piece | None) -> None:
        """Put our part and those that we take from other hosts into the result."""
        result = self._shared_result()
        memory = await self.writable(result)
        itemsize = self.array.itemsize
        steps = []
        for rank in self.member.hierarchy.served(self.member.rank):
            low, high = self._bounds[rank]
            if low < high:
                steps.append(self._take(rank, (high - low) * itemsize, memory, low * itemsize))
        target = memory.address + self._bounds[self.member.rank][0] * itemsize
        if finished is not None and finished.block is not result:
            steps.append(self.bring(finished, 0, finished.nbytes, target, memory))
        await all_of(steps)

    async def _take(self, rank: int, nbytes: int, memory: Block | Mapped, start: int) -> None:
        await self.bring(await self.loan(rank, nbytes), 0, nbytes, memory.address + start, memory)


def _behind(operand: Operand, nbytes: int) -> Operand:
    """The contiguous operand from so many bytes on."""
    return operand._replace(address=operand.address + nbytes)


async def _ready(operand: Operand) -> Operand:
    return operand
