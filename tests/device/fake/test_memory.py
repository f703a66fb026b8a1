"""The memory of fake GPUs: which bytes the engine may touch, and what is refused."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from zcactor.device.driver import PAGE_NBYTES, CudaCode, Refused
from zcactor.device.fake.memory import GRANULARITY, FakeMemory
from zcactor.device.fake.options import FakeOptions

NBYTES = GRANULARITY


def code(call: object) -> CudaCode:
    """The error with which a call is refused."""
    assert callable(call)
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code


def test_the_engine_reads_through_its_own_mapping() -> None:
    memory = FakeMemory(FakeOptions())
    base = memory.reserve(2 * NBYTES)
    memory.map(0, base, memory.create(0, NBYTES), NBYTES, True)
    engine = memory.engines(0, base + 10, 5, write=True)
    assert engine != base + 10
    ctypes.memmove(engine, b"hello", 5)
    assert ctypes.string_at(memory.engines(0, base + 10, 5, write=False), 5) == b"hello"
    memory.close()
    memory.close()


def test_pointers_of_the_host_stay() -> None:
    memory = FakeMemory(FakeOptions())
    buffer = ctypes.create_string_buffer(10)
    address = ctypes.addressof(buffer)
    assert memory.engines(0, address, 10, write=True) == address


@pytest.mark.parametrize(("at", "nbytes"), [(NBYTES - 1, 2), (NBYTES, 1), (3 * NBYTES - 1, 1)])
def test_bytes_that_are_not_mapped(at: int, nbytes: int) -> None:
    memory = FakeMemory(FakeOptions())
    base = memory.reserve(3 * NBYTES)
    memory.map(0, base, memory.create(0, NBYTES), NBYTES, True)
    assert code(lambda: memory.engines(0, base + at, nbytes, write=False)) == CudaCode.ILLEGAL_ADDRESS


@pytest.mark.parametrize("enforced", [True, False])
def test_writes_without_write_access(enforced: bool) -> None:
    memory = FakeMemory(FakeOptions(readonly=enforced))
    base = memory.reserve(NBYTES)
    assert memory.map(0, base, memory.create(0, NBYTES), NBYTES, False) == enforced
    memory.engines(0, base, 1, write=False)
    if enforced:
        assert code(lambda: memory.engines(0, base, 1, write=True)) == CudaCode.ILLEGAL_ADDRESS
    else:
        ctypes.memset(memory.engines(0, base, 1, write=True), 1, 1)


def test_the_other_gpu_is_out_of_reach() -> None:
    memory = FakeMemory(FakeOptions(devices=2, peer="none"))
    base = memory.reserve(2 * NBYTES)
    memory.map(0, base, memory.create(0, NBYTES), NBYTES, True)
    assert code(lambda: memory.engines(1, base, 1, write=False)) == CudaCode.ILLEGAL_ADDRESS
    handle = memory.create(0, NBYTES)
    assert code(lambda: memory.map(1, base + NBYTES, handle, NBYTES, True)) == CudaCode.PEER_ACCESS_UNSUPPORTED


def test_mappings_that_are_refused() -> None:
    memory = FakeMemory(FakeOptions())
    base = memory.reserve(3 * NBYTES)
    handle = memory.create(0, NBYTES)
    memory.map(0, base, handle, NBYTES, True)
    for address, nbytes in (
        (base, NBYTES),  # taken
        (base + 4096, NBYTES),  # not a multiple
        (base + NBYTES, 2 * NBYTES),  # another size
        (base + 3 * NBYTES, NBYTES),  # behind the reservation
        (4096, NBYTES),  # in no reservation
    ):
        assert code(lambda at=address, size=nbytes: memory.map(0, at, handle, size, True)) == CudaCode.INVALID_VALUE
    assert code(lambda: memory.unmap(base, 2 * NBYTES)) == CudaCode.INVALID_VALUE
    assert code(lambda: memory.unreserve(base, 3 * NBYTES)) == CudaCode.INVALID_VALUE  # it is not empty
    memory.unmap(base, NBYTES)
    assert code(lambda: memory.unreserve(base, NBYTES)) == CudaCode.INVALID_VALUE
    memory.unreserve(base, 3 * NBYTES)


def test_memory_is_counted_until_nothing_holds_it() -> None:
    memory = FakeMemory(FakeOptions(memory=3 * NBYTES))
    base = memory.reserve(NBYTES)
    handle = memory.create(0, NBYTES)
    memory.map(0, base, handle, NBYTES, True)
    memory.release(handle)
    assert memory.free(0) == 2 * NBYTES
    memory.unmap(base, NBYTES)
    assert memory.free(0) == 3 * NBYTES
    assert code(lambda: memory.create(0, 4 * NBYTES)) == CudaCode.OUT_OF_MEMORY


def test_an_import_is_another_handle_of_the_same_memory() -> None:
    memory, other = FakeMemory(FakeOptions()), FakeMemory(FakeOptions())
    handle, base, there = memory.create(0, NBYTES), memory.reserve(NBYTES), other.reserve(NBYTES)
    memory.map(0, base, handle, NBYTES, True)
    fd = memory.export(base, NBYTES)
    imported = other.import_(fd, NBYTES)
    assert code(lambda: other.import_(fd, 2 * NBYTES)) == CudaCode.INVALID_VALUE
    os.close(fd)
    other.map(0, there, imported, NBYTES, False)
    ctypes.memmove(memory.engines(0, base, 3, write=True), b"abc", 3)
    assert ctypes.string_at(other.engines(0, there, 3, write=False), 3) == b"abc"
    assert other.free(0) == FakeOptions().memory  # the owner's memory, not its own
    assert code(lambda: other.export(there, NBYTES)) == CudaCode.NOT_SUPPORTED


def test_a_card_gets_one_extent() -> None:
    memory = FakeMemory(FakeOptions())
    base = memory.reserve(2 * NBYTES)
    for number in range(2):
        memory.map(0, base + number * NBYTES, memory.create(0, NBYTES), NBYTES, True)
    fd = memory.dma_buf(base + NBYTES, NBYTES)
    assert os.fstat(fd).st_size == NBYTES
    os.close(fd)
    assert code(lambda: memory.dma_buf(base, 2 * NBYTES)) == CudaCode.NOT_SUPPORTED
    assert code(lambda: memory.dma_buf(base, PAGE_NBYTES)) == CudaCode.NOT_SUPPORTED  # a part
    assert code(lambda: memory.dma_buf(base + 1, NBYTES)) == CudaCode.INVALID_VALUE
    assert code(lambda: memory.dma_buf(base, 1)) == CudaCode.INVALID_VALUE
    assert code(lambda: FakeMemory(FakeOptions(dmabuf=False)).dma_buf(base, NBYTES)) == CudaCode.NOT_SUPPORTED


@pytest.mark.usefixtures("no_leftovers")
def test_nothing_is_left() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    memory = FakeMemory(FakeOptions(devices=8))
    base = memory.reserve(NBYTES)
    memory.map(7, base, memory.create(7, NBYTES), NBYTES, True)
    memory.create(7, NBYTES)
    assert "memfd:zcactor-gpu7" in Path("/proc/self/maps").read_text()
    memory.close()
    assert "memfd:zcactor-gpu7" not in Path("/proc/self/maps").read_text()
    assert sorted(os.listdir("/proc/self/fd")) == before
