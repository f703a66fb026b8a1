"""CuPy's memory from the store: for the tasks that want it, and for no others."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from typing import Any

import pytest

from tests.device.foreigners import library
from tests.device.helpers import held, opened
from zcactor.device.allocator import allocates_for_cupy
from zcactor.device.store import DeviceStore
from zcactor.device.streams import GpuStream, streams
from zcactor.errors import OutOfMemory

pytestmark = pytest.mark.slow


class Elsewhere:
    """An allocator that was set before."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.nbytes: list[int] = []

    def __call__(self, nbytes: int) -> Any:
        self.nbytes.append(nbytes)
        return self.cupy.cuda.MemoryPointer(self.cupy.cuda.UnownedMemory(4096, nbytes, None, 0), 0)


@pytest.fixture
def cupy() -> Any:
    """CuPy, whose allocator is as before after the test."""
    cupy = library("cupy")
    before = cupy.cuda.get_allocator()
    yield cupy
    cupy.cuda.set_allocator(before)


def block_of(store: DeviceStore, array: Any) -> Any:
    return store.gpu(0).block_at(array.data.ptr, array.data.ptr + array.nbytes)


def test_arrays_lie_in_the_store(cupy: Any) -> None:
    elsewhere = Elsewhere(cupy)
    cupy.cuda.set_allocator(elsewhere)
    with opened() as store:
        for shape in ((3, 4), (0,), ()):
            with allocates_for_cupy(store.gpus):
                array = cupy.empty(shape, "f4")
            assert array.data.ptr % 256 == 0 and array.shape == shape
            assert block_of(store, array) is array.data.mem._owner.holder
        assert store.used == 256  # of the last one
        view = array[None]
        del array
        gc.collect()
        assert store.used == 256
        del view
        gc.collect()
        assert store.used == 0 and elsewhere.nbytes == []
        assert cupy.empty(10, "f8").data.ptr == 4096 and elsewhere.nbytes == [80]


def test_blocks_within_blocks_and_other_allocators(cupy: Any) -> None:
    with opened() as first, opened() as second, allocates_for_cupy(first.gpus):
        with allocates_for_cupy(second.gpus):
            assert block_of(second, cupy.empty(3)) is not None
        with cupy.cuda.using_allocator(Elsewhere(cupy)):
            assert cupy.empty(3).data.ptr == 4096
            with pytest.raises(ValueError, match="allocator"), allocates_for_cupy(first.gpus):
                pass
        array = cupy.empty(3)
        assert block_of(first, array) is not None
        later = Elsewhere(cupy)
        cupy.cuda.set_allocator(later)  # the program changes its mind
        with allocates_for_cupy(first.gpus):
            assert block_of(first, cupy.empty(3)) is not None
    assert cupy.empty(3).data.ptr == 4096 and later.nbytes == [24]


async def test_tasks_of_one_thread(cupy: Any) -> None:
    cupy.cuda.set_allocator(Elsewhere(cupy))
    with opened() as store:
        inside, done = asyncio.Event(), asyncio.Event()

        async def uses() -> bool:
            with allocates_for_cupy(store.gpus):
                inside.set()
                await done.wait()
                return block_of(store, cupy.empty(3)) is not None

        task = asyncio.create_task(uses())
        await inside.wait()
        assert cupy.empty(3).data.ptr == 4096
        done.set()
        assert await task


def test_other_threads(cupy: Any) -> None:
    cupy.cuda.set_allocator(Elsewhere(cupy))
    seen: list[int] = []
    with opened() as store, allocates_for_cupy(store.gpus):
        thread = threading.Thread(target=lambda: seen.append(cupy.empty(3).data.ptr))
        thread.start()
        thread.join()
    assert seen == [4096]


def test_no_room(cupy: Any) -> None:
    with opened(capacity=4 << 20) as store, allocates_for_cupy(store.gpus):
        with pytest.raises(OutOfMemory):
            cupy.empty(5 << 20, "u1")
        assert block_of(store, cupy.empty(1 << 20, "u1")) is not None


def test_memory_waits_for_work_of_its_last_owner(cupy: Any) -> None:
    with opened() as store:
        gpu = store.gpu(0)
        stream = GpuStream(gpu)
        with held(store.driver, stream.ptr), allocates_for_cupy(store.gpus):
            token = streams.set({0: stream.ptr})
            array = cupy.empty(100, "u1")
            streams.reset(token)
            gpu.driver.fill(0, array.data.ptr, b"a", 100, stream.ptr)  # CuPy does so
            del array
            gc.collect()
            cupy.empty(100, "u1")  # on the default stream, which waits on the GPU
            gpu.driver.fill(0, gpu.arena.allocate(100).address, b"b", 100, 0)
            assert not gpu.events.is_idle(0)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with opened() as store, pytest.raises(ImportError, match="cupy"), allocates_for_cupy(store.gpus):
        pass
