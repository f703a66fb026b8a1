"""NumPy's data-memory handler (NEP 49) on the heap: placing, zeros, resizing, refused memory, other handlers."""

from __future__ import annotations

import contextvars
import ctypes
import errno
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from tests.objectstore.heap_arrays import (
    EVERYTHING,
    LEAST,
    MIB,
    PROCESS,
    Array,
    address,
    block_at,
    dirty,
    figures,
    lies_in,
    taken,
    using,
)
from zcactor.objectstore.arena import GRANULE_NBYTES, Arena
from zcactor.objectstore.heap import Heap, allocate_elsewhere, use_handler
from zcactor.objectstore.store import Store

# ---------------------------------------------------------------- the place of arrays


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


def test_the_setting_is_the_contexts(store: Store) -> None:
    found: dict[str, bool] = {}

    def note(name: str) -> None:
        found[name] = lies_in(store, np.ones(LEAST, "u1"))

    with using(store.heap):
        inherited = contextvars.copy_context()
        thread = threading.Thread(target=note, args=("thread",))  # a thread begins with an empty context of its own
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
    """A program may lock its memory (mlockall(2), for latency): punching a hole then fails with EINVAL."""
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
        for nbytes in (LEAST + 5, 100):  # also below the limit, where a copy would gain nothing
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
        array.resize(LEAST // 2, refcheck=False)  # it is small now, so it goes elsewhere
        assert not lies_in(store, array) and (array == 0xAA).all()
        array.fill(0xBB)
        assert (np.asarray(larger) == 0xAA).all()
        assert figures(store) == (3 * LEAST, 0, 2)
        del block, larger
        assert figures(store) == (0, 0, 0)


def test_a_view_taken_while_an_array_grows_keeps_its_memory(store: Store) -> None:
    """A view that is taken while ``ndarray.resize`` runs must not read freed memory.

    NumPy holds the interpreter lock until the array has its new memory.
    """
    ready, gate = threading.Event(), threading.Lock()
    views: list[Array] = []

    def look() -> None:
        ready.set()
        with gate:
            views.append(arrays[0][:])

    with using(store.heap):
        arrays = [np.full(LEAST, 7, "u1")]
        behind = np.zeros(LEAST, "u1")  # makes the other array move
        interval = sys.getswitchinterval()
        sys.setswitchinterval(30)  # the lock changes hands only where a thread gives it up
        try:
            with gate:
                thread = threading.Thread(target=look)
                thread.start()
                ready.wait()
            arrays[0].resize(32 * MIB, refcheck=False)  # from Python 3.14 on, the check refuses every array
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
        held[0].resize(2 * MIB, refcheck=False)  # it moves out of the store
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
    """User code that allocates in every possible way."""
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


@pytest.mark.slow
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
            zeros = np.zeros(40 * MIB, "u1")  # the memory is used again, and is zero
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
    """A data-memory handler as another package may set it: the C library's, with a count of living allocations."""

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
    # A handler of zcactor's is never below another of its own: that one would keep a closed heap for ever.
    assert not lies_in(store, too_large)
    held = inner[:5]
    del inner
    assert figures(other) == (LEAST, LEAST, 1)
    del held
    assert figures(other) == (0, 0, 0)
    other.close()


# ---------------------------------------------------------------- without the interpreter lock

_BARE = """
import ctypes, importlib
from zcactor.objectstore.heap import use_handler
from zcactor.objectstore.store import Store

class Handler(ctypes.Structure):  # PyDataMem_Handler
    _fields_ = [("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("context", ctypes.c_void_p),
                ("malloc", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t))]

for name in ("_interpreters", "_xxsubinterpreters"):  # since Python 3.13, and before
    try:
        importlib.import_module(name).create()
        break
    except ModuleNotFoundError:
        pass
else:
    raise SystemExit("no subinterpreter can be made")
store = Store(64 << 20, b"p" * 16)
ours = use_handler(store.heap.use(4096))
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
handler = Handler.from_address(pointer(ours, b"mem_handler"))
print(handler.name.decode(), store.heap.address <= handler.malloc(handler.context, 16 << 20))  # ctypes lets the lock go
"""


@pytest.mark.slow
def test_memory_without_the_interpreter_lock_where_subinterpreters_are() -> None:
    command = [sys.executable, "-c", _BARE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (0, "zcactor True\n"), ended.stderr
