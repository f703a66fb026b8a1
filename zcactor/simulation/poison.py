"""Poison in the free bytes of an arena: a reader of bytes that were given back finds them changed."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import OutOfMemory

if TYPE_CHECKING:
    import random

    from zcactor.objectstore.store import Store

__all__ = ["POISON", "Poison"]

POISON: Final = 0xDD
_SIZES: Final = (64, 1024, 20_000, 160_000)
"""Bytes of the blocks that are filled; each time some of these are drawn."""
_BLOCKS: Final = 4
_IDLE: Final = 8
"""Renewals of a store in which nothing was allocated or freed do nothing, except one in so many."""
_fill = ctypes.memset


class Poison:
    """The poison of one store.

    Args:
        store: the store.
        drawn: decides which bytes are filled.
    """

    def __init__(self, store: Store, drawn: random.Random) -> None:
        self._store = store
        self._drawn = drawn
        self._next = 0, 0
        """The state where nothing happens until the next renewal."""
        self._idle = 0

    def renew(self) -> bool:
        """Fill free bytes with a pattern of their own where others were freed since the last time.

        Returns:
            False where the store had too little room.
        """
        now = self._state()
        self._idle = self._idle + 1 if now == self._next else 0
        filled = True
        if self._idle % _IDLE == 0:
            filled = self.fill()
            now = self._state()
        self._next = now[0] + 1, now[1]
        return filled

    def _state(self) -> tuple[int, int]:
        """The number of a block that is taken now, and the bytes in use. Blocks are numbered as they are taken."""
        heap = self._store.heap
        used = heap.used
        try:
            return heap.take(_SIZES[0]).id >> 32, used
        except OutOfMemory:
            return 0, used

    def fill(self) -> bool:
        """Take free bytes, fill them with a pattern of their own, and give them back. Returns as `renew` does."""
        store, draw = self._store, self._drawn.choice
        heap, base = store.heap, store.arena.address
        held: list[Any] = []
        for _ in range(_BLOCKS):
            nbytes = draw(_SIZES)
            try:  # without the store's object and table entry for a block: no code looks for this block
                hold: Any = heap.take(nbytes)
                heap.commit(hold.offset, nbytes)
            except (OutOfMemory, OSError):
                try:
                    hold = store.allocate(nbytes)  # this gives up the memory that is kept for later
                except OutOfMemory:
                    return False
            _fill(base + hold.offset, POISON, nbytes)
            held.append(hold)
        return True
