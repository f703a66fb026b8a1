"""Reductions: how the members of a group make the sum, or another reduction, of their arrays."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from zcactor.collectives.folding import Operand, fold, fold_by_terms, native_kind, operand_of, swift_nbytes
from zcactor.collectives.hierarchy import part_bounds
from zcactor.collectives.kinds import Array, described
from zcactor.collectives.lending import lent_or_copied, snapshot
from zcactor.collectives.operations import Collective, Publication, Ranked, sealed
from zcactor.collectives.sources import InputPlace, is_reached, operand_at, reach_inputs, source_of
from zcactor.errors import ProtocolError
from zcactor.native import hot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zcactor.process.context import LocalProcess
    from zcactor.rpc.call import Call

__all__ = ["Eager", "InPlace", "Private", "Reduction", "Shared", "signature_of"]


@lru_cache(maxsize=256)
def signature_of(what: str, dtype: np.dtype[Any], shape: tuple[int, ...], op: str, extra: str) -> str:
    """The call of a reduction as text. Programs repeat theirs."""
    return f"{what}({described(dtype, shape)}, {op!r}{extra})"


class Reduction(Collective):
    """The base of reductions.

    Args:
        process, call: as for all operations.
        what: the call without its arguments.
        op: the kind of reduction.
        array: this rank's input.
        out: the array that the result is written to, or None.
        rows: first row of the result, and the one after the last; None reduces all rows, to a read-only result.
        extra: further text of the signature.
    """

    def __init__(
        self, process: LocalProcess, call: Call, what: str, op: str, array: Array, out: Array | None = None,
        rows: tuple[int, int] | None = None, extra: str = "",
    ) -> None:  # fmt: skip
        super().__init__(process, call, signature_of(what, array.dtype, array.shape, op, extra))
        self.op = op
        self.array = array
        """This rank's input as the ranks read it; of a small one, its dtype and shape."""
        self.shape = array.shape
        self.start, self.count = 0, array.size
        """The elements of the result, in C order."""
        self.is_piece = rows is not None
        if rows is not None:
            low, high = rows
            self.shape = (high - low, *array.shape[1:])
            inner = array.size // len(array) if len(array) else 0
            self.start, self.count = low * inner, (high - low) * inner
        self.out = None if out is None else (out, out.view(np.ndarray))  # a view that stays writable during the claim
        self.take_input(array, out)
        if out is not None:
            hot.claim(out)
            self.claimed = out

    def take_input(self, array: Array, out: Array | None) -> None:
        """Take the input at the call."""
        self.array, self.lent = lent_or_copied(self.process, array, out)

    def fold(self, operands: Sequence[Operand], result: Array) -> None:
        """Reduce the inputs of all ranks to `result`, which is contiguous."""
        terms = self.member.hierarchy.terms
        fold_by_terms(self.op, self.array.dtype, operands, terms, result.ctypes.data, self.start, self.count)

    def deliver(self, result: Array) -> None:
        """Complete with `result`, copied to `out` where there is one."""
        self.process.groups().counts.bytes_reduced += self.read_nbytes
        if self.out is None:
            if not self.is_piece:
                result.flags.writeable = False
            self.complete(result)
            return
        out, writable = self.out
        self.process.groups().work(
            lambda: self._copy(writable, result), lambda error: self._delivered(out, error), result.nbytes
        )

    @property
    def read_nbytes(self) -> int:
        """Bytes of the inputs that this rank has read."""
        return self.count * self.array.itemsize * self.member.size

    def _copy(self, out: Array, result: Array) -> None:
        self.process.copies.copy_into(out, result, "group result into out")

    def _delivered(self, out: Array, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        else:
            self.complete(out)


class Eager(Reduction):
    """Small inputs travel in the frames, and every member reduces them alone."""

    whole = True
    data: bytes

    def take_input(self, array: Array, out: Array | None) -> None:
        """See `Reduction.take_input`."""
        del out
        self.data = snapshot(self.process, array)
        self.array = np.ndarray(array.shape, array.dtype, self.data)

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        self.member, self.seq = member, seq
        return Publication(self.signature, self.data)

    def inputs(self, nbytes: int) -> tuple[Array | bytes, ...]:
        """The inputs by rank, of so many bytes each.

        Raises:
            ProtocolError: a rank has sent something else.
        """
        published = self.published
        inputs = tuple([published[rank].data for rank in range(len(published))])
        for rank, data in enumerate(inputs):
            if (data.nbytes if type(data) is np.ndarray else len(data) if type(data) is bytes else -1) != nbytes:
                raise ProtocolError(f"rank {rank} did not send {nbytes} bytes as its input")
        return inputs

    def run(self) -> None:
        """Reduce at once: this takes less time than to tell a thread."""
        dtype = self.array.dtype
        inputs = self.inputs(self.array.nbytes)
        result = np.empty(self.shape, dtype)
        kind = None if self.is_piece or not self.member.hierarchy.flat else native_kind(dtype, self.op)
        if kind is not None and dtype.kind != "c":  # as `fold` does, with less around it
            hot.fold(kind, inputs, result, self.count, len(inputs) if self.op == "mean" else 0)
        else:
            self.fold([operand_of(_elements(data, dtype)) for data in inputs], result)
        self.deliver(result)


def _elements(data: Array | bytes, dtype: np.dtype[Any]) -> Array:
    """The elements of an input that came in a frame, or of our own."""
    if type(data) is np.ndarray:
        return data.reshape(-1).view(dtype)
    return np.frombuffer(data, dtype)


class InPlace(Reduction):
    """The base of reductions that read the inputs where they lie."""

    source: InputPlace

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        super().begin(member, seq)
        self.readers = {rank for rank in range(member.size) if rank != member.rank}
        source = self.source = source_of(self.process, self.array)
        owner = source.owner or self.process.process
        return Publication(self.signature, None, owner, source.offset, source.layout, self.block())

    def block(self) -> Any:
        """The memory for the result, on the rank that gives it."""
        return None

    @property
    def own(self) -> Operand:
        """This rank's input, as it is read here."""
        return self.source.operand

    def work(self, start: int, count: int, out: Operand) -> None:
        """Reduce the inputs, on a thread where that takes long.

        Args:
            start: number of the first element.
            count: number of elements.
            out: the result's elements, from the first on.
        """
        self.working = True
        rank = self.member.rank
        far = [other for other, p in self.published.items() if other != rank and not is_reached(self.process, p.owner)]
        if far:
            self.process.tasks.start(self._reach(far, start, count, out))
        else:
            self._work(start, count, out)

    async def _reach(self, ranks: Sequence[int], start: int, count: int, out: Operand) -> None:
        try:
            await reach_inputs(self, ranks)
            self._work(start, count, out)
        except Exception as error:  # of this member alone; the others must not wait for it
            self.worked(error)

    def _work(self, start: int, count: int, out: Operand) -> None:
        operands = []
        for rank in range(self.member.size):
            publication = self.published[rank]
            if rank == self.member.rank:
                operands.append(self.own)
            else:
                operands.append(
                    operand_at(self.process, publication.owner, publication.offset, publication.layout, self.array)
                )
        dtype, op = self.array.dtype, self.op
        self.process.groups().work(
            lambda: fold(op, dtype, operands, out.address, start, count),  # which keeps the memory of the result too
            self.worked,
            self.weight(operands, count),
        )

    def weight(self, operands: Sequence[Operand], count: int) -> int | None:
        """The bytes by which it is decided where the work is done; see `Groups.work`."""
        return swift_nbytes(self.op, self.array.dtype, operands, count)


class Private(InPlace):
    """Each member reduces the elements of its own result: its piece of a `reduce_scatter`, or everything."""

    result: Array

    def run(self) -> None:
        """Reduce, on a thread where that takes long."""
        self.result = self.process.store.empty(self.shape, self.array.dtype)
        self.work(self.start, self.count, operand_of(self.result))

    def finish(self) -> None:
        """Give the result, because all members have read this one's input."""
        self.deliver(self.result)


class Shared(InPlace):
    """Each member reduces its part of the inputs into one result, which all members map."""

    result: Any

    def block(self) -> Any:
        """The memory for the result; the ranks take turns."""
        if self.seq % self.member.size != self.member.rank:
            return None
        block = self.process.store.allocate_apart(self.array.nbytes)
        block.written = True
        return block

    def run(self) -> None:
        """Reduce this member's part, on a thread where that takes long."""
        result = self.published[self.seq % self.member.size].result
        if result is None or result.nbytes != self.array.nbytes:
            raise ProtocolError("the memory for a group's result was not named, or has another size")
        self.result = result
        itemsize, rank = self.array.itemsize, self.member.rank
        start, stop = part_bounds(self.array.size, itemsize, self.member.size)[rank : rank + 2]
        self.with_memory(
            result,
            lambda memory: self.work(start, stop - start, Operand(memory.address + start * itemsize, None, memory)),
        )

    def finish(self) -> None:
        """Seal the result, because all members have written their parts."""
        self.deliver(sealed(self.result, self.array.dtype, self.shape))

    @property
    def read_nbytes(self) -> int:
        """Bytes of the inputs that this rank has read: its part of each."""
        return self.array.nbytes
