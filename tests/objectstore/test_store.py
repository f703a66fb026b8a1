"""The store: it holds any array, finds it again from any view, and frees it with the last view."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.objectstore.heap_arrays import LEAST, using
from zcactor.errors import NotInitialized, OutOfMemory
from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.store import Block, Store
from zcactor.objectstore.table import LeaseTable

MIB = 1 << 20
PROCESS = bytes(range(16))


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(64 * MIB, PROCESS, extent_nbytes=MIB)
    yield made
    made.close()


def block_of(store: Store, array: object) -> Block:
    found = store.block_of(array)
    assert found is not None
    return found[0]


DTYPES = [
    "f4", ">i8", "c16", "?", "M8[us]", "m8[s]", "U5", "S3", "V9",
    np.dtype([("a", "i1"), ("b", "f8", (2, 2))]),
    np.dtype(ml_dtypes.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_array(store: Store, dtype: Any, shape: tuple[int, ...], order: Any) -> None:
    array = store.empty(shape, dtype, order)
    expected = np.empty(shape, dtype, order)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert array.strides == expected.strides or not array.size
    assert array.flags.writeable
    array[...] = np.zeros(shape, dtype)
    assert array.tobytes() == bytes(expected.nbytes)
    found = store.block_of(array)
    assert found is not None
    block, root = found
    assert array.base is root
    assert block.nbytes == array.nbytes
    low, high = byte_bounds(array)
    assert (low, high - low) == (block.address, array.nbytes)
    assert block.address % 64 == 0
    assert store.block_at(low, high) is block


def test_a_shape_may_be_one_number(store: Store) -> None:
    assert store.empty(5).shape == (5,)
    assert store.empty(np.int64(5), "u1").nbytes == 5
    assert store.empty([2, np.int8(3)]).shape == (2, 3)


def test_objects_are_refused_with_the_remedy(store: Store) -> None:
    for dtype in (object, [("a", "O")], np.dtypes.StringDType()):
        with pytest.raises(TypeError, match="pass such values as they are"):
            store.empty(3, dtype)
    assert store.stats().blocks == 0


def test_impossible_shapes_are_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="negative"):
        store.empty((2, -1))
    with pytest.raises(ValueError, match="one number of bytes per axis"):
        store.empty((2, 3), strides=(8,))
    with pytest.raises(ValueError, match="-1 bytes"):
        store.allocate(-1)
    with pytest.raises(ValueError, match="power of two"):
        store.allocate(1, 48)
    assert store.stats().blocks == 0


@pytest.mark.slow
@given(
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    steps=st.tuples(*[st.sampled_from([-3, -1, 0, 1, 2])] * 3),
    itemsize=st.sampled_from([1, 2, 8]),
)
def test_any_strides_have_exactly_the_room_they_need(
    shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int
) -> None:
    store = Store(MIB, PROCESS)
    strides = [step * itemsize for step in steps[: len(shape)]]
    array = store.empty(shape, f"u{itemsize}", strides=strides)
    assert array.shape == shape
    if array.size:
        assert array.strides == tuple(strides)
        block = block_of(store, array)
        assert byte_bounds(array) == (block.address, block.address + block.nbytes)
    assert byte_bounds(array) == np.lib.array_utils.byte_bounds(array) or not array.size
    array[...] = 1
    store.close()


@given(data=st.data())
@settings(max_examples=60)
def test_every_view_leads_to_its_block(data: st.DataObject) -> None:
    store = Store(MIB, PROCESS)
    array: NDArray[Any] = store.empty((4, 6, 2), "f8")
    block, view = block_of(store, array), array
    for _ in range(data.draw(st.integers(0, 4))):
        view = data.draw(
            st.sampled_from(
                [
                    view[::-1],
                    view[..., ::-2],
                    view[1:],
                    view.T,
                    view[None],
                    np.broadcast_to(view, (2, *view.shape)),
                    view.view(np.ndarray),
                    np.asarray(view.data),
                    view.view("u1") if view.flags.c_contiguous and view.ndim else view,
                    np.lib.stride_tricks.as_strided(view, view.shape, view.strides),
                    view.real,
                    view.view(type("Sub", (np.ndarray,), {})),
                ]
            )
        )
    found = store.block_of(view)
    if found is None:  # as_strided hides the base behind an object of its own
        assert store.block_at(*byte_bounds(view)) is block or not view.size
    else:
        assert found[0] is block
        base: object = found[1].base
        assert base is block
    if view.size:
        low, high = byte_bounds(view)
        assert (low, high) == np.lib.array_utils.byte_bounds(view)
        assert block.address <= low < high <= block.address + block.nbytes
        assert store.block_at(low, high) is block
    store.close()


def test_what_is_not_ours_is_not_found(store: Store) -> None:
    other = Store(MIB, PROCESS)
    foreign = other.empty(4)
    for value in (np.zeros(3), np.frombuffer(b"abcd", "u1"), 5, None, "text", memoryview(b""), foreign):
        assert store.block_of(value) is None
    assert store.block_at(*byte_bounds(foreign)) is None
    assert store.block_at(*byte_bounds(np.zeros(3))) is None
    assert store.block_at(store.arena.address, store.arena.address + 1) is None
    other.close()


def test_a_block_is_found_by_address_while_it_lives_and_only_within(store: Store) -> None:
    first, second = store.allocate(100), store.allocate(64)
    assert store.block_at(first.address, first.address + 100) is first
    assert store.block_at(first.address + 99, first.address + 100) is first
    assert store.block_at(first.address + 50, first.address + 101) is None
    assert store.block_at(second.address, second.address + 1) is second
    address = first.address
    del first
    assert store.block_at(address, address + 1) is None
    store.stats()
    assert store.block_at(address, address + 1) is None
    assert store.block_at(second.address + 63, second.address + 64) is second


def test_sealed_arrays_stay_read_only(store: Store) -> None:
    array = store.empty((4, 4))
    early = array[1:]
    found = store.block_of(array)
    assert found is not None
    block, root = found
    store.seal(block, root)
    assert block.sealed
    array.setflags(write=False)
    early.setflags(write=False)
    for view in (root, array, early, array[2:], array.T, np.asarray(block)):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    store.seal(block)


def test_bytes_are_freed_with_the_last_view(store: Store) -> None:
    array = store.empty(1000, "u1")
    view = array[10:20][::-1]
    assert (store.stats().used, store.stats().blocks) == (1024, 1)
    del array
    assert store.stats().blocks == 1
    held = view.data
    del view
    assert store.stats().blocks == 1
    del held
    assert (store.stats().used, store.stats().blocks) == (0, 0)


def test_bytes_in_a_cycle_are_freed_by_the_collector(store: Store) -> None:
    class Node:
        def __init__(self, array: NDArray[Any]) -> None:
            self.array, self.myself = array, self

    Node(store.empty(10))
    gc.collect()
    assert store.stats().blocks == 0


def test_room_is_used_again(store: Store) -> None:
    first = store.empty(MIB, "u1")
    address = byte_bounds(first)[0]
    del first
    assert byte_bounds(store.empty(MIB, "u1"))[0] == address


def test_large_blocks_begin_on_a_page(store: Store) -> None:
    store.empty(1)
    assert store.allocate(MIB).address % 4096 == 0
    assert store.allocate(1, 1 << 16).offset % (1 << 16) == 0


def test_empty_blocks_are_apart(store: Store) -> None:
    blocks = [store.allocate(0) for _ in range(3)]
    assert len({block.address for block in blocks}) == 3
    assert all(np.asarray(block).shape == (0,) for block in blocks)


def test_ids_are_never_the_same_and_hard_to_guess(store: Store) -> None:
    ids = [store.allocate(1).id for _ in range(3000)]
    assert len(set(ids)) == 3000
    assert all(0 < number < 1 << 64 for number in ids)
    assert [number >> 32 for number in ids] == list(range(1, 3001))
    assert len({number & 0xFFFF_FFFF for number in ids}) > 2990


def test_the_store_is_filled_to_the_last_byte() -> None:
    store = Store(3 * MIB, PROCESS, extent_nbytes=MIB)
    first = store.allocate(100_000)
    assert store.stats().largest_free == 3 * MIB - 102_400
    with pytest.raises(OutOfMemory) as caught:
        store.allocate(3 * MIB)
    error = caught.value
    assert (error.requested, error.used, error.capacity) == (3 * MIB, 102_400, 3 * MIB)
    assert error.largest_free == 3 * MIB - 102_400
    rest = store.allocate(3 * MIB - 102_400, 64)
    with pytest.raises(OutOfMemory):
        store.allocate(0)
    assert (store.stats().used, store.stats().largest_free) == (3 * MIB, 0)
    del first, rest
    assert (store.stats().used, store.stats().largest_free) == (0, 3 * MIB)
    assert store.allocate(3 * MIB).offset == 0


def test_alignments_above_a_page_fit_when_there_is_room_for_them() -> None:
    store = Store(MIB, PROCESS, extent_nbytes=4096)
    store.allocate(64)
    block = store.allocate(4096, 1 << 16)
    assert block.offset % (1 << 16) == 0
    with pytest.raises(OutOfMemory) as caught:
        store.allocate(MIB - (1 << 16) - 4096, 1 << 19)
    assert caught.value.capacity == MIB


def test_a_system_without_memory_is_out_of_memory_and_nothing_leaks() -> None:
    refused = [True]

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if refused[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, offset, nbytes)

    store = Store(0, PROCESS, arena=Arena(64 * MIB, fallocate=fallocate))
    with pytest.raises(OutOfMemory, match="No space left") as caught:
        store.empty(16 * MIB, "u1")
    error = caught.value
    assert (error.requested, error.used, error.capacity, error.largest_free) == (16 * MIB, 0, 64 * MIB, 64 * MIB)
    assert isinstance(error.__cause__, OSError)
    assert store.stats().blocks == 0
    refused[0] = False
    store.empty(16 * MIB, "u1")[:] = 1
    store.close()


def test_exported_blocks_are_looked_up_while_they_live(store: Store) -> None:
    block = store.allocate(10)
    assert store.lookup(block.id) is None
    assert store.export(block) == store.export(block) == block.id
    assert block.exported
    assert store.lookup(block.id) is block
    number, seen = block.id, weakref.ref(block)
    del block
    assert seen() is None
    assert store.lookup(number) is None


class Session:
    """The part of a session that granting uses."""

    def __init__(self) -> None:
        self.leases = LeaseTable()
        self.connection = SimpleNamespace(maps=True)


def test_what_is_known_of_numpys_memory_goes_with_it(store: Store) -> None:
    """Peers may have copies under the ids of living memory; the store remembers nothing of freed memory."""

    def told(array: NDArray[Any]) -> int:
        block = store.block_at(*byte_bounds(array))
        assert block is not None
        return store.export(block)

    living: list[tuple[NDArray[Any], int]] = []
    with using(store.heap):
        numbers, passing = random.Random(1), deque[NDArray[Any]](maxlen=5)  # memory comes from many places
        for number in range(5000):
            array = np.empty(numbers.randrange(LEAST, 2 * MIB), np.uint8)
            told(array)
            passing.append(array)
            if number % 250 == 0:
                small = np.empty(LEAST, np.uint8)
                living.append((small, told(small)))
        del array, small
        passing.clear()
        assert len(store._known) <= 2 * (256 + len(living))
        for array, last in living:
            assert told(array) != last, "somebody could write to it since peers were told"


def test_a_lease_keeps_the_bytes(store: Store) -> None:
    session = Session()
    array = store.empty(10)
    block = block_of(store, array)
    number = block.id
    assert block.grant(session) == block.grant(session) == (PROCESS, number, 0)
    assert session.leases.total == 2
    del array, block
    assert store.stats().blocks == 1
    kept = store.lookup(number)
    assert kept is session.leases.get(number)
    assert f"{number:#018x}" in repr(kept)
    del kept
    session.leases.release(number, 2)
    assert store.stats().blocks == 0


def test_arrays_outlive_the_store() -> None:
    store = Store(8 * MIB, PROCESS)
    array = store.empty(1000)
    array[:] = 3
    store.close()
    store.close()
    with pytest.raises(NotInitialized, match="closed"):
        store.empty(1)
    assert store.stats().blocks == 1
    del store
    gc.collect()
    assert array.sum() == 3000


def test_threads_allocate_and_free_at_once(store: Store) -> None:
    wrong: list[int] = []

    def work(mine: int) -> None:
        held: list[NDArray[Any]] = []
        random = np.random.default_rng(mine)
        for nbytes in random.integers(1, 20_000, 300).tolist():
            array = store.empty(nbytes, "u1")
            array[:] = mine
            held.append(array)
            if len(held) > 10:
                dropped = held.pop(int(random.integers(10)))
                if not (dropped == mine).all():
                    wrong.append(mine)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    stats = store.stats()
    assert (stats.used, stats.blocks, stats.of_numpy) == (0, 0, 0)
    assert stats.capacity == stats.largest_free == 64 * MIB
