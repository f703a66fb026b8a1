"""The block that an array lies in, and the arrays that sharing it makes read-only."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from zcactor.marshal.move import restore, retire
from zcactor.marshal.sharing import protect, share
from zcactor.objectstore.heap import use_handler
from zcactor.objectstore.store import Store

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[Store]:
    """A store that NumPy allocates in."""
    made = Store(32 * MIB, b"s" * 16)
    before = made.heap.use(65536)
    yield made
    use_handler(before)
    made.close()


def test_an_array_of_the_store_and_its_views_become_read_only(store: Store) -> None:
    array = store.empty(1000, "f8")
    block = share(store, array[10:20])
    assert block is not None and block is share(store, array) and block.sealed
    for one in (array, array[3:], array.reshape(10, 100)):
        with pytest.raises(ValueError, match="read-only"):
            one[...] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


def test_an_array_that_numpy_allocated_is_found_by_its_address(store: Store) -> None:
    array = np.ones((400, 400))
    assert array.flags.owndata
    view = array[5:, ::2]
    block = share(store, view)
    assert block is not None and block.nbytes == array.nbytes and block.sealed
    assert not view.flags.writeable and not array.flags.writeable and not array[1:].flags.writeable
    again = share(store, array)
    assert again is block
    number = block.id
    del block, again
    afresh = share(store, array.T)
    assert afresh is not None and afresh.id == number, "the memory keeps its id when nobody holds a block"


@pytest.mark.slow
def test_an_array_that_was_moved_since_keeps_what_it_has_instead(store: Store) -> None:
    """The view leads to the array, which then has two elements outside of the store."""
    array: Any = np.ones(10_000)
    view = array[::2]
    block = share(store, array)
    assert block is not None
    retire(array)
    assert share(store, view) is block
    store.take_over(block.offset)  # granting the view to a peer of another host does the same
    assert array.flags.owndata and array.nbytes == 16
    assert (view == 1).all() and not view.flags.writeable
    restore([array])
    assert (array == 1).all() and array.flags.owndata
    store.take_over(block.offset)
    assert not array.flags.owndata
    del array, block
    gc.collect()
    assert (view == 1).all() and store.stats().used
    del view
    gc.collect()
    assert not store.stats().used


def test_another_librarys_object_over_the_memory_is_found_too(store: Store) -> None:
    array = np.ones(100_000)
    foreign = np.frombuffer(array.data[100:].cast("B"), np.uint8)
    block = share(store, foreign, seal=False)
    assert block is not None and block.nbytes == array.nbytes


def test_what_lies_elsewhere_is_not_shared(store: Store) -> None:
    other = Store(MIB, b"o" * 16)
    elsewhere: list[Any] = [np.ones(10), np.frombuffer(bytearray(100_000), np.uint8), other.empty(1000, "f8")]
    for array in elsewhere:
        assert share(store, array) is None
        assert array.flags.writeable
    other.close()


def test_protect_reaches_the_owner_but_not_earlier_views() -> None:
    owner = np.zeros(10)
    earlier, later = owner[:5], owner[5:]
    protect(later)
    assert (owner.flags.writeable, later.flags.writeable, owner[1:].flags.writeable) == (False, False, False)
    assert earlier.flags.writeable, "NumPy has no way to reach it"
