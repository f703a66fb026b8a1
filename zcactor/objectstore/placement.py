"""Static placement: objects that arrive repeatedly, from one source and in one size, reuse their destination.

A program that receives an array of the same size from the same peer with each step, as training does, needs no new
memory for it: once nobody uses the destination of the last array any more, it takes the next. Then nothing is
allocated, looked up or registered, and a transfer is one frame and one list of READs. (Xue et al., "Fast Distributed
Deep Learning over RDMA", EuroSys 2019, section 3.2, place tensors statically for the same reason.)
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, deque
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from zcactor.objectstore.store import footprint

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.objectstore.heap import Hold
    from zcactor.objectstore.store import Block, Store

__all__ = ["Placements"]

_Key = tuple[bytes, int]


class Placements:
    """The destinations of one process. They are taken on the loop's thread, but returned and given up on any thread.

    The thread with the lock sorts the returned destinations. The garbage collector returns destinations, too, perhaps
    in a thread that holds the lock. So returning a destination does not wait for the lock, and a thread that releases
    the lock looks again.

    Args:
        store: the store of the destinations. A full store gives up idle destinations first.
        limit: bytes of idle destinations that are kept.
    """

    def __init__(self, store: Store, limit: int) -> None:
        self.reused = 0
        """Number of times that a destination was reused."""
        self._store = store
        self._limit = limit
        self._lock = threading.Lock()
        self._owner = 0  # id of the thread that holds the lock; 0: none
        self._seen: OrderedDict[_Key, list[Hold]] = OrderedDict()  # idle ones by source and size, the latest last
        self._idle_nbytes = 0
        self._living: dict[int, ref[Any]] = {}
        self._back: deque[tuple[_Key, Hold]] = deque()  # returned, and not sorted yet
        store.when_full(self.give_up)

    def take(self, source: bytes, nbytes: int, *, commit: bool = True) -> Block:
        """Take a block of `nbytes` for an object of the process `source`.

        From the second object of a size on, the memory is kept when the block is dropped.

        Args:
            source: id of the process.
            nbytes: bytes of the object.
            commit: see `Store.allocate`.

        Raises:
            OutOfMemory: the store is full, although every idle destination has been given up.
            NotInitialized: the store is closed.
        """
        key = source, nbytes
        with self:
            idle = self._seen.get(key)
            hold = None
            if idle is None:
                self._seen[key] = []
                while len(self._seen) > 1024:
                    self._forget(next(iter(self._seen)))
            else:
                self._seen.move_to_end(key)
                while idle and hold is None:
                    hold = idle.pop()
                    self._idle_nbytes -= footprint(nbytes)
                    if self._store.heap.is_private(hold.offset):  # a forked child has the array that was there
                        hold = None
        if idle is None:
            return self._store.allocate_apart(nbytes, commit=commit)
        if hold is None:
            block = self._store.allocate_apart(nbytes, commit=commit)
            hold = block.hold
        else:
            self.reused += 1
            block = self._store.block_over(hold, nbytes)
            if commit:  # a pull that failed may have left a part without memory
                self._store.commit(hold.offset, 0, nbytes)
        # Called while the block is being finalized, on any thread.
        number = id(hold)
        self._living[number] = ref(block, partial(self._given_back, key, hold, number))
        return block

    @property
    def idle_nbytes(self) -> int:
        """Bytes of destinations that wait for their next object: `limit` at most."""
        return self._idle_nbytes

    def _given_back(
        self, key: _Key, hold: Hold, number: int, _: object, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if is_finalizing():  # globals of modules are gone, and so is the store
            return
        self._living.pop(number, None)
        self._back.append((key, hold))
        del hold
        self._sort_back()

    def __enter__(self) -> None:
        """Hold the lock, with every returned destination sorted. Destinations returned meanwhile are sorted
        afterwards."""
        self._lock.acquire()
        self._owner = threading.get_ident()
        try:
            self._sort()
        except BaseException:
            self._let_go()
            raise

    def __exit__(self, *_: object) -> None:
        self._let_go()
        self._sort_back()

    def _let_go(self) -> None:
        self._owner = 0
        self._lock.release()

    def _sort_back(self) -> None:
        while self._back and self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            try:
                self._sort()
            finally:
                self._let_go()

    def _sort(self) -> None:
        while self._back:
            key, hold = self._back.popleft()
            idle = self._seen.get(key)
            if idle is not None and footprint(key[1]) <= self._limit:
                idle.append(hold)
                self._idle_nbytes += footprint(key[1])
            del hold
            while self._idle_nbytes > self._limit:
                oldest = next(key for key, idle in self._seen.items() if idle)
                self._seen[oldest].pop()
                self._idle_nbytes -= footprint(oldest[1])

    def _forget(self, key: _Key) -> None:
        self._idle_nbytes -= footprint(key[1]) * len(self._seen.pop(key))

    def give_up(self) -> bool:
        """Give up every idle destination, because the store is full. Any thread may call this. Returns whether there
        was one."""
        if self._owner == threading.get_ident():  # inside the garbage collector: waiting for the lock would deadlock
            return False
        with self:
            found = self._idle_nbytes > 0
            self._clear()
        return found

    def forget(self, source: bytes) -> None:
        """Forget the process `source`, which has ended."""
        with self:
            for key in [key for key in self._seen if key[0] == source]:
                self._forget(key)

    def clear(self) -> None:
        """Forget every destination, also those in use now when they are returned."""
        with self:
            self._clear()

    def _clear(self) -> None:
        self._seen.clear()
        self._idle_nbytes = 0
