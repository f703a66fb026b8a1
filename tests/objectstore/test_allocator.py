"""The native allocator and its model, against a dictionary of allocated blocks and against each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tests.objectstore.model import BestFitAllocator
from zcactor.errors import OutOfMemory
from zcactor.objectstore.allocator import Allocator
from zcactor.objectstore.heap import Heap

Make = Callable[[int], Any]


def heap(capacity: int) -> Any:
    made = Heap(-1, 0)
    if capacity:
        made.grow(0, capacity)
    return made


@pytest.fixture(params=[heap, BestFitAllocator], ids=["heap", "model"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def test_is_an_allocator(make: Make) -> None:
    allocator: Allocator = make(128)
    assert allocator.allocate(1) == 0


def test_sizes_are_rounded_up_to_the_alignment(make: Make) -> None:
    allocator = make(1 << 20)
    assert allocator.allocate(1) == 0
    assert allocator.allocate(65) == 64
    assert allocator.allocate(1, 4096) == 4096
    assert allocator.used == 64 + 128 + 4096
    assert len(allocator) == 3


def test_best_fit_prefers_the_smallest_hole_and_then_the_lowest(make: Make) -> None:
    allocator = make(4096)
    offsets = [allocator.allocate(nbytes) for nbytes in (256, 64, 128, 64, 128, 64)]
    for index in (0, 2, 4):
        allocator.free(offsets[index])
    assert allocator.allocate(128) == offsets[2]
    assert allocator.allocate(128) == offsets[4]
    assert allocator.allocate(128) == offsets[0]


def test_bytes_before_an_aligned_block_stay_free(make: Make) -> None:
    allocator = make(8192)
    assert allocator.allocate(64) == 0
    assert allocator.allocate(4096, 4096) == 4096
    assert allocator.largest_free == 4096 - 64
    assert allocator.allocate(64) == 64


def test_a_block_that_is_large_enough_but_badly_aligned_is_passed_over(make: Make) -> None:
    allocator = make(3 * 4096)
    first = allocator.allocate(64)
    hole = allocator.allocate(4096)
    allocator.allocate(64)
    allocator.free(hole)
    assert first == 0
    assert allocator.allocate(4096, 4096) == 2 * 4096


def test_out_of_memory_says_how_much_there_is(make: Make) -> None:
    allocator = make(1024)
    first = allocator.allocate(256)
    allocator.allocate(256)
    allocator.free(first)
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(600)
    error = caught.value
    assert (error.requested, error.used, error.capacity, error.largest_free) == (600, 256, 1024, 512)
    assert allocator.used == 256


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_block_is_refused(make: Make, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make(64).allocate(nbytes)


@pytest.mark.parametrize("alignment", [0, -64, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(make: Make, alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        make(64).allocate(1, alignment)


def test_freeing_what_is_not_allocated_is_refused(make: Make) -> None:
    allocator = make(1024)
    offset = allocator.allocate(64)
    for wrong in (offset + 64, offset + 1):
        with pytest.raises(ValueError, match="nothing is allocated"):
            allocator.free(wrong)
    allocator.free(offset)
    with pytest.raises(ValueError, match="nothing is allocated"):
        allocator.free(offset)


def test_extents_that_touch_act_as_one_and_others_do_not(make: Make) -> None:
    allocator = make(1024)
    assert allocator.tail_free == 1024
    allocator.grow(4096, 1024)
    assert (allocator.capacity, allocator.largest_free) == (2048, 1024)
    allocator.grow(1024, 1024)
    assert (allocator.capacity, allocator.largest_free) == (3072, 2048)
    assert allocator.allocate(2048) == 0
    assert allocator.tail_free == 1024
    allocator.allocate(1024)
    assert allocator.tail_free == 0


def test_the_tail_of_an_allocator_without_extents_is_empty(make: Make) -> None:
    allocator = make(0)
    assert (allocator.tail_free, allocator.largest_free, allocator.capacity) == (0, 0, 0)
    with pytest.raises(OutOfMemory):
        allocator.allocate(1)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 64), (960, 128), (-64, 64), (2048, 0), (1984, 64), (1900, 300)])
def test_an_extent_that_overlaps_or_is_empty_is_refused(make: Make, offset: int, nbytes: int) -> None:
    allocator = make(1024)
    allocator.grow(1984, 128)
    with pytest.raises(ValueError, match="extent"):
        allocator.grow(offset, nbytes)
    assert allocator.capacity == 1152


class Machine(RuleBasedStateMachine):
    """Allocations, frees and growth in any order."""

    blocks = Bundle("blocks")
    make: Make = staticmethod(heap)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make(8192)
        self.model: dict[int, int] = {}
        self.extents = [(0, 8192)]

    def gaps(self) -> list[tuple[int, int]]:
        """The ranges that must be free: the maximal ranges of the extents that the model does not use."""
        joined: list[list[int]] = []
        for start, stop in sorted(self.extents):
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        gaps = []
        for start, stop in joined:
            at = start
            for offset in sorted(offset for offset in self.model if start <= offset < stop):
                gaps.append((at, offset))
                at = offset + self.model[offset]
            gaps.append((at, stop))
        return [(start, stop) for start, stop in gaps if start < stop]

    @rule(target=blocks, nbytes=st.integers(1, 3000), alignment=st.sampled_from([1, 8, 64, 256, 4096]))
    def allocate(self, nbytes: int, alignment: int) -> int:
        size = -(-nbytes // alignment) * alignment
        fits = [
            (stop - start, -(-start // alignment) * alignment)
            for start, stop in self.gaps()
            if -(-start // alignment) * alignment + size <= stop
        ]
        if not fits:
            with pytest.raises(OutOfMemory):
                self.allocator.allocate(nbytes, alignment)
            return -1
        offset: int = self.allocator.allocate(nbytes, alignment)
        assert offset == min(fits)[1]
        self.model[offset] = size
        return offset

    @rule(offset=consumes(blocks))
    def free(self, offset: int) -> None:
        if offset in self.model:
            del self.model[offset]
            self.allocator.free(offset)
        else:
            with pytest.raises(ValueError, match="nothing is allocated"):
                self.allocator.free(offset)

    @rule(gap=st.sampled_from([0, 0, 512]), nbytes=st.sampled_from([64, 4096]))
    def grow(self, gap: int, nbytes: int) -> None:
        start = self.extents[-1][1] + gap
        self.extents.append((start, start + nbytes))
        self.allocator.grow(start, nbytes)

    @invariant()
    def accounts(self) -> None:
        gaps = self.gaps()
        last = self.extents[-1][1]
        assert self.allocator.used == sum(self.model.values())
        assert self.allocator.capacity == sum(stop - start for start, stop in self.extents)
        assert self.allocator.largest_free == max((stop - start for start, stop in gaps), default=0)
        assert self.allocator.tail_free == sum(stop - start for start, stop in gaps if stop == last)
        assert len(self.allocator) == len(self.model)

    @invariant()
    def no_overlap(self) -> None:
        blocks = sorted(self.model.items())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(blocks))


class ModelMachine(Machine):
    """The same machine for the model."""

    make: Make = staticmethod(BestFitAllocator)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModelMachine = ModelMachine.TestCase
TestModelMachine.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("operations", [30_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_heap_places_blocks_where_the_model_does(operations: int) -> None:
    rng = random.Random(operations)
    native, model = heap(0), BestFitAllocator()
    end = 0
    live: list[int] = []
    for _ in range(operations):
        if rng.random() < 0.55 or not live:
            nbytes = int(rng.lognormvariate(8, 3)) + 1
            alignment = rng.choice((64, 64, 64, 4096))
            try:
                expected = model.allocate(nbytes, alignment)
            except OutOfMemory:
                with pytest.raises(OutOfMemory):
                    native.allocate(nbytes, alignment)
                if end < 1 << 26:
                    native.grow(end, 1 << 20)
                    model.grow(end, 1 << 20)
                    end += 1 << 20
                continue
            assert native.allocate(nbytes, alignment) == expected
            live.append(expected)
        else:
            index = rng.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            offset = live.pop()
            native.free(offset)
            model.free(offset)
        assert (native.used, native.largest_free, native.tail_free, len(native)) == (
            model.used, model.largest_free, model.tail_free, len(model),
        )  # fmt: skip
    for offset in live:
        native.free(offset)
    assert (native.used, len(native), native.largest_free) == (0, 0, end)
