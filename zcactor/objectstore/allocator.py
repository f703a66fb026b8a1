"""The allocator, which knows the free bytes of an arena. It hands out offsets and touches no memory.

The allocator receives the arena in *extents* (`Allocator.grow`). Adjacent extents act as one.

The implementation in use is native: `zcactor.objectstore.heap`.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Allocator"]


class Allocator(Protocol):
    """The protocol of an allocator: hand out offsets of an arena."""

    @property
    def capacity(self) -> int:
        """Bytes of all extents."""

    @property
    def used(self) -> int:
        """Bytes allocated now, rounding to the alignment included."""

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""

    def allocate(self, nbytes: int, alignment: int = 64) -> int:
        """Take `nbytes`, rounded up to `alignment`, and return their offset, a multiple of `alignment`.

        Args:
            nbytes: bytes, at least 1.
            alignment: bytes, a power of two.

        Raises:
            OutOfMemory: no free block can hold them.
            ValueError: `nbytes` is not positive, or `alignment` is not a power of two.
        """

    def free(self, offset: int) -> None:
        """Give back the bytes at an offset that `allocate` returned.

        Raises:
            ValueError: nothing is allocated at `offset`.
        """

    def grow(self, offset: int, nbytes: int) -> None:
        """Add the extent of `nbytes` at `offset`.

        Raises:
            ValueError: the extent is empty, starts below zero, or overlaps an earlier one.
        """
