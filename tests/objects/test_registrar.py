"""Registering ahead of the heap's growth: the bytes, the moment, and the end."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor.objects.registrar import Registrar
from zcactor.objectstore.copies import CopyCounter
from zcactor.objectstore.store import Block, Store

STEP = 1 << 20


class Loop:
    """A loop that turns when the test says so."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Add a reader as asyncio's loop does."""
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> bool:
        """Remove a reader as asyncio's loop does."""
        return self.readers.pop(fd, None) is not None

    def read(self) -> bool:
        """Call the readers with readable descriptors; return whether there was one."""
        ready, _, _ = select.select(list(self.readers), [], [], 0)
        for fd in ready:
            self.readers[fd]()
        return bool(ready)


class Extents:
    """A record of registrations, rounded as the table of extents rounds them."""

    extent_nbytes = STEP
    registrations = 0

    def __init__(self) -> None:
        self.copied: Callable[[int], None] = print
        self.brought: Callable[[int], None] = print
        self.asked: list[tuple[int, int]] = []

    def ahead(self, offset: int, nbytes: int) -> None:
        """See `zcactor.transport.verbs.device.registration_cache.ExtentTable`."""
        assert offset >= 0 < nbytes
        self.asked.append((offset, nbytes))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The registered spans, from start to stop, each in one region."""
        return [(low // STEP * STEP, -(-(low + nbytes) // STEP) * STEP) for low, nbytes in self.asked]

    def covers(self, low: int, high: int) -> bool:
        """Whether one region covers all of the span."""
        return any(start <= low and high <= stop for start, stop in self.spans)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(64 * STEP, bytes(16), extent_nbytes=4096)
    yield made
    made.close()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def extents() -> Extents:
    return Extents()


@pytest.fixture
def registrar(store: Store, loop: Any, extents: Extents) -> Iterator[Registrar]:
    made = Registrar(store.heap, loop, extents, CopyCounter())
    yield made
    made.close()


def test_the_first_extent_at_once(registrar: Registrar, extents: Extents, loop: Loop) -> None:
    assert extents.spans == [(0, STEP)]
    assert not loop.read()


def test_what_is_there_already(store: Store, loop: Any, extents: Extents) -> None:
    block = store.allocate(3 * STEP + 5)
    registrar = Registrar(store.heap, loop, extents, CopyCounter())
    assert extents.covers(block.offset, block.offset + block.nbytes)
    assert len(extents.asked) == 1
    registrar.close()


def test_nothing_while_it_suffices(registrar: Registrar, store: Store, extents: Extents, loop: Loop) -> None:
    blocks = [store.allocate(STEP // 10) for _ in range(9)]
    assert not loop.read() and len(extents.asked) == 1
    blocks.append(store.allocate(STEP // 5))
    assert loop.read() and len(extents.asked) == 2
    assert not loop.read()


def test_one_region_around_a_large_block(registrar: Registrar, store: Store, extents: Extents, loop: Loop) -> None:
    small = store.allocate(STEP // 2)
    large = store.allocate(5 * STEP)
    assert loop.read()
    assert extents.covers(large.offset, large.offset + large.nbytes)
    again = store.allocate(STEP // 2)
    while loop.read():
        pass
    assert extents.covers(again.offset, again.offset + again.nbytes)
    del small


def test_block_that_is_gone_before_anyone_looks(
    registrar: Registrar, store: Store, extents: Extents, loop: Loop
) -> None:
    store.allocate(5 * STEP)
    assert loop.read()
    assert extents.covers(STEP, 5 * STEP), "the next block of that size will lie there"
    assert not loop.read()


def test_grown_while_it_was_looking(registrar: Registrar, store: Store, extents: Extents, loop: Loop) -> None:
    """A block that another thread takes between reading the mark and watching it is reported all the same."""
    blocks = [store.allocate(2 * STEP)]
    ahead = extents.ahead

    def late(offset: int, nbytes: int) -> None:
        extents.ahead = ahead  # type: ignore[method-assign]
        ahead(offset, nbytes)
        blocks.append(store.allocate(3 * STEP))

    extents.ahead = late  # type: ignore[method-assign]
    assert loop.read()
    assert loop.read()
    assert extents.covers(blocks[1].offset, blocks[1].offset + blocks[1].nbytes)


def test_end_on_a_boundary(registrar: Registrar, store: Store, extents: Extents, loop: Loop) -> None:
    first = store.allocate(STEP)
    assert first.offset + first.nbytes == store.heap.high == STEP
    assert not loop.read()
    second = store.allocate(64)
    assert loop.read() and extents.spans == [(0, STEP), (STEP, 2 * STEP)]
    del first, second


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * STEP), st.booleans(), st.booleans()), max_size=15))
def test_every_block_is_covered(acts: list[tuple[int, bool, bool]]) -> None:
    store, loop, extents = Store(64 * STEP, bytes(16), extent_nbytes=4096), Loop(), Extents()
    registrar = Registrar(store.heap, loop, extents, CopyCounter())  # type: ignore[arg-type]
    blocks: list[Block] = []
    for nbytes, freed, turn in acts:
        if freed and blocks:
            del blocks[nbytes % len(blocks)]
        blocks.append(store.allocate(nbytes))
        if turn:
            loop.read()
    while loop.read():
        pass
    stop = max((block.offset + block.nbytes for block in blocks), default=0)
    ends = sorted(extents.spans)
    reached = 0
    for low, high in ends:
        assert low <= reached, "a hole"
        reached = max(reached, high)
    assert reached >= max(stop, 1)
    registrar.close()
    store.close()


def test_close(registrar: Registrar, store: Store, extents: Extents, loop: Loop) -> None:
    (fd,) = loop.readers
    registrar.close()
    registrar.close()
    assert not loop.readers
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    keep = store.allocate(5 * STEP)
    assert len(extents.asked) == 1
    del keep


def test_abandon(registrar: Registrar, loop: Loop) -> None:
    (fd,) = loop.readers
    registrar.abandon()
    registrar.abandon()
    assert fd in loop.readers, "the loop is the parent's"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    registrar.close()
