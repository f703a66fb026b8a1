"""The heap under NumPy's own arrays: its figures, its life, memory that it keeps or gives back, holders of blocks."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import resource
import threading
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.objectstore.heap_arrays import (
    EVERYTHING,
    LEAST,
    MIB,
    PROCESS,
    address,
    block_at,
    dirty,
    figures,
    lies_in,
    rounded,
    taken,
    using,
)
from zcactor.errors import OutOfMemory
from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.arena import GRANULE_NBYTES
from zcactor.objectstore.heap import ANONYMOUS, Heap, Hold
from zcactor.objectstore.store import Store

# ---------------------------------------------------------------- the figures


@pytest.mark.parametrize(
    ("nbytes", "alignment"), [(1, 1 << 62), (1, 128 * MIB), (64 * MIB + 1, 64), ((1 << 63) - 1, 1 << 62)]
)
def test_what_the_whole_arena_could_not_hold_takes_none_of_it(nbytes: int, alignment: int) -> None:
    store = Store(64 * MIB, PROCESS)
    with pytest.raises(OutOfMemory):
        store.heap.take(nbytes, alignment)
    assert store.heap.capacity == 0
    holds = [store.heap.take(48 * MIB, 16 * MIB)]
    with pytest.raises(OutOfMemory):
        store.heap.take(1, 32 * MIB)
    holds.append(store.heap.take(16 * MIB, 16 * MIB))
    assert (store.heap.capacity, store.heap.used) == (64 * MIB, 64 * MIB)


def test_the_figures_tell_numpys_bytes_from_the_stores(store: Store) -> None:
    ours = store.empty(1000, "u1")
    with using(store.heap):
        theirs = np.zeros(3 * MIB + 1, "u1")
    assert figures(store) == (1024 + rounded(3 * MIB + 1), rounded(3 * MIB + 1), 2)
    del ours
    assert figures(store) == (rounded(3 * MIB + 1), rounded(3 * MIB + 1), 1)
    del theirs
    assert figures(store) == (0, 0, 0)


def test_arrays_are_freed_by_other_threads(store: Store) -> None:
    with using(store.heap):
        held = [np.full(LEAST + index, index, "u1") for index in range(40)]
    halves = [held[::2], held[1::2]]
    held.clear()
    threads = [threading.Thread(target=half.clear) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert figures(store) == (0, 0, 0)
    assert store.stats().largest_free == 64 * MIB


# ---------------------------------------------------------------- life


@pytest.mark.slow
def test_arrays_outlive_the_store() -> None:
    store = Store(16 * MIB, PROCESS)
    with using(store.heap):
        array = np.arange(LEAST)
        kept = array[1000:2000]
        where = (store.arena.address, store.arena.address + store.capacity)
        store.close()
        store.close()
        later = np.ones(LEAST, "u1")
        assert not lies_in(store, later) and later.all()
        assert figures(store) == (8 * LEAST, 8 * LEAST, 1)
        assert store.block_at(*byte_bounds(array)) is None, "a closed store shares nothing any more"
        fd = store.arena.fd
        file = os.fstat(fd).st_ino
    del store
    gc.collect()
    assert array.sum() == LEAST * (LEAST - 1) // 2
    array.resize(2 * LEAST, refcheck=False)
    assert not where[0] <= address(array) < where[1]
    assert array[:LEAST].tolist() == list(range(LEAST)) and not array[LEAST:].any()
    del array, kept
    with contextlib.suppress(OSError):  # the process that runs the tests may have opened another file meanwhile
        assert os.fstat(fd).st_ino != file


def test_a_closed_store_gives_memory_back_with_each_array() -> None:
    store = Store(64 * MIB, PROCESS)
    with using(store.heap):
        first, second = np.ones(8 * MIB, "u1"), np.ones(8 * MIB, "u1")
        dirty(8 * MIB)
        store.close()
        assert taken(store.arena) == 16 * MIB
        del first
        assert taken(store.arena) == 8 * MIB
        assert second.all()
        del second
        assert store.arena.fd == -1


@pytest.mark.slow
def test_the_heap_ends_with_its_last_holder() -> None:
    def mapped(low: int) -> bool:
        return any(line.startswith(f"{low:x}-") for line in Path("/proc/self/maps").read_text().splitlines())

    store = Store(16 * MIB, PROCESS)
    low = store.arena.address
    with using(store.heap):
        array = np.ones(LEAST, "u1")
    store.close()
    del store
    gc.collect()
    assert mapped(low)
    del array
    assert not mapped(low)


class Asked:
    """A callback of a heap, with a reference back to the heap, or to a block of it."""

    def __init__(self) -> None:
        self.back: object = None

    def __call__(self, *_: int) -> Any:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "fallocate"])
@pytest.mark.parametrize("through", ["heap", "hold"])
def test_a_heap_in_a_cycle_is_collected(way: str, through: str) -> None:
    asked = Asked()
    heap = Heap(ANONYMOUS, 16 * MIB, 16 * MIB, asked if way == "fallocate" else None)
    if way == "full":
        heap.when_full(asked)
    asked.back = heap if through == "heap" else heap.take(1000)
    gone: list[weakref.ref[Any]] = [weakref.ref(heap), weakref.ref(asked)]
    del heap, asked
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_an_array_outlives_what_its_heap_called() -> None:
    called = []

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        called.append(nbytes)

    heap = Heap(ANONYMOUS, 64 * MIB, 64 * MIB, fallocate)
    asked = Asked()
    heap.when_full(asked)
    with using(heap):
        array = np.ones(2 * MIB, "u1")
        small = np.ones(LEAST, "u1")
    gone: list[weakref.ref[Any]] = [weakref.ref(fallocate), weakref.ref(asked)]
    del fallocate, asked, heap
    assert [each() for each in gone] == [None, None]
    commits = len(called)
    small.resize(8 * MIB, refcheck=False)
    array.resize(16 * MIB, refcheck=False)
    assert array[: 2 * MIB].all() and not array[2 * MIB :].any() and small[:LEAST].all()
    assert commits == len(called) > 0


def another() -> ModuleType:
    """Load the extension a second time, beside the imported one."""
    spec = importlib.util.find_spec("zcactor.objectstore.heap._heap")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_modules_have_types_of_their_own_and_share_the_heaps_of_a_fork() -> None:
    module = another()
    assert module.Heap is not Heap and module.Hold is not Hold
    heaps = [Heap(ANONYMOUS, MIB), module.Heap(ANONYMOUS, MIB)]
    holds = [heap.take(1000) for heap in heaps]
    assert [type(hold) for hold in holds] == [Hold, module.Hold]
    pid = os.fork()
    if pid == 0:
        os._exit(sum(heap.closed for heap in heaps))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    for heap in heaps:
        with pytest.raises(OutOfMemory):
            heap.take(2 * MIB)


@pytest.mark.slow
def test_a_module_lives_as_long_as_its_heaps_and_then_is_collected() -> None:
    module = another()
    heap = module.Heap(ANONYMOUS, MIB)
    gone = [weakref.ref(module), weakref.ref(module.Heap), weakref.ref(module.Hold)]
    del module
    gc.collect()
    hold = heap.take(1000)
    assert (hold.nbytes, len(heap)) == (1000, 1)
    del heap, hold
    gc.collect()
    assert [each() for each in gone] == [None, None, None]


# ---------------------------------------------------------------- memory back to the system, and kept


def test_free_memory_is_given_back_and_serves_again(store: Store) -> None:
    with using(store.heap):
        first, middle, last = (np.full(8 * MIB, value, "u1") for value in (1, 2, 3))
        assert taken(store.arena) == store.stats().committed == 24 * MIB
        del first, last
        assert taken(store.arena) == 24 * MIB, "it stays warm"
        assert store.heap.trim(24 * MIB, EVERYTHING) == 0
        given = store.heap.trim(0, 4 * MIB)
        assert 4 * MIB <= given <= 8 * MIB, "about as much, in one of the two holes"
        assert taken(store.arena) == store.stats().committed == 24 * MIB - given
        assert store.heap.trim(0, EVERYTHING) == 16 * MIB - given
        assert taken(store.arena) == store.stats().committed == 8 * MIB
        assert store.heap.trim(0, EVERYTHING) == 0
        zeros, ones = np.zeros(8 * MIB, "u1"), np.ones(8 * MIB, "u1")
        assert not zeros.any() and ones.all() and (middle == 2).all()
        assert all(lies_in(store, array) for array in (zeros, ones))
        assert figures(store) == (24 * MIB, 24 * MIB, 3)


def test_what_is_handed_out_last_is_given_back_too() -> None:
    """An array may be larger than an extent: memory comes in granules, none of which goes beyond allocated memory."""
    with contextlib.closing(Store(64 * MIB, PROCESS, extent_nbytes=16 * MIB)) as store:
        with using(store.heap):
            dirty(33 * MIB)
        assert store.stats().committed == taken(store.arena) > 0
        store.heap.trim(0, EVERYTHING)
        assert (store.stats().committed, taken(store.arena)) == (0, 0)


@pytest.mark.parametrize("at_most", [EVERYTHING, 4 * MIB])
def test_as_much_is_kept_as_was_asked_for(store: Store, at_most: int) -> None:
    with using(store.heap):
        dirty(30 * MIB)
        before = store.stats().committed
        given = store.heap.trim(25 * MIB, at_most)
        assert 25 * MIB - GRANULE_NBYTES < store.stats().committed <= max(25 * MIB, before - 4 * MIB)
        assert 0 < given <= at_most


def test_trim_refuses_negative_figures(store: Store) -> None:
    for wrong in ((-1, 1), (1, -1)):
        with pytest.raises(ValueError, match="negative"):
            store.heap.trim(*wrong)


def test_a_loop_that_allocates_takes_no_page_fault(store: Store) -> None:
    with using(store.heap):
        first, second = np.ones(MIB // 4), np.ones(MIB // 4)
        for _ in range(10):
            total = first + second
        committed = store.stats().committed
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(300):
            total = first + second
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert total[0] == 2
    assert faults < 512, "512 pages each time, unless the memory stays; a sanitizer's allocator takes some of its own"
    assert store.stats().committed == committed


# ---------------------------------------------------------------- blocks of arrays


def test_a_block_has_one_id_for_the_life_of_the_memory(store: Store) -> None:
    with using(store.heap):
        array = np.arange(LEAST, dtype="u1")
        block = block_at(store, array)
        assert block_at(store, array[100:200]) is block
        assert (block.address, block.nbytes, block.sealed) == (address(array), LEAST, False)
        number = block.id
        del block
        assert figures(store) == (LEAST, LEAST, 1)
        assert block_at(store, array).id == number
        where = address(array)
        del array
        assert figures(store) == (0, 0, 0)
        other = np.arange(LEAST, dtype="u1")
        assert address(other) == where
        assert block_at(store, other).id != number, "other memory, though it lies at the same place"


def test_a_block_keeps_the_bytes_after_the_array_and_the_other_way_round(store: Store) -> None:
    with using(store.heap):
        array = np.arange(LEAST, dtype="u2")
        expected = array.tobytes()
        block = block_at(store, array)
        del array
        assert figures(store) == (2 * LEAST, 0, 1)
        again = np.full(LEAST, 7, "u2")
        assert np.asarray(block).tobytes() == expected
        assert store.block_at(block.address, block.address + 1) is block
        del block
        assert figures(store) == (2 * LEAST, 2 * LEAST, 1)
        hold = store.heap.adopt(address(again) - store.arena.address)
        assert hold is not None and hold.nbytes == 2 * LEAST
        del hold
        assert (again == 7).all()
        del again
        assert figures(store) == (0, 0, 0)


def test_only_numpys_memory_is_adopted_and_only_where_it_begins(store: Store) -> None:
    ours = store.empty(LEAST, "u1")
    with using(store.heap):
        theirs = np.ones(LEAST, "u1")
    offset = address(theirs) - store.arena.address
    assert store.heap.adopt(address(ours) - store.arena.address) is None
    assert store.heap.adopt(offset + 64) is None
    assert store.heap.adopt(store.capacity) is None
    hold = store.heap.adopt(offset)
    assert hold is not None
    del theirs
    assert store.heap.adopt(offset) is None, "the array is gone; what is left belongs to the holders there are"
    with pytest.raises(ValueError, match="nothing is allocated"):
        store.heap.free(offset + 64)


def test_a_shrunken_arrays_block_has_its_new_size(store: Store) -> None:
    with using(store.heap):
        array = np.arange(4 * LEAST, dtype="u1")
        number = block_at(store, array).id
        array.resize(2 * LEAST, refcheck=False)
        block = block_at(store, array)
    assert (block.id, block.nbytes) == (number, 2 * LEAST)
    assert store.block_at(block.address, block.address + 2 * LEAST + 1) is None
