"""The allocator as a model: best fit in plain Python, which the native heap must agree with offset by offset."""

from __future__ import annotations

from bisect import bisect_left, insort

from zcactor.errors import OutOfMemory

__all__ = ["BestFitAllocator"]


class BestFitAllocator:
    """Best fit with immediate coalescing: the smallest free block that fits, the lowest one among equals.

    Free blocks are found by size in a sorted list and by their two ends in dictionaries (Knuth's boundary tags, The Art
    of Computer Programming 1, 2.5, kept beside the memory instead of in it), so that no operation walks the free
    blocks: finding costs O(log n), and an alignment larger than the blocks' own looks further only among the blocks
    of ``[nbytes, nbytes + alignment)`` bytes.

    Args:
        capacity: bytes of a first extent at offset 0; 0 for none.

    Raises:
        ValueError: `capacity` is negative.
    """

    __slots__ = ("_by_size", "_capacity", "_ends", "_extents", "_sizes", "_used", "_used_sizes")

    def __init__(self, capacity: int = 0) -> None:
        self._capacity = 0
        self._used = 0
        self._extents: list[tuple[int, int]] = []  # (start, stop), sorted, as they were added
        self._by_size: list[tuple[int, int]] = []  # (size, start) of each free block, sorted
        self._sizes: dict[int, int] = {}  # start of each free block -> its size
        self._ends: dict[int, int] = {}  # stop of each free block -> its start
        self._used_sizes: dict[int, int] = {}  # start of each allocated block -> its size
        if capacity:
            self.grow(0, capacity)

    @property
    def capacity(self) -> int:
        """Bytes of all extents."""
        return self._capacity

    @property
    def used(self) -> int:
        """Bytes allocated now, rounding to the alignment included."""
        return self._used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def tail_free(self) -> int:
        """Bytes of the free block at the end of the highest extent, which an extent added there would join."""
        if not self._extents:
            return 0
        stop = self._extents[-1][1]
        return stop - self._ends.get(stop, stop)

    def __len__(self) -> int:
        """The number of allocated blocks."""
        return len(self._used_sizes)

    def allocate(self, nbytes: int, alignment: int = 64) -> int:
        """See `Allocator.allocate`."""
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes: a block has at least 1")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        size = (nbytes + alignment - 1) & -alignment
        by_size = self._by_size
        for index in range(bisect_left(by_size, (size, 0)), len(by_size)):
            free_size, start = by_size[index]
            offset = (start + alignment - 1) & -alignment
            before = offset - start
            after = free_size - before - size
            if after >= 0:
                break
        else:
            raise OutOfMemory(nbytes, self._used, self._capacity, self.largest_free)
        del by_size[index], self._sizes[start], self._ends[start + free_size]
        if before:
            self._add_free(start, before)
        if after:
            self._add_free(offset + size, after)
        self._used_sizes[offset] = size
        self._used += size
        return offset

    def free(self, offset: int) -> None:
        """See `Allocator.free`."""
        size = self._used_sizes.pop(offset, None)
        if size is None:
            raise ValueError(f"nothing is allocated at offset {offset}: it was freed before, or never handed out")
        self._used -= size
        self._coalesce(offset, size)

    def grow(self, offset: int, nbytes: int) -> None:
        """See `Allocator.grow`."""
        stop = offset + nbytes
        if offset < 0 or nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes at offset {offset} is not a range of an arena")
        extents = self._extents
        index = bisect_left(extents, (offset, 0))
        if (index < len(extents) and extents[index][0] < stop) or (index and extents[index - 1][1] > offset):
            raise ValueError(f"the extent [{offset}, {stop}) overlaps one that was added before")
        extents.insert(index, (offset, stop))
        self._capacity += nbytes
        self._coalesce(offset, nbytes)

    def _coalesce(self, start: int, size: int) -> None:
        """Make [start, start + size) free, as one block with the free blocks that touch it."""
        left = self._ends.pop(start, None)
        if left is not None:
            left_size = self._sizes.pop(left)
            self._remove_by_size(left_size, left)
            start, size = left, left_size + size
        right_size = self._sizes.pop(start + size, None)
        if right_size is not None:
            del self._ends[start + size + right_size]
            self._remove_by_size(right_size, start + size)
            size += right_size
        self._add_free(start, size)

    def _add_free(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._ends[start + size] = start
        insort(self._by_size, (size, start))

    def _remove_by_size(self, size: int, start: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
