"""Static placement: the destination of an object that comes again and again is used again.

A program that sends an array of the same size from the same peer with each step, as training does, needs no new memory
for it: the destination of the last one, once nobody looks at it any more, takes the next. Nothing is allocated, looked
up or registered then, and a transfer is one frame and one list of READs. (Xue et al., "Fast Distributed Deep Learning
over RDMA", EuroSys 2019, section 3.2, place tensors statically for the same reason.)
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from zcactor.errors import OutOfMemory

if TYPE_CHECKING:
    from zcactor.objectstore.heap import Hold
    from zcactor.objectstore.store import Block, Store

__all__ = ["Placements"]

_Key = tuple[bytes, int]


class Placements:
    """The destinations of one process. On the loop's thread, but destinations come back on any.

    Args:
        store: where they lie.
        limit: bytes of destinations that are kept while nobody uses them.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self.reused = 0
        """How often a destination was used again."""
        self._store = store
        self._limit = limit
        self._seen: OrderedDict[_Key, list[Hold]] = OrderedDict()  # idle ones by where they come from; the latest last
        self._idle_nbytes = 0
        self._living: dict[int, ref[Any]] = {}
        self._back: list[tuple[_Key, Hold]] = []  # given back since the last call

    def take(self, source: bytes, nbytes: int) -> Block:
        """A block of `nbytes` for an object of the process `source`.

        From the second object of a size on, its memory is kept when the block is lost.

        Raises:
            OutOfMemory: the store is full, though everything idle has been given up.
            NotInitialized: the store is closed.
        """
        self._collect()
        key = source, nbytes
        idle = self._seen.get(key)
        if idle is None:
            self._seen[key] = []
            while len(self._seen) > 1024:
                self._forget(next(iter(self._seen)))
            return self._allocate(nbytes)
        self._seen.move_to_end(key)
        if idle:
            hold = idle.pop()
            self._idle_nbytes -= nbytes
            self.reused += 1
            block = self._store.block_over(hold, nbytes)
        else:
            block = self._allocate(nbytes)
            hold = block.hold
        # Called while the block is being lost, on any thread: `_collect` does the rest.
        number = id(hold)
        self._living[number] = ref(block, partial(self._given_back, key, hold, number))
        return block

    @property
    def idle_nbytes(self) -> int:
        """Bytes of destinations that wait for the next object."""
        self._collect()
        return self._idle_nbytes

    def _given_back(self, key: _Key, hold: Hold, number: int, _: object) -> None:
        self._living.pop(number, None)
        self._back.append((key, hold))

    def _collect(self) -> None:
        while self._back:
            key, hold = self._back.pop()
            idle = self._seen.get(key)
            if idle is not None and key[1] <= self._limit:
                idle.append(hold)
                self._idle_nbytes += key[1]
            del hold
        while self._idle_nbytes > self._limit:
            self._forget(next(key for key, idle in self._seen.items() if idle))

    def _forget(self, key: _Key) -> None:
        self._idle_nbytes -= key[1] * len(self._seen.pop(key))

    def _allocate(self, nbytes: int) -> Block:
        try:
            return self._store.allocate(nbytes)
        except OutOfMemory:
            if not self._idle_nbytes:
                raise
        self.clear()
        return self._store.allocate(nbytes)

    def forget(self, source: bytes) -> None:
        """The process `source` is gone: nothing comes from it any more."""
        self._collect()
        for key in [key for key in self._seen if key[0] == source]:
            self._forget(key)

    def clear(self) -> None:
        """Keep nothing."""
        self._back.clear()
        self._seen.clear()
        self._idle_nbytes = 0
