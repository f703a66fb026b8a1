"""The base of operations between hosts: several stages, each of which takes bytes that other ranks have ready.

Bytes of ranks on other hosts are *lent*: the rank names them, with a lease, and they are read straight to where they
are needed, by READ or over TCP. A stage waits for the loans that it needs, and for no other ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.collectives.folding import Memory, Operand, fold, swift_nbytes
from zcactor.collectives.operations import Collective, sealed
from zcactor.collectives.reductions import Reduction
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.exception_pickling import bare
from zcactor.objectstore.lease import Lease, RemoteLease
from zcactor.objectstore.store import Block

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from zcactor.collectives.operations import Publication, Ranked
    from zcactor.collectives.sources import Piece
    from zcactor.transport.bytes import Commit
    from zcactor.transport.mapping import Mapped

__all__ = ["Staged", "StagedReduction"]

_INTO_HOSTS = "group part into the result of its host"
"""The counted reason for copies of parts that were made, or read, in memory of this process."""


class Staged(Collective):
    """The base of operations between hosts."""

    result: Any = None
    """The result: an array, or its memory, a block of ours or a lease on one that the ranks of this host share."""

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        self._loans: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        return super().begin(member, seq)

    def run(self) -> None:
        """Begin the stages."""
        self.working = True
        self.process.tasks.start(self._run())

    async def _run(self) -> None:
        try:
            await self.stages()
        except Exception as error:  # of this member alone; the others must not wait for it
            error = bare(error, None)  # the frames would keep memory
            self.worked(None if error is self.failure else error)
        else:
            self.worked()

    @abstractmethod
    async def stages(self) -> None:
        """Do this member's part."""

    # ---------------------------------------------------------------- messages

    def offered(self, rank: int, memory: Any) -> None:
        """Take a loan of `rank`. The loans of one rank come in the order in which it makes them."""
        if not self.told:
            self._loans[rank].append(memory)
            self._wake(rank)

    def reported(self, rank: int, failure: BaseException | None) -> None:
        """See `Collective.reported`. After a failure nobody waits for loans."""
        super().reported(rank, failure)
        self._give_up()

    def abandon(self, error: BaseException) -> None:
        """See `Collective.abandon`."""
        super().abandon(error)
        self._give_up()

    def _give_up(self) -> None:
        if self.failure is not None and self.working:
            for rank in list(self._waiting):
                self._wake(rank)

    def _wake(self, rank: int) -> None:
        waiting = self._waiting.pop(rank, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def loan(self, rank: int, nbytes: int) -> Any:
        """The next loan of `rank`, of so many bytes.

        Raises:
            ProtocolError: it is a loan of other bytes.
            BaseException: the failure of another rank.
        """
        loans = self._loans[rank]
        while not loans:
            if self.failure is not None:
                raise bare(self.failure, None)
            waiting = self._waiting[rank] = self.process.loop.create_future()
            await waiting
        memory = loans.popleft()
        if memory.nbytes != nbytes:
            raise ProtocolError(f"rank {rank} lent {memory.nbytes} bytes to a group, and not {nbytes}")
        return memory

    def lend(self, rank: int, piece: Piece) -> None:
        """Let another rank read bytes of ours."""
        self.member.lend(rank, self.seq, piece)

    def done_with(self, ranks: Iterable[int]) -> None:
        """Tell other ranks that this one reads their inputs no more."""
        self.member.report(self.seq, None, ranks)

    @property
    def waiting_for_us(self) -> Iterable[int]:
        """The ranks that wait for our last report, where nothing has failed."""
        return ()

    def _tell(self, failure: BaseException | None) -> None:
        self.told = True
        self.member.report(self.seq, failure, self.waiting_for_us if self.failure is None else None)

    # ---------------------------------------------------------------- bytes

    async def brought(self, memory: Any, start: int, nbytes: int, dtype: np.dtype[Any] | None = None) -> Operand:
        """A part of lent bytes as an operand: where it is mapped, or read to memory of ours."""
        if type(memory) is RemoteLease:
            block = self.process.placements.take(memory.owner, nbytes, commit=False)
            commit = partial(self.process.store.commit, block.offset)
            await self._fetch(memory, start, nbytes, block.address, block, commit)
            return Operand(block.address, None, block, dtype)
        return Operand(memory.address + start, None, memory, dtype)

    async def _fetch(
        self, memory: RemoteLease, start: int, nbytes: int, address: int, keep: Any, commit: Commit | None = None
    ) -> None:
        try:
            await self.process.locations.fetch(memory, start, nbytes, address, keep, commit)
        except ConnectionLost as error:  # this may be known before the end of the process is
            self.member.unreached(memory.owner, str(error))
            raise

    async def bring(self, memory: Any, start: int, nbytes: int, address: int, keep: Any) -> None:
        """Take a part of lent bytes to an address in `keep`, a block of ours or mapped memory of another process."""
        if type(memory) is RemoteLease and (type(keep) is Block or not memory.session.connection.one_sided):
            await self._fetch(memory, start, nbytes, address, keep)
            return
        operand = await self.brought(memory, start, nbytes)
        await self.compute(lambda: self.copy(operand, address, keep, nbytes), nbytes)

    def copy(self, source: Operand, target: int, keep: Any, nbytes: int) -> None:
        """Copy bytes of this process to an address in `keep`, which is counted."""
        there = np.asarray(Memory(target, nbytes, keep, writable=True))
        self.process.copies.copy_into(there, np.asarray(Memory(source.address, nbytes, source.keep)), _INTO_HOSTS)

    def own_block(self, nbytes: int) -> Block:
        """Memory for a part of a sum, or for the result: that of an operation before, where it is free."""
        return self.process.placements.take(self.process.process, nbytes)

    async def writable(self, result: Any) -> Block | Mapped:
        """The memory of `result` as this process writes to it. A connection that was opened from both ends at the same
        moment may have been replaced, and gets write access here."""
        if type(result) is Lease and result.owner != self.process.process:
            try:
                session = await self.process.connections.connect(result.owner)
                await session.connection.open_writable()
            except ConnectionLost as error:
                self.member.unreached(result.owner, str(error))
                raise
        return self.member.writable(result)

    # ---------------------------------------------------------------- work

    async def compute(self, job: Callable[[], None], nbytes: int | None) -> None:
        """Run ``job()``, on a thread where that takes long; see `Groups.work`."""
        ended: asyncio.Future[BaseException | None] = self.process.loop.create_future()

        def end(error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(error)

        self.process.groups().work(job, end, nbytes)
        error = await ended
        if error is not None:
            raise error


class StagedReduction(Staged, Reduction):
    """The base of reductions between hosts."""

    def finish(self) -> None:
        """Give the result, because nobody writes to it any more."""
        self.deliver(
            self.result if type(self.result) is np.ndarray else sealed(self.result, self.array.dtype, self.shape)
        )

    async def fold_to(
        self, operands: Sequence[Operand], out: Operand, start: int, count: int, into: np.dtype[Any] | None, ranks: int
    ) -> None:
        """Reduce to the memory of `out`; see `zcactor.collectives.folding.fold`."""
        op, dtype = self.op, self.array.dtype
        nbytes = None if any(x.dtype for x in operands) or into else swift_nbytes(op, dtype, operands, count)
        await self.compute(lambda: fold(op, dtype, operands, out.address, start, count, into, ranks), nbytes)
