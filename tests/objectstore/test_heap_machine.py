"""Arrays and blocks of a heap in any order: made, copied, viewed, written, adopted, resized, freed, trimmed, pinned."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Pool
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, multiple, rule

from tests.objectstore.heap_arrays import (
    EVERYTHING,
    LEAST,
    MIB,
    PROCESS,
    Array,
    address,
    figures,
    lies_in,
    rounded,
    taken,
    using,
)
from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.arena import GRANULE_NBYTES
from zcactor.objectstore.store import Block, Store


class Memory:
    """A piece of memory in the model: the bytes that it should hold, and its holders."""

    def __init__(self, content: bytearray, size: int, inside: bool) -> None:
        self.content = content
        self.size = size
        """Bytes that it takes up in the store."""
        self.inside = inside
        self.owner = True
        """Whether an array of NumPy's own holds it."""


class Entry:
    """An array or a block, and the part of a memory that it looks at."""

    def __init__(self, memory: Memory, value: Any, low: int, high: int) -> None:
        self.memory = memory
        self.value = value
        self.low = low
        self.high = high


SIZES = st.one_of(
    st.integers(1, 2 * LEAST), st.sampled_from([LEAST - 1, LEAST, MIB - 1, MIB, MIB + 1]), st.integers(MIB, 5 * MIB)
)


class Arrays(RuleBasedStateMachine):
    """Arrays of a small store, which is full now and then, beside bytearrays of Python."""

    entries = Pool("entries")

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(12 * MIB, PROCESS, extent_nbytes=2 * MIB)
        self.alive: list[Entry] = []
        self.number = 0
        self.pinned: set[int] = set()
        """The pinned granules."""

    def _within(self, array: Array) -> bool:
        return lies_in(self.store, array) if array.size else False

    def _pattern(self, nbytes: int) -> bytes:
        self.number = self.number % 250 + 1
        return bytes([self.number]) * nbytes

    def _add(self, array: Array, content: bytearray) -> Entry:
        inside = self._within(array)
        assert not inside or len(content) >= LEAST
        entry = Entry(Memory(content, rounded(len(content)), inside), array, 0, len(content))
        self.alive.append(entry)
        return entry

    @rule(target=entries, nbytes=SIZES, zeroed=st.booleans())
    def create(self, nbytes: int, zeroed: bool) -> Any:
        with using(self.store.heap):
            if zeroed:
                return self._add(np.zeros(nbytes, "u1"), bytearray(nbytes))
            array = np.empty(nbytes, "u1")
        content = self._pattern(nbytes)
        array[:] = content[0]
        return self._add(array, bytearray(content))

    @rule(target=entries, entry=entries)
    def copy(self, entry: Entry) -> Any:
        with using(self.store.heap):
            array = np.asarray(entry.value).copy()
        return self._add(array, entry.memory.content[entry.low : entry.high])

    @rule(target=entries, entry=entries, cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def view(self, entry: Entry, cuts: tuple[float, float]) -> Any:
        length = entry.high - entry.low
        low, high = sorted(int(cut * length) for cut in cuts)
        made = Entry(entry.memory, np.asarray(entry.value)[low:high], entry.low + low, entry.low + high)
        self.alive.append(made)
        return made

    @rule(entry=entries)
    def write(self, entry: Entry) -> None:
        content = self._pattern(entry.high - entry.low)
        np.asarray(entry.value)[:] = content[0] if content else 0
        entry.memory.content[entry.low : entry.high] = content

    @rule(target=entries, entry=entries)
    def adopt(self, entry: Entry) -> Any:
        array = np.asarray(entry.value)
        block = self.store.block_at(*byte_bounds(array)) if array.size else None
        if block is None:
            assert not array.size or not entry.memory.inside
            return multiple()
        assert block.nbytes == len(entry.memory.content)
        made = Entry(entry.memory, block, 0, block.nbytes)
        self.alive.append(made)
        return made

    @rule(entry=consumes(entries))
    def free(self, entry: Entry) -> None:
        self.alive.remove(entry)
        memory = entry.memory
        entry.value = None
        if memory.owner and not any(each.memory is memory and self._keeps(each) for each in self.alive):
            memory.owner = False

    def _keeps(self, entry: Entry) -> bool:
        """Whether this entry keeps the array that owns the memory: views do, and blocks do not."""
        root: Any = entry.value
        while isinstance(root, np.ndarray) and root.base is not None:
            root = root.base
        return isinstance(root, np.ndarray)

    @rule(entry=entries, nbytes=SIZES)
    def resize(self, entry: Entry, nbytes: int) -> None:
        array, memory = entry.value, entry.memory
        mine = [each for each in self.alive if each.memory is memory]
        if (
            type(array) is Block
            or array.base is not None
            or any(self._keeps(each) for each in mine if each is not entry)
        ):
            return  # views would dangle, under any allocator
        if nbytes == len(memory.content):
            return  # NumPy then calls no handler
        shared = len(mine) > 1
        where = address(array)
        with using(self.store.heap):
            array.resize(nbytes, refcheck=False)
        content = memory.content[:nbytes] + bytes(max(nbytes - len(memory.content), 0))
        in_place = address(array) == where
        inside = self._within(array)
        if shared and memory.inside:
            assert not in_place
        if not memory.inside:
            assert not inside
        if memory.inside and nbytes <= len(memory.content) and not shared:
            assert in_place
        memory.owner = False
        size = -(-nbytes // 64) * 64 if in_place else rounded(nbytes)
        entry.memory = Memory(content, size, inside)
        entry.low, entry.high = 0, nbytes

    @rule(keep=st.sampled_from([0, 3 * MIB]), at_most=st.sampled_from([GRANULE_NBYTES, EVERYTHING]))
    def trim(self, keep: int, at_most: int) -> None:
        before = self.store.stats().committed
        given = self.store.heap.trim(keep, at_most)
        assert self.store.stats().committed == before - given

    @rule(low=st.integers(0, 12 * MIB), nbytes=st.integers(0, 3 * MIB))
    def pin(self, low: int, nbytes: int) -> None:
        nbytes = min(nbytes, 12 * MIB - low)
        self.store.arena.pin(low, nbytes)
        self.pinned.update(range(low // GRANULE_NBYTES, -(-(low + nbytes) // GRANULE_NBYTES) if nbytes else 0))

    @rule()
    def unpin(self) -> None:
        self.store.heap.unpin_all()
        self.pinned.clear()

    @invariant()
    def what_is_pinned_has_memory(self) -> None:
        fd = self.store.arena.fd
        assert self.store.heap.pinned == len(self.pinned) * GRANULE_NBYTES
        for granule in self.pinned:
            assert os.lseek(fd, granule * GRANULE_NBYTES, os.SEEK_HOLE) >= (granule + 1) * GRANULE_NBYTES

    @invariant()
    def contents_are_intact(self) -> None:
        for entry in self.alive:
            assert np.asarray(entry.value).tobytes() == entry.memory.content[entry.low : entry.high]

    @invariant()
    def the_figures_are_exact(self) -> None:
        memories = {id(entry.memory): entry.memory for entry in self.alive if entry.memory.inside}.values()
        assert figures(self.store) == (
            sum(memory.size for memory in memories),
            sum(memory.size for memory in memories if memory.owner),
            len(memories),
        )
        stats = self.store.stats()
        assert stats.committed <= stats.capacity
        assert taken(self.store.arena) == stats.committed

    def teardown(self) -> None:
        for entry in self.alive:
            entry.value = None
        self.alive.clear()
        assert figures(self.store) == (0, 0, 0)
        assert self.store.stats().largest_free == 12 * MIB
        self.store.close()


TestArrays = pytest.mark.slow(Arrays.TestCase)
TestArrays.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
