"""Static placement: the destination of an object that comes again and again is used again.

A program that sends an array of the same size from the same peer with each step, as training does, needs no new memory
for it: the destination of the last one, once nobody looks at it any more, takes the next. Nothing is allocated, looked
up or registered then, and a transfer is one frame and one list of READs. (Xue et al., "Fast Distributed Deep Learning
over RDMA", EuroSys 2019, section 3.2, place tensors statically for the same reason.)
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zcactor.objectstore.heap import Hold
    from zcactor.objectstore.store import Block, Store

__all__ = ["Placements"]

_Key = tuple[bytes, int]


class Placements:
    """The destinations of one process. On the loop's thread, but they come back on any, and are given up on any.

    Whoever has the lock sorts what has come back. Destinations come back from the garbage collector, too, perhaps while
    the very thread has it: so nobody waits for it who gives one back, and whoever had it looks again.

    Args:
        store: where they lie. They are the first that it gives up when it is full.
        limit: bytes of destinations that are kept while nobody uses them.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self.reused = 0
        """How often a destination was used again."""
        self._store = store
        self._limit = limit
        self._lock = threading.Lock()
        self._owner = 0  # the thread that has the lock
        self._seen: OrderedDict[_Key, list[Hold]] = OrderedDict()  # idle ones by where they come from; the latest last
        self._idle_nbytes = 0
        self._living: dict[int, ref[Any]] = {}
        self._back: deque[tuple[_Key, Hold]] = deque()  # given back, and not sorted yet
        store.when_full(self.give_up)

    def take(self, source: bytes, nbytes: int) -> Block:
        """A block of `nbytes` for an object of the process `source`.

        From the second object of a size on, its memory is kept when the block is lost.

        Raises:
            OutOfMemory: the store is full, though everything idle has been given up.
            NotInitialized: the store is closed.
        """
        key = source, nbytes
        with self._sorting():
            idle = self._seen.get(key)
            hold = None
            if idle is None:
                self._seen[key] = []
                while len(self._seen) > 1024:
                    self._forget(next(iter(self._seen)))
            else:
                self._seen.move_to_end(key)
                if idle:
                    hold = idle.pop()
                    self._idle_nbytes -= nbytes
        if idle is None:
            return self._store.allocate(nbytes)
        if hold is None:
            block = self._store.allocate(nbytes)
            hold = block.hold
        else:
            self.reused += 1
            block = self._store.block_over(hold, nbytes)
        # Called while the block is being lost, on any thread.
        number = id(hold)
        self._living[number] = ref(block, partial(self._given_back, key, hold, number))
        return block

    @property
    def idle_nbytes(self) -> int:
        """Bytes of destinations that wait for the next object: `limit` at most."""
        return self._idle_nbytes

    def _given_back(self, key: _Key, hold: Hold, number: int, _: object) -> None:
        self._living.pop(number, None)
        self._back.append((key, hold))
        del hold
        self._sort_back()

    @contextlib.contextmanager
    def _sorting(self) -> Iterator[None]:
        """Has the lock, with everything sorted that has come back; what comes meanwhile is sorted afterwards."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                self._sort()
                yield
            finally:
                self._owner = 0
        self._sort_back()

    def _sort_back(self) -> None:
        while self._back and self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            try:
                self._sort()
            finally:
                self._owner = 0
                self._lock.release()

    def _sort(self) -> None:
        while self._back:
            key, hold = self._back.popleft()
            idle = self._seen.get(key)
            if idle is not None and key[1] <= self._limit:
                idle.append(hold)
                self._idle_nbytes += key[1]
            del hold
            while self._idle_nbytes > self._limit:
                oldest = next(key for key, idle in self._seen.items() if idle)
                self._seen[oldest].pop()
                self._idle_nbytes -= oldest[1]

    def _forget(self, key: _Key) -> None:
        self._idle_nbytes -= key[1] * len(self._seen.pop(key))

    def give_up(self) -> bool:
        """Keep nothing, because the store is full; from any thread. Returns whether there was anything."""
        if self._owner == threading.get_ident():  # inside the garbage collector: there is nothing to wait for
            return False
        with self._sorting():
            found = self._idle_nbytes > 0
            self._clear()
        return found

    def forget(self, source: bytes) -> None:
        """The process `source` is gone: nothing comes from it any more."""
        with self._sorting():
            for key in [key for key in self._seen if key[0] == source]:
                self._forget(key)

    def clear(self) -> None:
        """Keep nothing, and nothing of what is in use now when it comes back."""
        with self._sorting():
            self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self._idle_nbytes = 0
