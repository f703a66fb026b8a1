"""Reductions of bytes from other hosts as they arrive.

A thread takes a piece of each rank's input in turn and reduces them, so that they are in its processor's cache, and
neither wait in memory for the last rank's bytes nor are read from there. On two cores that makes a reduce_scatter over
four hosts a quarter faster (`python -m benchmarks.group_hosts`). The bits are those of `fold`.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.collectives.folding import Operand, fold, native_kind
from zcactor.machine import usable_cpus
from zcactor.objectstore.lease import RemoteLease
from zcactor.process.tasks import all_of
from zcactor.transport.tcp.flow import take_flows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zcactor.process.context import LocalProcess
    from zcactor.transport.base import Flow

__all__ = ["Inflow"]

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
