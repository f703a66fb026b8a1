"""NumPy's own arrays in the store: what the data-memory handler (NEP 49) does, with a store alone and no runtime."""

from __future__ import annotations

import contextvars
import ctypes
import errno
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Pool
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, multiple, rule
from numpy.typing import NDArray

from tests.marshal.dtypes import DTYPES, filled
from tests.marshal.wire import assert_same
from zcactor.objectstore.arena import GRANULE_NBYTES, Arena
from zcactor.objectstore.heap import Heap, allocate_elsewhere, use_handler
from zcactor.objectstore.store import Block, Store

Array = NDArray[Any]
MIB = 1 << 20
LEAST = 1 << 16
"""Bytes from which on NumPy allocates in the heap here, as by default."""
PROCESS = bytes(range(16))
EVERYTHING = 1 << 60


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


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(64 * MIB, PROCESS, extent_nbytes=4 * MIB)
    yield made
    made.close()


# ---------------------------------------------------------------- where arrays lie, and the figures


def test_large_arrays_lie_in_the_store_and_small_ones_do_not(store: Store) -> None:
    with using(store.heap):
        small, just, large = np.ones(LEAST - 1, "u1"), np.ones(LEAST, "u1"), np.ones(300_001, "u1")
    assert [lies_in(store, array) for array in (small, just, large)] == [False, True, True]
    assert all(array.flags.owndata and array.base is None for array in (small, just, large))
    assert figures(store) == (LEAST + 300_032, LEAST + 300_032, 2)
    del just
    assert figures(store) == (300_032, 300_032, 1)
    del large
    assert figures(store) == (0, 0, 0)


def test_the_figures_tell_numpys_bytes_from_the_stores(store: Store) -> None:
    ours = store.empty(1000, "u1")
    with using(store.heap):
        theirs = np.zeros(3 * MIB + 1, "u1")
    assert figures(store) == (1024 + rounded(3 * MIB + 1), rounded(3 * MIB + 1), 2)
    del ours
    assert figures(store) == (rounded(3 * MIB + 1), rounded(3 * MIB + 1), 1)
    del theirs
    assert figures(store) == (0, 0, 0)


def test_nothing_is_allocated_there_after_it_is_switched_off(store: Store) -> None:
    with using(store.heap):
        pass
    array = np.ones(MIB, "u1")
    assert not lies_in(store, array)
    assert figures(store) == (0, 0, 0)


@pytest.mark.parametrize("nbytes", [LEAST, LEAST + 1, MIB - 1, MIB, MIB + 1, 5 * MIB])
def test_alignment(store: Store, nbytes: int) -> None:
    with using(store.heap):
        arrays = [make(nbytes, "u1") for make in (np.empty, np.zeros) for _ in range(3)]
    assert {address(array) % (4096 if nbytes >= MIB else 64) for array in arrays} == {0}


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


def test_the_setting_is_the_contexts(store: Store) -> None:
    found: dict[str, bool] = {}

    def note(name: str) -> None:
        found[name] = lies_in(store, np.ones(LEAST, "u1"))

    with using(store.heap):
        inherited = contextvars.copy_context()
        thread = threading.Thread(target=note, args=("thread",))  # begins with a context of its own, an empty one
        thread.start()
        thread.join()
    inherited.run(note, "copied context")
    note("here")
    assert found == {"thread": False, "copied context": True, "here": False}


def test_what_use_refuses(store: Store) -> None:
    for wrong in (-1, 1 << 80):
        with pytest.raises(OverflowError):
            store.heap.use(wrong)
    with pytest.raises(TypeError):
        store.heap.use("a lot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without memory"):
        Heap(-1, 0).use(1)
    for wrong_handler in (None, 5, object()):
        with pytest.raises(TypeError, match="not a data-memory handler"):
            use_handler(wrong_handler)
    assert not lies_in(store, np.ones(LEAST, "u1"))


# ---------------------------------------------------------------- zeros


@pytest.mark.parametrize("nbytes", [LEAST, MIB + 100, 3 * MIB, 9 * MIB])
def test_zeros_are_zero_on_memory_that_was_used(store: Store, nbytes: int) -> None:
    with using(store.heap):
        dirty(nbytes)
        again = np.empty(nbytes, "u1")
        assert again.max() == 0xEE, "the memory is not the same: the test shows nothing"
        where = address(again)
        del again
        zeros = np.zeros(nbytes, "u1")
    assert address(zeros) == where
    assert not zeros.any()


@pytest.mark.parametrize("first", [GRANULE_NBYTES // 2, GRANULE_NBYTES, GRANULE_NBYTES * 3 // 2])
def test_zeros_are_zero_where_only_a_part_was_used(store: Store, first: int) -> None:
    with using(store.heap):
        dirty(first)
        assert store.stats().committed == -(-first // GRANULE_NBYTES) * GRANULE_NBYTES
        zeros = np.zeros(3 * GRANULE_NBYTES + 5, "u1")
        assert address(zeros) == store.arena.address
    assert not zeros.any()


def test_zeros_are_zero_between_neighbours_that_are_written_to(store: Store) -> None:
    with using(store.heap):
        dirty(8 * MIB)
        arrays = [np.full(700_000, index + 1, "u1") for index in range(8)]
        for index in range(0, 8, 2):
            arrays[index] = np.zeros(0, "u1")
            arrays[index] = np.zeros(700_000, "u1")
    for index, array in enumerate(arrays):
        assert (array == (index + 1 if index % 2 else 0)).all()


def test_zeros_are_zero_after_memory_could_not_be_given_back(store: Store) -> None:
    """A program may lock its memory (mlockall(2), for latency): punching a hole fails with EINVAL then."""
    libc = ctypes.CDLL(None, use_errno=True)
    with using(store.heap):
        dirty(2 * GRANULE_NBYTES)
        where = ctypes.c_void_p(store.arena.address)
        if libc.mlock(where, ctypes.c_size_t(2 * GRANULE_NBYTES)):
            pytest.skip(f"mlock: {os.strerror(ctypes.get_errno())}; see ulimit -l")
        store.heap.trim(0, EVERYTHING)
        zeros = np.zeros(2 * GRANULE_NBYTES, "u1")
        libc.munlock(where, ctypes.c_size_t(2 * GRANULE_NBYTES))
    assert not zeros.any()


# ---------------------------------------------------------------- another size


def test_an_array_grows_in_place_into_free_room(store: Store) -> None:
    with using(store.heap):
        dirty(4 * MIB)
        array = np.arange(LEAST, dtype=np.uint32)
        where, expected = address(array), array.tolist()
        array.resize(3 * LEAST, refcheck=False)
        assert address(array) == where
        assert array[:LEAST].tolist() == expected
        assert not array[LEAST:].any()
        assert figures(store) == (12 * LEAST, 12 * LEAST, 1)
        del array
        assert figures(store) == (0, 0, 0)
        assert store.stats().largest_free == 64 * MIB


def test_an_array_that_grows_into_fresh_memory(store: Store) -> None:
    with using(store.heap):
        array = np.ones(GRANULE_NBYTES - 4096, "u1")
        where = address(array)
        assert store.stats().committed == GRANULE_NBYTES
        array.resize(GRANULE_NBYTES + MIB, refcheck=False)
        assert address(array) == where
        assert store.stats().committed == 2 * GRANULE_NBYTES
        array[-1] = 5
    assert array.sum(dtype="u8") == GRANULE_NBYTES - 4096 + 5


def test_an_array_moves_where_there_is_no_room(store: Store) -> None:
    with using(store.heap):
        dirty(4 * MIB)
        array = np.arange(LEAST, dtype=np.uint16)
        behind = np.full(LEAST, 9, "u1")
        where, expected = address(array), array.tolist()
        assert address(behind) == where + array.nbytes
        array.resize(3 * LEAST, refcheck=False)
        assert address(array) != where
        assert lies_in(store, array)
        assert array[:LEAST].tolist() == expected
        assert not array[LEAST:].any()
        assert (behind == 9).all()
        assert figures(store) == (7 * LEAST, 7 * LEAST, 2)


def test_an_array_shrinks_in_place(store: Store) -> None:
    with using(store.heap):
        array = np.arange(4 * LEAST, dtype=np.uint8)
        where, expected = address(array), array[: LEAST + 5].tolist()
        for nbytes in (LEAST + 5, 100):  # below the limit too: there is nothing to be gained by a copy
            array.resize(nbytes, refcheck=False)
            assert address(array) == where
            assert array.tolist() == expected[:nbytes]
            assert figures(store) == (-(-nbytes // 64) * 64,) * 2 + (1,)
        array.resize(0, refcheck=False)
        assert array.size == 0
        array.resize(7, refcheck=False)
        assert not array[1:].any()
        del array
        assert figures(store) == (0, 0, 0)


def test_small_arrays_that_grow_stay_with_the_handler_below(store: Store) -> None:
    with using(store.heap):
        array = np.arange(100, dtype=np.uint8)
        array.resize(LEAST * 2, refcheck=False)
    assert not lies_in(store, array)
    assert array[:100].tolist() == list(range(100)) and not array[100:].any()


def test_a_shared_array_leaves_its_memory_to_the_other_holders(store: Store) -> None:
    with using(store.heap):
        array = np.arange(LEAST, dtype=np.uint8)
        block = block_at(store, array)
        expected = array.tobytes()
        assert figures(store) == (LEAST, LEAST, 1)
        array.resize(2 * LEAST, refcheck=False)
        assert lies_in(store, array) and not np.shares_memory(array, np.asarray(block))
        assert array[:LEAST].tobytes() == expected and not array[LEAST:].any()
        array.fill(0xAA)
        assert np.asarray(block).tobytes() == expected
        assert figures(store) == (3 * LEAST, 2 * LEAST, 2)
        larger = block_at(store, array)
        array.resize(LEAST // 2, refcheck=False)  # small now, so that it goes elsewhere
        assert not lies_in(store, array) and (array == 0xAA).all()
        array.fill(0xBB)
        assert (np.asarray(larger) == 0xAA).all()
        assert figures(store) == (3 * LEAST, 0, 2)
        del block, larger
        assert figures(store) == (0, 0, 0)


def test_a_view_taken_while_an_array_grows_keeps_its_memory(store: Store) -> None:
    """``ndarray.resize`` checks that nobody else refers to the array, and NumPy holds the interpreter lock from then on
    until the array has its new memory. Whoever took a view in between would read freed memory."""
    ready, gate = threading.Event(), threading.Lock()
    views: list[Array] = []

    def look() -> None:
        ready.set()
        with gate:
            views.append(arrays[0][:])

    with using(store.heap):
        arrays = [np.full(LEAST, 7, "u1")]
        behind = np.zeros(LEAST, "u1")  # so that it moves
        interval = sys.getswitchinterval()
        sys.setswitchinterval(30)  # the lock changes hands only where it is let go
        try:
            with gate:
                thread = threading.Thread(target=look)
                thread.start()
                ready.wait()
            arrays[0].resize(32 * MIB)
        finally:
            sys.setswitchinterval(interval)
            thread.join()
    assert not behind.any()
    assert len(views) == 1 and lies_in(store, views[0])


# ---------------------------------------------------------------- no memory


def test_a_full_arena_leaves_it_to_numpys_own() -> None:
    store = Store(4 * MIB, PROCESS, extent_nbytes=MIB)
    with using(store.heap):
        held = [np.full(MIB, index, "u1") for index in range(8)]
        assert [lies_in(store, array) for array in held] == [True] * 4 + [False] * 4
        assert figures(store) == (4 * MIB, 4 * MIB, 4)
        zeros = np.zeros(MIB, "u1")
        assert not lies_in(store, zeros) and not zeros.any()
        held[0].resize(2 * MIB, refcheck=False)  # moves out
        assert not lies_in(store, held[0])
        assert [int(array[:MIB].max()) for array in held] == list(range(8))
        again = np.ones(MIB, "u1")
        assert lies_in(store, again)
        del held, again, zeros
        assert figures(store) == (0, 0, 0)
        assert lies_in(store, np.ones(4 * MIB, "u1"))
    store.close()


class Refusing:
    """A fallocate that fails at its `number`-th call, counted from 0."""

    def __init__(self, number: int, code: int) -> None:
        self.number = number
        self.code = code
        self.calls = 0

    def __call__(self, fd: int, offset: int, nbytes: int) -> None:
        self.calls += 1
        if self.calls - 1 == self.number:
            raise OSError(self.code, os.strerror(self.code))
        os.posix_fallocate(fd, offset, nbytes)


def computation() -> list[Any]:
    """User code that allocates in every way there is."""
    grid = np.arange(600_000, dtype="f8").reshape(1000, 600)
    total = grid + grid.T.copy().T
    zeros = np.zeros((3 * MIB,), "u1")
    zeros[::1000] += 1
    grown = np.arange(100_000)
    grown.resize(900_000, refcheck=False)
    large = np.ones(20 * MIB, "u1")  # several calls
    return [
        float(total.sum()),
        int(zeros.sum()),
        int(grown.sum()),
        int(large.sum()),
        np.sort(total, axis=None)[:5].tolist(),
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EIO])
def test_no_memory_at_any_moment(code: int) -> None:
    expected = computation()
    number = 0
    while True:
        fallocate = Refusing(number, code)
        arena = Arena(64 * MIB, fallocate=fallocate)
        store = Store(0, PROCESS, arena=arena)
        with using(store.heap):
            assert computation() == expected
            assert figures(store) == (0, 0, 0)
            assert taken(arena) <= store.stats().committed + 2 * GRANULE_NBYTES
            zeros = np.zeros(40 * MIB, "u1")  # the memory serves again, and is zero
            assert lies_in(store, zeros) and not zeros.any()
            del zeros
        store.heap.trim(0, EVERYTHING)
        assert store.stats().committed == 0
        store.close()
        number += 1
        if fallocate.calls < number:
            break
    assert number >= 8, "it commits more often than that"


# ---------------------------------------------------------------- other handlers


class Counting:
    """A data-memory handler as another package may have set it: the C library's, counting what is alive."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        for name, arguments in (("malloc", [size]), ("calloc", [size, size]), ("realloc", [pointer, size])):
            getattr(libc, name).restype = pointer
            getattr(libc, name).argtypes = arguments
        libc.free.argtypes = [pointer]
        libc.free.restype = None
        self.alive: set[int] = set()
        self.sizes: list[int] = []

        def allocate(_: int, nbytes: int) -> int:
            self.sizes.append(nbytes)
            return self._add(libc.malloc(nbytes))

        def zeroed(_: int, count: int, each: int) -> int:
            self.sizes.append(count * each)
            return self._add(libc.calloc(count, each))

        def again(_: int, old: int, nbytes: int) -> int:
            self.alive.discard(old)
            return self._add(libc.realloc(old, nbytes))

        def free(_: int, old: int, nbytes: int) -> None:
            self.alive.discard(old)
            libc.free(old)

        class Handler(ctypes.Structure):
            _fields_ = (
                ("name", ctypes.c_char * 127),
                ("version", ctypes.c_uint8),
                ("context", pointer),
                ("malloc", ctypes.CFUNCTYPE(pointer, pointer, size)),
                ("calloc", ctypes.CFUNCTYPE(pointer, pointer, size, size)),
                ("realloc", ctypes.CFUNCTYPE(pointer, pointer, pointer, size)),
                ("free", ctypes.CFUNCTYPE(None, pointer, pointer, size)),
            )

        types: dict[str, Any] = dict(Handler._fields_)
        self._handler = Handler(
            b"counting", 1, None, types["malloc"](allocate), types["calloc"](zeroed), types["realloc"](again),
            types["free"](free),
        )  # fmt: skip
        self._name = b"mem_handler"  # the capsule does not copy it
        make: Any = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [pointer, ctypes.c_char_p, pointer]
        self.capsule = make(ctypes.addressof(self._handler), self._name, None)

    def _add(self, at: int) -> int:
        self.alive.add(at)
        return at


def test_a_handler_that_was_set_before_is_used_below_the_limit_and_restored(store: Store) -> None:
    other = Counting()
    default = use_handler(other.capsule)
    try:
        with using(store.heap):
            small, large = np.ones(3001, "u1"), np.ones(LEAST, "u1")
            zeros = np.zeros(5003, "u1")
            assert (lies_in(store, small), lies_in(store, large), lies_in(store, zeros)) == (False, True, False)
            assert {address(small), address(zeros)} <= other.alive
            assert not zeros.any()
            small.resize(2 * LEAST, refcheck=False)
            assert address(small) in other.alive and small[:3001].all() and not small[3001:].any()
            assert LEAST not in other.sizes
            too_large = np.ones(65 * MIB, "u1")
            assert address(too_large) in other.alive
            large.resize(101, refcheck=False)  # in place
            assert lies_in(store, large)
        after = np.ones(LEAST, "u1")
        assert address(after) in other.alive
    finally:
        use_handler(default)
    del small, large, zeros, too_large, after
    assert not other.alive
    assert figures(store) == (0, 0, 0)
    assert address(np.ones(LEAST, "u1")) not in other.alive


def test_switched_off_inside(store: Store) -> None:
    other = Counting()
    default = use_handler(other.capsule)
    try:
        with using(store.heap):
            before = allocate_elsewhere()
            try:
                outside = np.ones(LEAST, "u1")
                with using(store.heap):
                    inside = np.ones(LEAST, "u1")
                assert lies_in(store, inside)
                again = np.ones(LEAST, "u1")
            finally:
                use_handler(before)
            assert address(outside) in other.alive and address(again) in other.alive
            assert lies_in(store, np.ones(LEAST, "u1"))
    finally:
        use_handler(default)
    del outside, again, inside
    assert not other.alive and figures(store) == (0, 0, 0)


def test_nested_limits(store: Store) -> None:
    def where() -> list[bool]:
        return [lies_in(store, np.ones(nbytes, "u1")) for nbytes in (100, 5000, LEAST)]

    with using(store.heap):
        with using(store.heap, 1):
            assert where() == [True, True, True]
            with using(store.heap, 4096):
                assert where() == [False, True, True]
            assert where() == [True, True, True]
        assert where() == [False, False, True]
        with using(store.heap):
            assert where() == [False, False, True]
        assert where() == [False, False, True]
    assert where() == [False, False, False]


def test_two_stores_one_inside_the_other(store: Store) -> None:
    other = Store(8 * MIB, PROCESS)
    with using(store.heap):
        with using(other.heap):
            inner = np.ones(LEAST, "u1")
            too_large = np.ones(10 * MIB, "u1")
        outer = np.ones(LEAST, "u1")
    assert lies_in(other, inner) and lies_in(store, outer)
    # A handler of ours is never under another of ours: it would keep a closed heap for ever.
    assert not lies_in(store, too_large)
    held = inner[:5]
    del inner
    assert figures(other) == (LEAST, LEAST, 1)
    del held
    assert figures(other) == (0, 0, 0)
    other.close()


# ---------------------------------------------------------------- life


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
        assert store.block_at(*store.bounds(array)) is None, "a closed store shares nothing any more"
        fd = store.arena.fd
        assert fd >= 0
    del store
    gc.collect()
    assert array.sum() == LEAST * (LEAST - 1) // 2
    array.resize(2 * LEAST, refcheck=False)
    assert not where[0] <= address(array) < where[1]
    assert array[:LEAST].tolist() == list(range(LEAST)) and not array[LEAST:].any()
    del array, kept
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


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
    assert faults < 50, "512 pages each time, unless the memory stays"
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


# ---------------------------------------------------------------- all that NumPy does


@pytest.mark.parametrize("least", [1, LEAST])
def test_every_dtype(store: Store, least: int) -> None:
    codes = ["M8[s]" if code == "M" else "m8[s]" if code == "m" else "S9" if code == "S" else "U5" if code == "U" else
             "V7" if code == "V" else code for code in np.typecodes["All"]]  # fmt: skip
    dtypes = [np.dtype(code) for code in codes if code != "O"] + DTYPES
    for dtype in dtypes:
        count = -(-LEAST // max(dtype.itemsize, 1)) + 3
        expected = filled((count,), dtype)
        with using(store.heap, least):
            array = expected.copy()
            zeros = np.zeros(count, dtype)
            twice = np.concatenate([array, array[::-1]])
        assert lies_in(store, array) and lies_in(store, zeros), dtype
        assert lies_in(store, twice) == (twice.nbytes >= least), dtype  # NumPy may have dropped the padding
        assert_same(array, expected)
        assert zeros.tobytes() == bytes(zeros.nbytes)
        assert_same(twice, np.concatenate([expected, expected[::-1]]))
        del array, zeros, twice
        assert figures(store) == (0, 0, 0)


def test_ml_dtypes_compute(store: Store) -> None:
    expected = (np.arange(LEAST) % 50).astype(ml_dtypes.bfloat16)
    with using(store.heap):
        doubled = expected + expected
    assert lies_in(store, doubled)
    assert (doubled.astype("f4") == expected.astype("f4") * 2).all()


def test_objects_and_strings_of_any_length(store: Store) -> None:
    with using(store.heap):
        objects = np.array([str(index) for index in range(LEAST)], object)
        nothing = np.empty(LEAST, object)
        fields = np.zeros(LEAST, [("a", object), ("b", "f8")])
        strings = np.array([f"a text that is not short: {index}" for index in range(LEAST)], np.dtypes.StringDType())
        assert all(lies_in(store, array) for array in (objects, nothing, fields, strings))
        objects[::2] = None
        gc.collect()
        joined = np.concatenate([objects, objects])
        pairs = strings + "!"
    assert joined[1::2].tolist() == [str(index) for index in range(1, LEAST, 2)] * 2
    assert set(nothing.tolist()) == {None}
    assert set(fields["a"].tolist()) == {0}
    assert pairs[LEAST - 1] == f"a text that is not short: {LEAST - 1}!"
    marker = object()
    before = _references(marker)
    with using(store.heap):
        nothing[:] = marker
        grown = np.full(LEAST, marker, object)
        grown.resize(2 * LEAST, refcheck=False)
    assert _references(marker) == before + 2 * LEAST
    del grown, nothing
    assert _references(marker) == before
    del objects, fields, strings, joined, pairs
    gc.collect()
    assert figures(store) == (0, 0, 0)


def _references(value: object) -> int:
    return sys.getrefcount(value)


class Sub(np.ndarray[Any, Any]):
    """A subclass with an attribute of its own."""

    name = "sub"

    def __array_finalize__(self, other: Any) -> None:
        self.name = getattr(other, "name", "none")


def _saved(folder: Path) -> Path:
    np.save(folder / "saved.npy", np.arange(300_000.0).reshape(300, 1000))
    return folder / "saved.npy"


GRID: Array = np.random.default_rng(1).normal(size=(300, 400))
OPERATIONS: dict[str, Callable[[Path], Any]] = {
    "resize": lambda _: np.resize(GRID, (700, 500)),
    "frombuffer": lambda _: np.frombuffer(GRID.tobytes(), "u4") // 2,
    "memmap": lambda folder: np.memmap(_saved(folder), np.uint8, "r")[128:].copy(),
    "memmap view": lambda folder: np.load(_saved(folder), mmap_mode="r")[::2] + 1,
    "load": lambda folder: np.load(_saved(folder)),
    "fromfile": lambda folder: np.fromfile(_saved(folder), "u1"),
    "fromiter": lambda _: np.fromiter((index * 0.5 for index in range(100_000)), "f8"),
    "fromiter counted": lambda _: np.fromiter((index * 0.5 for index in range(100_000)), "f8", 100_000),
    "matrix": lambda _: np.asmatrix(GRID) * np.asmatrix(GRID).T,
    "subclass": lambda _: GRID.view(Sub)[3:] * 2,
    "masked": lambda _: (np.ma.masked_less(GRID, 0) * 2).filled(-1),
    "masked sum": lambda _: np.ma.masked_less(GRID, 0).mean(axis=0),
    "sort": lambda _: np.sort(GRID, axis=None, kind="stable"),
    "sort in place": lambda _: _in_place(GRID.copy(), "sort", axis=0),
    "argsort": lambda _: np.argsort(GRID, axis=1, kind="stable"),
    "partition": lambda _: np.sort(np.partition(GRID, 50, axis=None)[:50]),
    "concatenate": lambda _: np.concatenate([GRID, GRID[::-1], GRID[:, ::-1]]),
    "stack": lambda _: np.stack([GRID, GRID], axis=2),
    "fancy": lambda _: GRID[np.arange(299, -1, -1)][:, [3, 1, 2] * 50],
    "mask": lambda _: GRID[GRID > 0],
    "nonzero": lambda _: np.nonzero(np.tile(GRID > 0, (2, 2)))[0],
    "where": lambda _: np.where(GRID > 0, GRID, 0),
    "einsum": lambda _: np.einsum("ij,kj->ik", GRID, GRID),
    "matmul": lambda _: GRID @ GRID.T,
    "elided temporaries": lambda _: ((GRID + 1) * 2 - GRID) / 3 + (GRID * 4),
    "reduce": lambda _: np.tile(GRID, (1, 1, 3)).sum(axis=0),
    "cumsum": lambda _: GRID.cumsum(axis=1),
    "fft": lambda _: np.fft.fft2(GRID),
    "svd": lambda _: np.linalg.svd(GRID @ GRID.T, compute_uv=False),
    "inverse": lambda _: np.linalg.inv(GRID @ GRID.T + 1000 * np.eye(300)),
    "unique": lambda _: np.unique(GRID.round(2)),
    "astype": lambda _: GRID.astype("c16"),
    "byte order": lambda _: GRID.astype(">f4").byteswap(),
    "transpose": lambda _: np.asfortranarray(GRID),
    "pad": lambda _: np.pad(GRID, 40, mode="reflect"),
    "from lists": lambda _: np.array(GRID.tolist()),
    "text": lambda _: np.char.add(GRID.round(3).astype("U12"), "!"),
    "histogram": lambda _: np.histogram2d(GRID[0], GRID[1], bins=100)[0],
    "pickled": lambda _: _pickled(GRID),
    "choose": lambda _: np.choose((GRID > 0).astype(int), [GRID, -GRID]),
    "put": lambda _: _in_place(GRID.copy(), "put", range(0, 120_000, 7), 5),
    "out": lambda _: np.multiply(GRID, 3, out=np.empty_like(GRID)),
    "zero size": lambda _: np.empty((0, 1 << 40)),
    "buffered": lambda _: np.add(GRID.astype("f4"), GRID.astype("i8"), dtype="f8", casting="unsafe"),
    "random": lambda _: np.random.default_rng(3).permutation(200_000),
    "records": lambda _: np.rec.fromarrays([GRID.ravel(), GRID.ravel().astype("i4")], dtype="f8,i4"),
}  # fmt: skip
"""Results by name. What NumPy makes inside of them lies in the store as well."""


def _in_place(array: Array, name: str, *args: Any, **named: Any) -> Array:
    getattr(array, name)(*args, **named)
    return array


def _pickled(array: Array) -> Any:
    import pickle

    return pickle.loads(pickle.dumps(array))


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", OPERATIONS)
def test_numpy_computes_the_same(store: Store, tmp_path: Path, name: str) -> None:
    expected = OPERATIONS[name](tmp_path)
    for least in (1, LEAST):
        with using(store.heap, least):
            dirty(6 * MIB)
            got = OPERATIONS[name](tmp_path)
        assert type(got) is type(expected)
        assert (got.shape, got.dtype, got.strides) == (expected.shape, expected.dtype, expected.strides)
        assert got.tobytes() == expected.tobytes()
        root: Any = got
        while isinstance(root.base, np.ndarray):
            root = root.base
        # NumPy begins small there and grows: the handler below has it then, and keeps it.
        grows = name == "fromiter" and least == LEAST
        if root.flags.owndata and root.size:  # else it is over the bytes of another object
            assert lies_in(store, root) == (root.nbytes >= least and not grows)
        del got, root
        gc.collect()
        assert figures(store) == (0, 0, 0)


# ---------------------------------------------------------------- any order of all this


class Memory:
    """One piece of memory in the model: what it should hold, and who does."""

    def __init__(self, content: bytearray, size: int, inside: bool) -> None:
        self.content = content
        self.size = size
        """Bytes it takes up in the store."""
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
    """Arrays of a small store, which is full now and then, against bytes of Python's own."""

    entries = Pool("entries")

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(12 * MIB, PROCESS, extent_nbytes=2 * MIB)
        self.alive: list[Entry] = []
        self.number = 0

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
        block = self.store.block_at(*self.store.bounds(array)) if array.size else None
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
        """Whether the array that owns the memory lives by this entry: it does by its views, and not by blocks."""
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
            return  # views would dangle, with any allocator
        if nbytes == len(memory.content):
            return  # NumPy asks nobody then
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


TestArrays = Arrays.TestCase
TestArrays.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
