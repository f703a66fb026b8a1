"""Pinned ranges: memory that is registered with a network card stays. And growth, which the heap reports once."""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.objectstore.heap_arrays import EVERYTHING, LEAST, MIB, Array, taken, using
from zcactor.errors import OutOfMemory
from zcactor.objectstore.arena import GRANULE_NBYTES, Arena
from zcactor.objectstore.heap import Heap

CAPACITY = 64 * MIB


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(CAPACITY, extent_nbytes=16 * MIB)
    yield made
    made.close()


@pytest.fixture
def bell() -> Iterator[int]:
    """An eventfd."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield fd
    os.close(fd)


def rang(fd: int) -> int:
    """The number of writes to the eventfd since the last look."""
    return os.eventfd_read(fd) if select.select([fd], [], [], 0)[0] else 0


def data(fd: int) -> list[tuple[int, int]]:
    """The parts of the file that have memory behind them, in order."""
    parts: list[tuple[int, int]] = []
    position = 0
    while True:
        try:
            low = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data from there on
                raise
            return parts
        position = os.lseek(fd, low, os.SEEK_HOLE)
        parts.append((low, position))


def memory(arena: Arena) -> Array:
    """All bytes of the arena, through a mapping of their own."""
    return np.frombuffer(mmap.mmap(arena.fd, arena.nbytes), "u1")


def block(arena: Arena, nbytes: int, content: int) -> int:
    """Allocate a block that is full of `content`; return its offset."""
    offset = arena.heap.allocate(nbytes, 4096)
    arena.commit(offset, nbytes)
    memory(arena)[offset : offset + nbytes] = content
    return offset


def figures(heap: Heap) -> tuple[int, int, int]:
    """Pinned, committed and idle memory, in MiB."""
    return heap.pinned // MIB, heap.committed // MIB, heap.idle // MIB


# ---------------------------------------------------------------- pinned memory stays


def test_pinned_memory_survives_that_it_is_freed_and_trimmed(arena: Arena) -> None:
    heap = arena.heap
    offset = block(arena, 16 * MIB, 7)
    arena.pin(4 * MIB, 6 * MIB)
    heap.free(offset)
    assert figures(heap) == (6, 16, 10)
    assert heap.trim(0, EVERYTHING) == 10 * MIB
    assert data(arena.fd) == [(4 * MIB, 10 * MIB)] and taken(arena) == 6 * MIB
    assert (memory(arena)[4 * MIB : 10 * MIB] == 7).all(), "the same pages"
    assert figures(heap) == (6, 6, 0)
    assert heap.trim(0, EVERYTHING) == heap.trim(0, 1) == 0


def test_what_is_pinned_between_blocks_does_not_keep_trim_from_the_rest(arena: Arena) -> None:
    heap = arena.heap
    offset = block(arena, 32 * MIB, 1)
    for granule in range(0, 16, 2):
        arena.pin(granule * GRANULE_NBYTES, 1)
    heap.free(offset)
    assert heap.trim(0, 3 * GRANULE_NBYTES) == 3 * GRANULE_NBYTES, "from the top"
    assert data(arena.fd)[-1] == (28 * MIB, 30 * MIB)
    assert heap.trim(20 * MIB, EVERYTHING) == 6 * MIB
    assert heap.trim(0, EVERYTHING) == 4 * MIB and heap.trim(0, EVERYTHING) == 0
    assert data(arena.fd) == [(low * MIB, (low + 2) * MIB) for low in range(0, 32, 4)]


def test_whole_granules_are_pinned_once(arena: Arena) -> None:
    heap = arena.heap
    for _ in range(2):
        arena.pin(GRANULE_NBYTES - 1, 2)
        assert heap.pinned == taken(arena) == 2 * GRANULE_NBYTES
    arena.pin(CAPACITY, 0)
    arena.pin(0, 0)
    assert heap.pinned == 2 * GRANULE_NBYTES
    arena.pin(0, CAPACITY)
    assert heap.pinned == heap.committed == taken(arena) == CAPACITY


def test_the_last_granule_may_be_a_short_one() -> None:
    arena = Arena(9 * MIB)
    arena.pin(9 * MIB - 1, 1)
    assert arena.heap.pinned == arena.committed == taken(arena) == MIB
    arena.heap.free(block(arena, 9 * MIB, 1))
    assert arena.heap.trim(0, EVERYTHING) == 8 * MIB
    arena.close()


def test_a_free_range_is_populated_with_zeros(arena: Arena) -> None:
    arena.pin(20 * MIB, 4 * MIB)
    assert not memory(arena)[20 * MIB : 24 * MIB].any()
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"\n{arena.address:x}-")
    resident = next(line for line in after.splitlines() if line.startswith("Rss:"))
    assert resident.split()[1:] == ["4096", "kB"], "in the page table of the arena's own mapping"


def test_contents_of_blocks_in_use_stay(arena: Arena) -> None:
    low, high = block(arena, 3 * MIB, 1), block(arena, 9 * MIB, 2)
    arena.pin(0, CAPACITY)
    assert (memory(arena)[low : low + 3 * MIB] == 1).all() and (memory(arena)[high : high + 9 * MIB] == 2).all()
    assert not memory(arena)[high + 9 * MIB :].any()


def test_zeroed_memory_is_zero_where_pinned_memory_was_written_to(arena: Arena) -> None:
    arena.heap.free(block(arena, 16 * MIB, 7))
    arena.pin(2 * MIB, 6 * MIB)
    arena.heap.trim(0, EVERYTHING)
    with using(arena.heap):
        zeros = np.zeros(16 * MIB, "u1")
    assert zeros.ctypes.data == arena.address and not zeros.any()


def test_memory_beyond_what_was_handed_out_is_used_and_given_back_as_any(arena: Arena) -> None:
    heap = arena.heap
    arena.pin(40 * MIB, 8 * MIB)
    assert heap.largest_free == CAPACITY and heap.high == 0
    assert heap.trim(0, EVERYTHING) == 0
    heap.unpin_all()
    assert figures(heap) == (0, 8, 8)
    assert heap.trim(0, EVERYTHING) == 8 * MIB
    assert heap.allocate(CAPACITY) == 0


def test_what_a_resize_and_numpy_free_stays(arena: Arena) -> None:
    with using(arena.heap):
        array = np.full(16 * MIB, 3, "u1")
        arena.pin(0, CAPACITY)
        array.resize(4 * MIB, refcheck=False)
        assert figures(arena.heap) == (64, 64, 0)
        array.resize(20 * MIB, refcheck=False)
        del array
    assert arena.heap.trim(0, EVERYTHING) == 0
    assert (memory(arena)[: 4 * MIB] == 3).all() and data(arena.fd) == [(0, CAPACITY)]
    arena.heap.unpin_all()
    assert arena.heap.idle == arena.heap.trim(0, EVERYTHING) == CAPACITY


def test_unpinned_memory_is_given_back(arena: Arena) -> None:
    offset = block(arena, 8 * MIB, 1)
    arena.pin(0, 16 * MIB)
    arena.heap.unpin_all()
    arena.heap.unpin_all()
    assert figures(arena.heap) == (0, 16, 8)
    assert arena.heap.trim(0, EVERYTHING) == 8 * MIB
    arena.heap.free(offset)
    assert arena.heap.trim(0, EVERYTHING) == 8 * MIB


def test_a_commit_that_fails_takes_nothing_pinned_back() -> None:
    refuser: list[Heap] = []

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if refuser and offset + nbytes > 24 * MIB:
            refuser[0].pin(8 * MIB, 2 * MIB)  # as another thread might do at this moment
            raise OSError(errno.ENOSPC, "no memory")
        os.posix_fallocate(fd, offset, nbytes)

    arena = Arena(CAPACITY, fallocate=fallocate)
    heap = arena.heap
    offset = heap.allocate(28 * MIB)
    arena.pin(4 * MIB, 1)
    refuser.append(heap)
    with pytest.raises(OutOfMemory):
        arena.commit(offset, 28 * MIB)
    assert heap.pinned == 4 * MIB
    assert data(arena.fd) == [(0, 6 * MIB), (8 * MIB, 10 * MIB)], "what was committed before the refusal, and pinned"
    assert heap.committed == 8 * MIB
    refuser.clear()  # the garbage collector does not look into a heap
    arena.close()


# ---------------------------------------------------------------- refused calls


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, CAPACITY + 1), (CAPACITY, 1), (4096, -1)])
def test_a_range_outside_is_refused(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        arena.pin(offset, nbytes)
    assert arena.heap.pinned == 0


def test_a_heap_without_memory_pins_nothing() -> None:
    heap = Heap(-1, 0)
    heap.unpin_all()
    with pytest.raises(ValueError, match="not inside"):
        heap.pin(0, 1)


def test_no_more_is_pinned_than_before_when_the_system_has_no_memory() -> None:
    left = [6 * MIB]

    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if nbytes > left[0]:
            raise OSError(errno.ENOSPC, "no memory")
        left[0] -= nbytes
        os.posix_fallocate(fd, offset, nbytes)

    arena = Arena(CAPACITY, fallocate=fallocate)
    heap = arena.heap
    arena.pin(8 * MIB, 1)
    with pytest.raises(OutOfMemory) as caught:
        arena.pin(6 * MIB, 16 * MIB)
    assert caught.value.requested == 16 * MIB
    assert heap.pinned == heap.committed == taken(arena) == 2 * MIB, "what was taken on the way was given back"
    left[0] = CAPACITY
    arena.pin(6 * MIB, 16 * MIB)
    assert heap.pinned == 16 * MIB
    arena.close()


def test_what_lies_idle_is_given_back_before_pinning_fails() -> None:
    def fallocate(fd: int, offset: int, nbytes: int) -> None:
        if os.fstat(fd).st_blocks * 512 + nbytes > 16 * MIB:
            raise OSError(errno.ENOSPC, "no memory")
        os.posix_fallocate(fd, offset, nbytes)

    arena = Arena(CAPACITY, fallocate=fallocate)
    arena.heap.free(block(arena, 16 * MIB, 1))
    arena.pin(32 * MIB, 8 * MIB)
    assert data(arena.fd) == [(32 * MIB, 40 * MIB)]
    arena.close()


# ---------------------------------------------------------------- idle memory


def test_free_pinned_memory_is_not_idle(arena: Arena, bell: int) -> None:
    heap = arena.heap
    heap.watch(bell, 4 * MIB)
    offset = block(arena, 16 * MIB, 1)
    arena.pin(0, 24 * MIB)
    heap.free(offset)
    assert not rang(bell) and heap.idle == 0
    heap.free(block(arena, 30 * MIB, 1))
    assert rang(bell) == 1 and heap.idle == 6 * MIB
    heap.trim(0, EVERYTHING)
    heap.watch(bell, 4 * MIB)
    assert not rang(bell)
    heap.unpin_all()
    assert rang(bell) == 1, "now it is idle"


def test_idle_memory_is_told_from_used_and_pinned_to_the_byte(arena: Arena) -> None:
    heap = arena.heap
    first, second, third = (block(arena, nbytes, 1) for nbytes in (3 * MIB, 4 * MIB, 3 * MIB))
    arena.commit(0, 16 * MIB)
    arena.pin(5 * MIB, 4 * MIB)  # [4, 10) MiB: most of the second block, and all of the third
    assert heap.idle == 6 * MIB
    heap.free(second)
    assert heap.idle == 7 * MIB, "[3, 4) MiB"
    block(arena, 4096, 1)
    assert heap.idle == 7 * MIB - 4096, "at 3 MiB"
    heap.free(third)
    assert heap.idle == 7 * MIB - 4096
    heap.unpin_all()
    assert heap.idle == heap.committed - heap.used
    heap.free(first)
    arena.pin(0, 16 * MIB)
    assert heap.idle == 0


# ---------------------------------------------------------------- threads, the end, and forks


@pytest.mark.slow
def test_arrays_are_made_and_freed_and_trimmed_while_another_thread_pins(arena: Arena) -> None:
    heap = arena.heap
    over = threading.Event()

    def trim() -> None:
        while not over.is_set():
            heap.trim(0, EVERYTHING)

    thread = threading.Thread(target=trim)
    thread.start()
    try:
        for round_ in range(20):
            for low in range(0, 32 * MIB, 4 * MIB):
                heap.pin(low, 4 * MIB)
                with using(heap):
                    assert not np.zeros(3 * MIB + round_, "u1").any()
                    assert (np.full(5 * MIB, round_, "u1") == round_).all()
                assert data(arena.fd)[0][0] == 0 and data(arena.fd)[0][1] >= low + 4 * MIB
            heap.unpin_all()
    finally:
        over.set()
        thread.join()
    heap.trim(0, EVERYTHING)
    assert taken(arena) == heap.committed == 0


def test_closing_leaves_pinned_memory_until_it_is_unpinned() -> None:
    arena = Arena(CAPACITY)
    heap = arena.heap
    offset, other = block(arena, 8 * MIB, 1), block(arena, 8 * MIB, 2)
    fd = os.dup(arena.fd)
    try:
        arena.pin(0, 2 * MIB)
        arena.pin(8 * MIB, 2 * MIB)
        heap.free(other)
        arena.close()
        assert data(fd) == [(0, 10 * MIB)]
        with pytest.raises(ValueError, match="closed"):
            arena.pin(0, 1)
        heap.free(offset)
        assert arena.fd == -1 and data(fd) == [(0, 2 * MIB), (8 * MIB, 10 * MIB)]
        assert heap.pinned == heap.committed == 4 * MIB
        heap.unpin_all()
        assert data(fd) == [] and heap.committed == 0
    finally:
        os.close(fd)


def test_a_forked_child_has_nothing_pinned_and_takes_nothing_away(arena: Arena) -> None:
    offset = block(arena, 8 * MIB, 5)
    arena.pin(0, 8 * MIB)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert arena.heap.pinned == 0
            arena.heap.free(offset)
            arena.heap.unpin_all()
            assert arena.heap.trim(0, EVERYTHING) == 0
            try:
                arena.pin(0, 1)
            except ValueError:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert arena.heap.pinned == 8 * MIB and data(arena.fd) == [(0, 8 * MIB)]
    assert (memory(arena)[: 8 * MIB] == 5).all()


# ---------------------------------------------------------------- how far it is used


def test_high_is_the_end_of_the_highest_block_there_ever_was(arena: Arena) -> None:
    heap = arena.heap
    assert heap.high == 0
    first, second = heap.allocate(1000), heap.allocate(MIB, 4096)
    assert heap.high == second + MIB
    heap.free(second)
    heap.free(first)
    heap.allocate(64)
    assert heap.high == 4096 + MIB
    with using(heap):
        array = np.empty(3 * MIB, "u1")
        start = heap.high - 3 * MIB
        array.resize(4 * MIB, refcheck=False)
    assert array.ctypes.data == arena.address + start and heap.high == start + 4 * MIB


def test_growth_is_told_once(arena: Arena, bell: int) -> None:
    heap = arena.heap
    heap.watch_growth(bell, 8 * MIB)
    offset = heap.allocate(8 * MIB)
    assert not rang(bell), "up to the limit, and not beyond"
    heap.allocate(64)
    heap.allocate(MIB)
    assert rang(bell) == 1
    heap.watch_growth(bell, 8 * MIB)
    assert rang(bell) == 1, "it is so already"
    heap.free(offset)
    heap.watch_growth(bell, 16 * MIB)
    heap.allocate(8 * MIB)
    assert not rang(bell)
    with using(heap):
        np.ones(16 * MIB, "u1")
    assert rang(bell) == 1
    heap.watch_growth(bell, heap.high)
    heap.watch_growth(-1, 0)
    heap.allocate(30 * MIB)
    assert not rang(bell)


def test_growth_by_a_resize_is_told(arena: Arena, bell: int) -> None:
    with using(arena.heap):
        array = np.ones(LEAST, "u1")
        arena.heap.watch_growth(bell, MIB)
        array.resize(2 * MIB, refcheck=False)
    assert rang(bell) == 1


def test_a_closed_heap_tells_nothing(bell: int) -> None:
    arena = Arena(CAPACITY)
    arena.heap.allocate(MIB)
    arena.close()
    arena.heap.watch_growth(bell, 0)
    assert not rang(bell)
