"""Arrays that give up the memory they own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.objectstore.heap_arrays import Array, figures, using
from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.fields import disown, exchange, layout_is_known
from zcactor.objectstore.store import Block, Store

MIB = 1 << 20
DTYPE = np.dtype([("a", "i4"), ("b", "f8", (3,))])


@pytest.fixture
def store() -> Iterator[Store]:
    """A store that NumPy allocates in."""
    made = Store(64 * MIB, bytes(range(16)), extent_nbytes=MIB)
    with using(made.heap):
        yield made
    made.close()


def sealed(store: Store, array: Array) -> Block:
    """Seal the block of `array`, which NumPy allocated in the store."""
    block = store.block_at(*byte_bounds(array))
    assert block is not None
    store.seal(block)
    return block


def test_the_layout_is_known() -> None:
    assert layout_is_known()


def test_arrays_that_are_exchanged_stay_whole() -> None:
    one, other = np.full((3, 4), 5.5), np.array([b"x"])
    seen = weakref.ref(one)
    exchange(one, other)
    assert one[0] == b"x" and len(one) == 1 and other.shape == (3, 4) and other.sum() == 66
    assert one.flags.owndata and other.flags.owndata and seen() is one


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f8", DTYPE], ids=str)
def test_it_is_a_view_for_good(store: Store, dtype: Any, order: Any) -> None:
    array = np.zeros((300, 200), dtype, order)
    array[5, 7] = 3
    expected, strides, element, where = array.tobytes(), array.strides, array.dtype, array.ctypes.data
    view, flat = array[2:, ::-1], array.T.view()
    seen = weakref.ref(array)
    block = sealed(store, array)
    disown(array, block)
    disown(array, block)
    assert (array.strides, array.dtype, array.ctypes.data) == (strides, element, where) and array.dtype is element
    assert array.tobytes() == expected and view.base is array and view.tobytes() == array[2:, ::-1].tobytes()
    assert (array.flags.c_contiguous, array.flags.f_contiguous) == (order == "C", order == "F")
    assert not array.flags.owndata and array.flags.aligned and seen() is array
    found = store.block_of(flat)
    assert found is not None and found[0] is block
    view.setflags(write=False)
    for each in (array, array[1:], array.T, view):
        with pytest.raises(ValueError, match="WRITEABLE"):
            each.flags.writeable = True
    with pytest.raises(ValueError, match="own"):
        array.resize(10, refcheck=False)


def test_the_bytes_go_with_the_last_of_array_views_and_block(store: Store) -> None:
    before = figures(store)
    array = np.ones(100_000)
    used, of_numpy, blocks = figures(store)
    assert of_numpy == used - before[0] == 800_000
    block = sealed(store, array)
    disown(array, block)
    assert figures(store) == (used, 0, blocks), "no array owns it"
    view = array[10:20]
    del array
    assert view.sum() == 10 and figures(store)[0] == used
    del view
    assert figures(store)[0] == used and np.asarray(block).view("f8").sum() == 100_000
    del block
    assert figures(store) == before
    cycle: list[Any] = [np.ones(100_000)]
    cycle.append(cycle)
    disown(cycle[0], sealed(store, cycle[0]))
    assert figures(store)[0] == used
    del cycle
    gc.collect()
    assert figures(store) == before


@pytest.mark.slow
def test_of_many_threads_one_takes_the_memory_while_others_read(store: Store) -> None:
    for _ in range(50):
        array = np.ones((100, 1000))
        block = sealed(store, array)
        begin = threading.Barrier(4)
        sums: list[float] = []

        def work(
            one: int, array: Array = array, block: Block = block, begin: Any = begin, sums: list[float] = sums
        ) -> None:
            begin.wait()
            if one % 2:
                disown(array, block)
            sums.append(float((array @ array.T).sum()))

        threads = [threading.Thread(target=work, args=(one,)) for one in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [1e7] * 4 and not array.flags.owndata
        del array, block, work
    assert figures(store)[0] == 0
