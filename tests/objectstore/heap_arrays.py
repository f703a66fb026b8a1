"""Arrays that NumPy allocates in a store alone, without a runtime: making them, and finding their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.heap import Heap, use_handler
from zcactor.objectstore.store import Block, Store

Array = NDArray[Any]
MIB = 1 << 20
LEAST = 1 << 16
"""Bytes of the smallest arrays that NumPy allocates in the heap here, as by default."""
PROCESS = bytes(range(16))
"""The id of the store's process."""
EVERYTHING = 1 << 60
"""More bytes than any heap has."""


@contextmanager
def using(heap: Heap, min_nbytes: int = LEAST) -> Iterator[None]:
    """Let NumPy allocate in `heap` inside the block only, so that no other test notices."""
    before = heap.use(min_nbytes)
    try:
        yield
    finally:
        use_handler(before)


def rounded(nbytes: int) -> int:
    """Bytes that an allocation of `nbytes` takes up."""
    unit = 4096 if nbytes >= MIB else 64
    return -(-nbytes // unit) * unit


def address(array: Array) -> int:
    """The address of the first element."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def lies_in(store: Store, array: Array) -> bool:
    """Whether the array's memory is the store's."""
    return store.contains(*byte_bounds(array))


def figures(store: Store) -> tuple[int, int, int]:
    """Used bytes, the part of them that arrays of NumPy's own hold, and the number of blocks."""
    stats = store.stats()
    return stats.used, stats.of_numpy, stats.blocks


def taken(arena: Arena) -> int:
    """Bytes of memory behind the arena, as the kernel counts them."""
    return os.fstat(arena.fd).st_blocks * 512


def block_at(store: Store, array: Array) -> Block:
    """The block around the memory of `array`."""
    block = store.block_at(*byte_bounds(array))
    assert block is not None
    return block


def dirty(nbytes: int) -> None:
    """Write garbage to memory, and free it."""
    garbage = np.empty(nbytes, np.uint8)
    garbage.fill(0xEE)
