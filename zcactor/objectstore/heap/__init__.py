"""The heap of an arena, in native code: the free bytes, the holders of the others, and NumPy's allocations in it.

It is native because NumPy calls it for every array, from any thread and without the interpreter lock. It allocates by
best fit with coalescing, by size classes and balanced trees: O(log n), under a lock of its own under which no system
call is made. A block is held by the array that NumPy allocated it for, by a `Hold` (`zcactor.objectstore.store.Block`
has one), or by both; its bytes are free when the last holder is gone. ``Heap(-1, 0)`` is the bare `Allocator`, without
memory; ``Heap(ANONYMOUS, nbytes)`` has memory of this process alone, without a file that peers could map.

The source is in this folder. ``heap.h`` lists the files and their parts, and knows no Python; ``objects.h`` begins the
Python half.
"""

from __future__ import annotations

from zcactor.objectstore.heap._heap import Heap, Hold, allocate_elsewhere, child, reap, use_handler

__all__ = ["ANONYMOUS", "Heap", "Hold", "allocate_elsewhere", "child", "reap", "use_handler"]

ANONYMOUS = -2
"""Stands in place of a descriptor for memory without a file."""
