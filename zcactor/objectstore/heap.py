"""The heap of an arena, native: which bytes are free, who holds the others, and what NumPy allocates there.

Native because NumPy calls it for every array, from any thread and without the interpreter lock. Best fit with
coalescing, by size classes and balanced trees: O(log n), under a lock of its own that no system call is made under. A
block is held by the array that NumPy allocated it for, by a `Hold` (`zcactor.objectstore.store.Block` has one), or
both; its bytes are free when the last holder is gone. ``Heap(-1, 0)`` is the bare `Allocator`, without memory;
``Heap(ANONYMOUS, nbytes)`` has memory of this process alone, without a file that peers could map.

The source is ``_heap.h``, which knows no Python, and ``_heap.c``.
"""

from __future__ import annotations

from zcactor.objectstore._heap import Heap, Hold, allocate_elsewhere, use_handler

__all__ = ["ANONYMOUS", "Heap", "Hold", "allocate_elsewhere", "use_handler"]

ANONYMOUS = -2
"""Instead of a descriptor, for memory without a file."""
