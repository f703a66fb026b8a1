"""Plans that pass sums from rank to rank: a ring, and halving with doubling.

They move as few bytes as the direct exchange, in more steps, and add in an order of their own. Each element is summed
in one place and passed on finished, so all ranks have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.collectives.folding import Operand, wide_dtype
from zcactor.collectives.hierarchy import part_bounds
from zcactor.collectives.sources import InputPlace, Piece, lendable
from zcactor.collectives.staged import StagedReduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zcactor.collectives.operations import Publication, Ranked

__all__ = ["Halving", "Ring"]


class Passed(StagedReduction):
    """The base of plans that pass sums from rank to rank."""

    source: InputPlace

    def begin(self, member: Ranked, seq: int) -> Publication:
        """See `Collective.begin`."""
        own = super().begin(member, seq)
        self.source, self.input = lendable(self.process, self.array)
        self.readers = self.first_readers()
        self.result = self.own_block(self.array.nbytes)
        wide = wide_dtype(self.array.dtype, self.op)
        self.wide = None if wide == self.array.dtype else wide
        self._widest = wide.itemsize
        self._taken = 0
        return own

    def first_readers(self) -> set[int]:
        """The ranks that read our input."""
        return set()

    def mine(self, low: int, high: int) -> Operand:
        """Elements of our input."""
        piece = self.input.part(low * self.array.itemsize, (high - low) * self.array.itemsize)
        return Operand(piece.address, None, piece)

    def part(self, piece: Piece, low: int, high: int) -> Piece:
        """Elements of our input, or of the result."""
        return piece.part(low * self.array.itemsize, (high - low) * self.array.itemsize)

    @property
    def finished(self) -> Piece:
        """The memory of the result."""
        return Piece(self.result, self.result.offset, self.result.nbytes)

    async def sum_of(self, operands: Sequence[Operand], low: int, high: int, *, last: bool) -> Piece:
        """Reduce elements of two ranks, or of two sums: to the result with the last ones."""
        count = high - low
        self._taken += 2 * count * self.array.itemsize
        if last:
            piece = self.part(self.finished, low, high)
            await self.fold_to(operands, Operand(piece.address, None, piece), 0, count, None, self.member.size)
        else:
            block = self.own_block(count * self._widest)
            piece = Piece(block, block.offset, block.nbytes)
            await self.fold_to(operands, Operand(piece.address, None, piece), 0, count, self.wide, 0)
        return piece

    async def next_of(self, rank: int, low: int, high: int, *, summed: bool) -> Operand:
        """Elements that a rank lends next: of its input, or of a sum."""
        dtype: np.dtype[Any] | None = self.wide if summed else None
        nbytes = (high - low) * (self.array.itemsize if dtype is None else dtype.itemsize)
        return await self.brought(await self.loan(rank, nbytes), 0, nbytes, dtype)

    async def finished_of(self, rank: int, low: int, high: int) -> None:
        """Take finished elements from a rank to their place in the result."""
        piece = self.part(self.finished, low, high)
        await self.bring(await self.loan(rank, piece.nbytes), 0, piece.nbytes, piece.address, self.result)

    @property
    def read_nbytes(self) -> int:
        """Bytes of inputs and sums that this rank has reduced."""
        return self._taken


class Ring(Passed):
    """Sums of parts go around all ranks, and then the finished parts. Part c is ((x[c] + x[c+1]) + x[c+2]) + ..., the
    ranks counted around the ring."""

    def first_readers(self) -> set[int]:
        """See `Passed`."""
        return {(self.member.rank + 1) % self.member.size}

    async def stages(self) -> None:
        """Take a part from the rank before, add ours, and lend the sum to the rank behind; then pass finished ones."""
        rank, size = self.member.rank, self.member.size
        before, behind = (rank - 1) % size, (rank + 1) % size
        bounds = part_bounds(self.array.size, self.array.itemsize, size)

        def ends(part: int) -> tuple[int, int]:
            return bounds[part % size], bounds[part % size + 1]

        def pass_on(piece: Piece) -> None:
            if piece.nbytes:
                self.lend(behind, piece)

        pass_on(self.part(self.input, *ends(rank)))
        for step in range(size - 1):
            low, high = ends(rank - 1 - step)
            if low < high:
                theirs = await self.next_of(before, low, high, summed=step > 0)
            if not step:
                self.done_with((before,))
            if low < high:
                pass_on(await self.sum_of([theirs, self.mine(low, high)], low, high, last=step == size - 2))
        for step in range(size - 1):
            low, high = ends(rank - step)
            if low < high:
                await self.finished_of(before, low, high)
                if step < size - 2:
                    self.lend(behind, self.part(self.finished, low, high))


class Halving(Passed):
    """Two ranks exchange halves of their sums in each step, and add; then they put the halves together again.

    Where the number of ranks is no power of two, as many of the first ranks as there are too many pair up: the first of
    a pair takes the input of the second, and lends it the result at the end.
    """

    def first_readers(self) -> set[int]:
        """See `Passed`."""
        rank, surplus = self.member.rank, self._surplus
        if rank < 2 * surplus:
            return {rank - 1} if rank % 2 else set()
        return {self._rank_of(self._place ^ (self._power // 2))}

    @property
    def _power(self) -> int:
        """The greatest power of two that is at most the number of ranks: the number of those that exchange."""
        return 1 << (self.member.size.bit_length() - 1)

    @property
    def _surplus(self) -> int:
        return self.member.size - self._power

    @property
    def _place(self) -> int:
        """Our number among the ranks that exchange."""
        rank, surplus = self.member.rank, self._surplus
        return rank // 2 if rank < 2 * surplus else rank - surplus

    def _rank_of(self, place: int) -> int:
        return 2 * place if place < self._surplus else place + self._surplus

    async def stages(self) -> None:
        """Exchange halves with ranks that are nearer each time, and put them together the same way back."""
        rank, count = self.member.rank, self.array.size
        paired = rank < 2 * self._surplus
        if paired and rank % 2:
            self.lend(rank - 1, self.input)
            await self.finished_of(rank - 1, 0, count)
            return
        sums: Piece | None = None
        if paired:
            theirs = await self.next_of(rank + 1, 0, count, summed=False)
            self.done_with((rank + 1,))
            sums = await self.sum_of([self.mine(0, count), theirs], 0, count, last=False)
        bounds = part_bounds(count, self.array.itemsize, self._power)
        first, behind = 0, self._power
        while behind - first > 1:
            first, behind, sums = await self._halve(bounds, first, behind, sums)
        distance = 1
        while distance < self._power:
            await self._double(bounds, distance)
            distance *= 2
        if paired:
            self.lend(rank + 1, self.finished)

    async def _halve(
        self, bounds: Sequence[int], first: int, behind: int, sums: Piece | None
    ) -> tuple[int, int, Piece | None]:
        """Exchange halves of the parts from `first` to `behind`. Returns the parts that are ours now, and their sums.

        Args:
            bounds: elements at which the parts begin.
            first: our first part.
            behind: the part after our last.
            sums: our sums of these parts; None where there is our input alone.
        """
        distance = (behind - first) // 2
        middle, upper = first + distance, bool(self._place & distance)
        other = self._rank_of(self._place ^ distance)
        ours, theirs = (first, middle), (middle, behind)
        if upper:
            ours, theirs = theirs, ours
        start, itemsize = bounds[first], self.array.itemsize if sums is None else self._widest

        def held(parts: tuple[int, int]) -> Piece:
            low, high = bounds[parts[0]], bounds[parts[1]]
            if sums is None:
                return self.part(self.input, low, high)
            return sums.part((low - start) * itemsize, (high - low) * itemsize)

        if (given := held(theirs)).nbytes:
            self.lend(other, given)
        low, high = bounds[ours[0]], bounds[ours[1]]
        begins, made = behind - first == self._power, None
        if low < high:
            summed = not begins or other < 2 * self._surplus
            taken = await self.next_of(other, low, high, summed=summed)
            kept = held(ours)
            operands = [Operand(kept.address, None, kept, None if sums is None else self.wide), taken]
            if upper:  # the lower rank's come first
                operands.reverse()
            made = await self.sum_of(operands, low, high, last=distance == 1)
        if begins:
            self.done_with((other,))
        return *ours, made

    async def _double(self, bounds: Sequence[int], distance: int) -> None:
        """Exchange as many finished parts as each has with the rank at a distance."""
        other = self._place ^ distance
        ours, theirs = self._place & -distance, other & -distance
        low, high = bounds[ours], bounds[ours + distance]
        if low < high:
            self.lend(self._rank_of(other), self.part(self.finished, low, high))
        low, high = bounds[theirs], bounds[theirs + distance]
        if low < high:
            await self.finished_of(self._rank_of(other), low, high)
