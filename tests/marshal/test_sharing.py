"""The block that an array lies in, and the arrays that sharing it makes read-only."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from zcactor.marshal.move import restore, retire
from zcactor.marshal.sharing import reopen, share, share_at
from zcactor.native import hot
from zcactor.objectstore.heap import use_handler
from zcactor.objectstore.store import Block, Store

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
    assert share(store, array[10:20]) is None and array.flags.writeable, "a piece of an open array"
    block = share(store, array)
    assert isinstance(block, Block) and block is share(store, array[10:20]) and block.sealed
    for one in (array, array[3:], array.reshape(10, 100)):
        with pytest.raises(ValueError, match="read-only"):
            one[...] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


def test_a_view_that_is_the_only_object_over_its_owner_closes_it(store: Store) -> None:
    makers: list[Callable[[], Any]] = [
        lambda: np.arange(10_000.0).reshape(100, -1),
        lambda: np.ones((100, 200)).T,
        lambda: store.empty(20_000, "f8")[5:],
    ]
    for make in makers:
        array = make()
        block = share(store, array)
        assert isinstance(block, Block) and block.sealed and not array.flags.writeable
        assert not array[1:].flags.writeable and not array.base.flags.writeable


@pytest.mark.parametrize("look", [lambda x: x[1:], memoryview, lambda x: x.view(np.matrix), lambda x: x.ctypes, id])
def test_whatever_holds_the_owner_keeps_a_view_open(store: Store, look: Callable[[Any], Any]) -> None:
    owner = np.ones((200, 200))
    held = look(owner)
    view = owner[5:, ::2]
    assert share(store, view) is None and view.flags.writeable and owner.flags.writeable
    del owner
    assert (share(store, view) is None) == (type(held) is not int)


def test_an_array_that_numpy_allocated_is_found_by_its_address(store: Store) -> None:
    array = np.ones((400, 400))
    assert array.flags.owndata
    block = share(store, array)
    assert isinstance(block, Block) and block.nbytes == array.nbytes and block.sealed
    assert not array.flags.writeable and not array[1:].flags.writeable
    again = share(store, array[5:, ::2])
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
    assert isinstance(block, Block)
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


def test_another_librarys_object_over_the_memory_goes_by_reference_once_that_is_closed(store: Store) -> None:
    array = np.ones(100_000)
    foreign = np.frombuffer(array.data[100:].cast("B"), np.uint8)
    assert share(store, foreign) is None and foreign.flags.writeable
    block = share(store, array)
    assert isinstance(block, Block) and share(store, foreign) is block
    assert share_at(store, block.address, block.address + 8) is block


def test_what_was_closed_for_a_message_that_is_not_sent_is_opened_again(store: Store) -> None:
    for array in (np.ones(10_000), np.arange(10_000).reshape(100, -1), store.empty(10_000), store.empty(20_000)[1:]):
        closed: list[Any] = []
        block = share(store, array, closed)
        assert isinstance(block, Block) and not array.flags.writeable
        reopen(closed)
        array[...] = 1
        assert not block.sealed and array[1:].flags.writeable


@pytest.mark.parametrize("why", ["lent", "read-only"])
def test_what_could_not_be_written_to_before_is_not_opened(store: Store, why: str) -> None:
    for array in (np.ones(10_000), store.empty(10_000)):
        if why == "lent":
            assert hot.lend(array)
        else:
            array.flags.writeable = False
        closed: list[Any] = []
        assert share(store, array, closed) is not None
        reopen(closed)
        assert not array.flags.writeable


@pytest.mark.parametrize("relied", ["by another message", "by a peer"])
def test_what_others_rely_on_stays_closed(store: Store, relied: str) -> None:
    array = np.ones(10_000)
    closed: list[Any] = []
    block = share(store, array, closed)
    assert isinstance(block, Block)
    if relied == "by a peer":
        store.export(block)
    else:
        share(store, array, [])
    reopen(closed)
    assert block.sealed and not array.flags.writeable


class Passing(list[Any]):
    """The arrays that are opened again; at that moment another thread passes `array`."""

    def __init__(self, arrays: list[Any], store: Store, array: Any) -> None:
        super().__init__(arrays)
        self.other = threading.Thread(target=share, args=(store, array, []))

    def __iter__(self) -> Iterator[Any]:
        self.other.start()
        self.other.join(0.1)  # it ends now, or waits for this thread
        return super().__iter__()


def test_memory_that_another_thread_passes_while_it_is_opened_is_closed(store: Store) -> None:
    array = np.ones(10_000)
    closed: list[Any] = []
    block = share(store, array, closed)
    assert isinstance(block, Block)
    [(holder, token, arrays)] = closed
    passing = Passing(arrays, store, array)
    reopen([(holder, token, passing)])
    passing.other.join()
    assert block.sealed and not array.flags.writeable


def test_bytes_that_have_changed_are_another_object(store: Store) -> None:
    for array in (np.zeros(10_000), store.empty(10_000)):
        array[:] = 0
        before = array[:]
        block = share(store, array)
        assert isinstance(block, Block)
        assert block.as_sent(block.offset, 800) is block is block.as_sent(block.offset, 800)
        before[5] = 1
        changed = block.as_sent(block.offset, 800)
        assert changed.id != block.id and changed is block.as_sent(block.offset, 800) and changed.sealed
        before[5] = 2
        assert changed.as_sent(block.offset, 800).id not in (block.id, changed.id)


def test_what_lies_elsewhere_is_not_shared(store: Store) -> None:
    other = Store(MIB, b"o" * 16)
    elsewhere: list[Any] = [np.ones(10), np.frombuffer(bytearray(100_000), np.uint8), other.empty(1000, "f8")]
    for array in elsewhere:
        assert share(store, array) is None
        assert array.flags.writeable
    other.close()
