"""Arrays that NumPy allocates in a store alone, without a runtime: making them, and where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zcactor.objectstore.arena import Arena
from zcactor.objectstore.heap import Heap, use_handler
from zcactor.objectstore.store import Block, Store

Array = NDArray[Any]
MIB = 1 << 20
LEAST = 1 << 16
"""Bytes from which on NumPy allocates in the heap here, as by default."""
PROCESS = bytes(range(16))
"""The id of the process whose store it is."""
EVERYTHING = 1 << 60
"""More bytes than any heap has."""


@contextmanager
def using(heap: Heap, min_nbytes: int = LEAST) -> Iterator[None]:
    """NumPy allocates in `heap` inside the block, and as before after it: no other test notices."""
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
    """Where its first element lies."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def lies_in(store: Store, array: Array) -> bool:
    """Whether its memory is the store's."""
    return store.contains(*store.bounds(array))


def figures(store: Store) -> tuple[int, int, int]:
    """Bytes used, those of them that arrays of NumPy's own hold, and blocks."""
    stats = store.stats()
    return stats.used, stats.of_numpy, stats.blocks


def taken(arena: Arena) -> int:
    """Bytes of memory behind the arena, as the kernel counts them."""
    return os.fstat(arena.fd).st_blocks * 512


def block_at(store: Store, array: Array) -> Block:
    """The block around the memory of `array`."""
    block = store.block_at(*store.bounds(array))
    assert block is not None
    return block


def dirty(nbytes: int) -> None:
    """Write garbage to memory that is free again afterwards."""
    garbage = np.empty(nbytes, np.uint8)
    garbage.fill(0xEE)
