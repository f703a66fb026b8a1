"""Destinations that are used again: unseen by any reader, limited in number, and with an id of their own each time."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.objectstore.heap_arrays import MIB, PROCESS, using
from zcactor.errors import NotInitialized, OutOfMemory
from zcactor.marshal.arrays import byte_bounds
from zcactor.objectstore.placement import Placements
from zcactor.objectstore.store import Block, Store
from zcactor.objectstore.table import LeaseTable

PEER, OTHER = b"p" * 16, b"o" * 16
KIB = 1024


@pytest.fixture
def places(store: Store) -> Placements:
    return Placements(store, 8 * MIB)


def second(places: Placements, nbytes: int = MIB, source: bytes = PEER) -> Block:
    """A block whose memory is kept; the first block of a size is not kept."""
    places.take(source, nbytes)
    return places.take(source, nbytes)


def test_the_first_of_a_size_is_not_kept(store: Store, places: Placements) -> None:
    places.take(PEER, MIB)
    assert store.stats().used == 0
    assert places.reused == 0


def test_reuse(store: Store, places: Placements) -> None:
    block = second(places)
    offset, used = block.offset, store.stats().used
    for count in range(1, 5):
        del block
        block = places.take(PEER, MIB)
        assert (block.offset, block.nbytes, places.reused) == (offset, MIB, count)
        assert store.stats().used == used


def test_every_object_has_an_id_of_its_own(store: Store, places: Placements) -> None:
    ids = set()
    for _ in range(50):
        block = places.take(PEER, MIB)
        ids.add(block.id)
        store.seal(block)
        store.export(block)
        assert store.lookup(block.id) is block
        last = block.id
        del block
        assert store.lookup(last) is None
    assert len(ids) == 50 and places.reused == 48


def test_a_new_object_is_a_draft(store: Store, places: Placements) -> None:
    block = second(places)
    store.seal(block)
    store.export(block)
    del block
    block = places.take(PEER, MIB)
    assert places.reused == 1
    assert not block.sealed and not block.exported and block.array is None
    assert np.asarray(block).flags.writeable


@pytest.mark.parametrize(
    "look",
    [
        lambda block: block,
        np.asarray,
        lambda block: np.asarray(block)[10:20].view("u2").reshape(5, 1),
        lambda block: np.asarray(block)[5:].data,
        lambda block: [{"deep": np.asarray(block)[:1]}],
    ],
)
def test_only_when_the_last_view_is_gone(places: Placements, look: Callable[[Block], Any]) -> None:
    block = second(places)
    offset = block.offset
    view = look(block)
    del block
    other = places.take(PEER, MIB)
    assert other.offset != offset and places.reused == 0
    del view
    assert places.take(PEER, MIB).offset == offset
    assert places.reused == 1


def test_leased_blocks_are_not_used_again(store: Store, places: Placements) -> None:
    leases = LeaseTable()
    block = second(places)
    offset, number = block.offset, block.id
    store.export(block)
    leases.grant(number, block)
    del block
    assert places.take(PEER, MIB).offset != offset
    assert store.lookup(number) is not None
    leases.release(number, 1)
    assert store.lookup(number) is None
    assert offset in {block.offset for block in [places.take(PEER, MIB), places.take(PEER, MIB)]}


def test_sizes_and_sources_are_apart(store: Store, places: Placements) -> None:
    kept = second(places).offset
    assert second(places, MIB, OTHER).offset != kept
    assert second(places, MIB + 64).offset != kept
    assert places.reused == 0
    assert places.take(PEER, MIB).offset == kept
    del store


def test_several_at_a_time(places: Placements) -> None:
    blocks = [places.take(PEER, MIB) for _ in range(5)]
    offsets = {block.offset for block in blocks[1:]}
    blocks.clear()
    blocks = [places.take(PEER, MIB) for _ in range(4)]
    assert {block.offset for block in blocks} == offsets and places.reused == 4
    assert len({block.id for block in blocks}) == 4


def test_bytes_are_kept_while_idle(places: Placements) -> None:
    block = second(places)
    np.asarray(block)[:] = 7
    del block
    assert (np.asarray(places.take(PEER, MIB)) == 7).all()


# ---- limits


def test_limit(store: Store) -> None:
    places = Placements(store, 3 * MIB)
    blocks = [second(places, MIB, bytes((number,)) * 16) for number in range(6)]
    blocks.clear()
    places.take(OTHER, 64)
    assert store.stats().used <= 3 * MIB
    assert places._idle_nbytes == 3 * MIB


def test_larger_than_the_limit(store: Store) -> None:
    places = Placements(store, MIB - 1)
    second(places)
    places.take(OTHER, 64)
    assert store.stats().used == 0


def test_limit_of_nothing(store: Store) -> None:
    places = Placements(store, 0)
    for _ in range(5):
        places.take(PEER, 64)
    places.take(OTHER, 128)
    assert places.reused == 0 and store.stats().used == 0


def test_many_sizes_are_forgotten(store: Store, places: Placements) -> None:
    second(places, 64)
    for nbytes in range(100, 100 + 1100):
        places.take(OTHER, nbytes)
    assert len(places._seen) == 1024
    places.take(PEER, 64)
    assert places.reused == 0, "the oldest was forgotten"
    assert store.stats().used == 0


def test_full_store_gives_idle_ones_up(store: Store) -> None:
    places = Placements(store, 64 * MIB)
    blocks = [places.take(PEER, 4 * MIB) for _ in range(12)]
    blocks.clear()
    places.take(OTHER, 64)
    assert store.stats().used >= 40 * MIB
    large = places.take(OTHER, 60 * MIB)
    assert store.stats().used >= large.nbytes == 60 * MIB
    assert places._idle_nbytes == 0
    del large


def test_full_store(store: Store, places: Placements) -> None:
    block = places.take(PEER, 40 * MIB)
    with pytest.raises(OutOfMemory):
        places.take(PEER, 40 * MIB)
    del block
    assert places.take(PEER, 40 * MIB).nbytes == 40 * MIB


def test_full_though_everything_idle_is_gone(store: Store) -> None:
    places = Placements(store, 64 * MIB)
    block = places.take(OTHER, 40 * MIB)
    second(places, 4 * MIB)
    with pytest.raises(OutOfMemory):
        places.take(PEER, 40 * MIB)
    assert store.stats().used == block.nbytes
    assert not places._idle_nbytes


def test_closed_store() -> None:
    made = Store(MIB, PROCESS)
    places = Placements(made, MIB)
    made.close()
    with pytest.raises(NotInitialized):
        places.take(PEER, 64)


def test_the_limit_holds_when_they_come_back(store: Store) -> None:
    """Blocks that come back are trimmed without a further request."""
    places = Placements(store, 8 * MIB)
    blocks = [places.take(PEER, 6 * MIB) for _ in range(8)]
    del blocks
    assert store.stats().used == places.idle_nbytes == 6 * MIB


def test_what_is_kept_makes_way_for_others(store: Store) -> None:
    places = Placements(store, 32 * MIB)
    for _ in range(2):
        blocks = [places.take(PEER, 6 * MIB) for _ in range(6)]
        del blocks
        assert places.idle_nbytes == 30 * MIB
        array = store.empty(40 * MIB, "u1")
        assert places.idle_nbytes == 0
        with pytest.raises(OutOfMemory):
            store.empty(40 * MIB, "u1")
        del array


@pytest.mark.parametrize("fits", [True, False])
def test_a_full_store_keeps_no_array_of_a_caller(store: Store, fits: bool) -> None:
    """A group that keeps the error keeps no frame by it, and nothing waits for the garbage collector."""
    places = Placements(store, 32 * MIB)
    failures: list[BaseException] = []

    def caller() -> None:
        array = store.empty(8 * MIB, "u1")
        assert array.flags.writeable
        try:
            store.empty((28 if fits else 60) * MIB, "u1")  # once the idle ones have been given up
        except OutOfMemory as error:
            failures.append(error.with_traceback(None))

    gc.disable()
    try:
        for _ in range(2):  # a destination is kept once its source has sent as much before
            blocks = [places.take(PEER, 6 * MIB) for _ in range(5)]
            del blocks
        assert places.idle_nbytes > 24 * MIB
        caller()
        assert len(failures) == (not fits) and places.idle_nbytes == 0
        assert store.stats().used == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [np.empty, np.zeros])
def test_what_is_kept_makes_way_for_numpy(store: Store, make: Any) -> None:
    places = Placements(store, 32 * MIB)
    with using(store.heap):
        blocks = [places.take(PEER, 6 * MIB) for _ in range(6)]
        del blocks
        array = make(40 * MIB, "u1")
        assert store.contains(*byte_bounds(array)) and places.idle_nbytes == 0
        other = make(40 * MIB, "u1")
        assert not store.contains(*byte_bounds(other)), "there is nothing more to be had"


def test_a_store_without_its_placements(store: Store) -> None:
    places = Placements(store, 32 * MIB)
    gone = ref(places)
    del places
    assert gone() is None
    with pytest.raises(OutOfMemory):
        store.empty(65 * MIB, "u1")


def test_one_that_is_lost_while_others_are_sorted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run anywhere: it must not wait for its own thread, nor leave anything behind."""
    places = Placements(store, 8 * MIB)
    blocks = [places.take(PEER, MIB) for _ in range(4)]
    sort = places._sort
    full: list[bool] = []

    def sort_and_lose() -> None:
        sort()
        if blocks:
            blocks.pop()
            full.append(places.give_up())

    monkeypatch.setattr(places, "_sort", sort_and_lose)
    places.clear()
    assert full == [False] * 4
    assert store.stats().used == 0 and not places._back


# ---- forgetting


def test_forget(store: Store, places: Placements) -> None:
    second(places)
    kept = second(places, MIB, OTHER).offset
    living = second(places, 2 * MIB)
    places.forget(PEER)
    assert store.stats().used == MIB + 2 * MIB
    del living
    assert places.take(OTHER, MIB).offset == kept
    assert store.stats().used == MIB, "what comes back from a process that is gone is not kept"
    places.forget(b"never seen")


def test_clear(store: Store, places: Placements) -> None:
    living = second(places)
    second(places, 2 * MIB)
    places.clear()
    assert store.stats().used == MIB
    del living
    assert store.stats().used == 0


def test_lost_on_other_threads(store: Store, places: Placements) -> None:
    for _ in range(20):
        block = [second(places, 64 * KIB) for _ in range(4)]
        threads = [threading.Thread(target=block.pop) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    places.clear()
    places.take(OTHER, 64)
    assert store.stats().used == 0


def test_a_destination_that_lives_until_the_interpreter_ends_says_nothing() -> None:
    program = (
        "import sys, types\n"
        "first = sys.modules['first'] = types.ModuleType('first')\n"  # its globals become None after placement's
        "from zcactor.objectstore import placement\n"
        "from zcactor.objectstore.store import Store\n"
        "sys.held = first, placement\n"
        f"store = Store({MIB}, {PROCESS!r})\n"
        "first.places = placement.Placements(store, store.capacity)\n"
        f"first.places.take({PEER!r}, 64)\n"
        f"first.block = first.places.take({PEER!r}, 64)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


class Model(RuleBasedStateMachine):
    """No two living objects share a byte, contents stay, ids differ, and idle bytes stay below the limit."""

    LIMIT = 256 * KIB

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(2 * MIB, PROCESS, extent_nbytes=MIB)
        self.places = Placements(self.store, self.LIMIT)
        self.living: dict[int, tuple[Block, int]] = {}
        self.ids: set[int] = set()

    @rule(source=st.sampled_from([PEER, OTHER]), nbytes=st.sampled_from([64, 4 * KIB, 100 * KIB, 257 * KIB]))
    def take(self, source: bytes, nbytes: int) -> None:
        try:
            block = self.places.take(source, nbytes)
        except OutOfMemory:
            assert not self.places._idle_nbytes
            return
        assert block.id not in self.ids and block.nbytes == nbytes
        self.ids.add(block.id)
        value = len(self.ids) % 251 + 1
        np.asarray(block)[:] = value
        self.living[block.id] = block, value

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.living[data.draw(st.sampled_from(sorted(self.living)))]

    @rule(source=st.sampled_from([PEER, OTHER]))
    def forget(self, source: bytes) -> None:
        self.places.forget(source)

    @rule()
    def clear(self) -> None:
        self.places.clear()

    @invariant()
    def living_ones_are_apart_and_whole(self) -> None:
        spans = sorted((block.offset, block.offset + block.nbytes) for block, _ in self.living.values())
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
        for block, value in self.living.values():
            root = np.asarray(block)
            assert root[0] == root[-1] == value

    @invariant()
    def no_more_is_kept_than_allowed(self) -> None:
        living = sum(-(-block.nbytes // 64) * 64 for block, _ in self.living.values())
        assert self.store.stats().used <= living + self.LIMIT
        assert 0 <= self.places._idle_nbytes <= self.LIMIT

    def teardown(self) -> None:
        self.living.clear()
        self.places.clear()
        assert self.store.stats().used == 0
        self.store.close()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
