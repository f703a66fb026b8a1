"""The arena: sparse, sealed, committed before use, and mapped for as long as an object holds the mapping."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import resource
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from zcactor.errors import NotInitialized, OutOfMemory
from zcactor.objectstore.arena import GRANULE_NBYTES, Arena
from zcactor.objectstore.groups import default_capacity
from zcactor.objectstore.store import Store

MIB = 1 << 20


class Ledger:
    """A fallocate that records calls, and refuses from the `limit`-th byte on."""

    def __init__(self, limit: int = 1 << 62, code: int = errno.ENOSPC) -> None:
        self.calls: list[tuple[int, int]] = []
        self.limit = limit
        self.code = code

    def __call__(self, fd: int, offset: int, nbytes: int) -> None:
        if sum(length for _, length in self.calls) + nbytes > self.limit:
            raise OSError(self.code, os.strerror(self.code))
        os.posix_fallocate(fd, offset, nbytes)
        self.calls.append((offset, nbytes))


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(64 * MIB)
    yield made
    made.close()


def taken(arena: Arena) -> int:
    """Bytes of memory behind the arena, as the kernel counts them."""
    return os.fstat(arena.fd).st_blocks * 512


def test_a_new_arena_takes_no_memory(arena: Arena) -> None:
    assert (arena.nbytes, taken(arena), arena.committed) == (64 * MIB, 0, 0)
    assert not os.get_inheritable(arena.fd)


def test_the_capacity_is_rounded_up_to_pages() -> None:
    arena = Arena(1, extent_nbytes=5000)
    assert (arena.nbytes, arena.extent_nbytes) == (4096, 8192)
    assert os.fstat(arena.fd).st_size == 4096
    arena.close()


@pytest.mark.parametrize("capacity", [0, -1])
def test_an_empty_arena_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Arena(capacity)


def test_the_file_can_neither_shrink_nor_grow_but_gives_pages_back(arena: Arena) -> None:
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for nbytes in (arena.nbytes - 4096, arena.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, nbytes)


def test_bytes_are_shared_with_the_file(arena: Arena) -> None:
    arena.commit(4096, 3)
    ctypes.memmove(arena.address + 4096, b"abc", 3)
    assert os.pread(arena.fd, 3, 4096) == b"abc"


def test_commit_takes_whole_granules_once() -> None:
    ledger = Ledger()
    arena = Arena(9 * MIB, fallocate=ledger)
    arena.commit(100, 50)
    assert (taken(arena), ledger.calls) == (GRANULE_NBYTES, [(0, GRANULE_NBYTES)])
    arena.commit(0, GRANULE_NBYTES)
    arena.commit(GRANULE_NBYTES, 0)
    assert len(ledger.calls) == 1
    arena.commit(GRANULE_NBYTES - 1, 2)
    assert arena.committed == taken(arena) == 2 * GRANULE_NBYTES
    arena.commit(9 * MIB - 1, 1)
    assert ledger.calls[-1] == (8 * MIB, MIB)
    arena.commit(0, 9 * MIB)
    assert arena.committed == taken(arena) == 9 * MIB
    assert sum(nbytes for _, nbytes in ledger.calls) == 9 * MIB
    count = len(ledger.calls)
    arena.commit(0, 9 * MIB)
    assert len(ledger.calls) == count
    arena.close()


def test_a_large_commit_is_taken_in_parts_that_fit_together() -> None:
    ledger = Ledger()
    arena = Arena(64 * MIB, fallocate=ledger)
    arena.commit(0, 64 * MIB)
    position = 0
    for offset, nbytes in sorted(ledger.calls):
        assert offset == position
        assert nbytes <= 16 * MIB
        position += nbytes
    assert position == 64 * MIB
    arena.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 64 * MIB + 1), (64 * MIB, 1), (4096, -1)])
def test_a_range_outside_is_refused(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not inside"):
        arena.commit(offset, nbytes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM, errno.EFBIG])
def test_no_memory_is_an_exception_and_what_was_taken_is_given_back(code: int) -> None:
    ledger = Ledger(limit=40 * MIB, code=code)
    arena = Arena(128 * MIB, fallocate=ledger)
    arena.commit(0, 3 * MIB)
    with pytest.raises(OutOfMemory, match=os.strerror(code)) as caught:
        arena.commit(3 * MIB, 100 * MIB)
    error = caught.value
    assert (error.requested, error.used, error.capacity) == (100 * MIB, 4 * MIB, 128 * MIB)
    assert arena.committed == 4 * MIB
    # The granule at the end is not the caller's alone, and may keep its memory.
    assert 4 * MIB <= taken(arena) <= 4 * MIB + GRANULE_NBYTES
    ledger.limit = 1 << 62
    arena.commit(3 * MIB, 100 * MIB)
    assert arena.committed == taken(arena) == 104 * MIB
    arena.close()


def test_another_error_stays_what_it_is() -> None:
    arena = Arena(MIB, fallocate=Ledger(limit=0, code=errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        arena.commit(0, 1)
    assert not isinstance(caught.value, OutOfMemory)
    arena.close()


def test_a_file_size_limit_is_no_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OutOfMemory) as caught:
            Arena(2 * MIB)
        assert default_capacity([]) == MIB
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB - 1, hard))
        assert default_capacity([]) > MIB
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = "ulimit -f allows a file of 1,048,576 bytes, and the store is to have 2,097,152: raise that limit, "
    assert str(caught.value) == text + "or pass a smaller store_capacity to zc.init()"
    assert (caught.value.requested, caught.value.used) == (2 * MIB, 0)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_address_space_that_is_too_small_is_no_memory() -> None:
    with pytest.raises(OutOfMemory):
        Arena(1 << 60)


def test_threads_commit_at_once() -> None:
    arena = Arena(64 * MIB)
    barrier = threading.Barrier(4)

    def work(first: int) -> None:
        barrier.wait()
        for offset in range(first * MIB, 64 * MIB, 4 * MIB):
            arena.commit(offset, MIB)
            ctypes.memset(arena.address + offset, first + 1, MIB)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert arena.committed == taken(arena) == 64 * MIB
    for index in range(64):
        assert os.pread(arena.fd, MIB, index * MIB) == bytes([index % 4 + 1]) * MIB
    arena.close()


@pytest.mark.slow
def test_close_leaves_the_memory_to_whoever_holds_a_block() -> None:
    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return any(int(line.split("-")[0], 16) == address for line in maps)

    arena = Arena(MIB)
    arena.commit(0, 1)
    address, fd, hold = arena.address, arena.fd, arena.heap.take(1)
    arena.close()
    arena.close()
    os.fstat(fd)
    ctypes.memset(address, 7, MIB)
    assert ctypes.string_at(address, 1) == b"\7"
    del arena
    gc.collect()
    assert mapped()
    del hold
    assert not mapped()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_closed_arena_commits_nothing() -> None:
    arena = Arena(MIB)
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.commit(0, 1)


@pytest.mark.slow
def test_an_arena_that_is_dropped_closes_its_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(MIB)
    del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_arena_without_a_file() -> None:
    arena = Arena(16 << 20, seed=3)
    assert arena.fd == -1
    store = Store(16 << 20, b"p" * 16, arena=arena)
    array = store.empty(1 << 20, np.uint8)
    array[:] = 7
    assert arena.committed >= 1 << 20
    del array
    assert arena.heap.trim(0, 1 << 30) >= 1 << 20
    assert arena.committed == 0
    again = store.empty(1 << 20, np.uint8)
    assert not again.any()  # memory that went back comes back zero
    store.close()
    again[:] = 1  # the array stays valid
    with pytest.raises(NotInitialized):
        store.empty(1)
    with pytest.raises(OutOfMemory):
        arena.heap.take(1)


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_ids_of_an_arena_without_a_file_come_from_its_seed(seed: int) -> None:
    def numbers() -> list[int]:
        heap = Arena(1 << 20, seed=seed).heap
        return [heap.take(64).id for _ in range(200)]

    assert numbers() == numbers()
    assert len(set(numbers())) == 200
