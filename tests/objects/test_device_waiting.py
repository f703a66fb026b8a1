"""Waits of the loop for a fake GPU."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from tests.device.helpers import array_on, held, seen, settle
from zcactor.device.array import empty_array
from zcactor.device.store import DeviceStore, open_store
from zcactor.device.streams import GpuStream
from zcactor.errors import DeviceError
from zcactor.objects.device_waiting import copied, until_done
from zcactor.process.tasks import Tasks


class Kept:
    """An object that a copy keeps."""


def store(options: str = "") -> DeviceStore:
    """A device store on the running loop."""
    return open_store(f"fake:{options}", None, None, 0, asyncio.get_running_loop())


async def test_the_loop_goes_on_meanwhile() -> None:
    gpu = store().gpus[0]
    array, turns = array_on(gpu, np.zeros(10, "u1")), 0
    with held(gpu.driver):
        array.fill(1)
        waiting = asyncio.ensure_future(until_done(array.holder.work.writes()))
        while turns < 10:
            await asyncio.sleep(0)
            turns += 1
        assert not waiting.done()
    await waiting
    assert not array.holder.work.writes()


async def test_a_copy_keeps_memory_until_it_is_done() -> None:
    gpu, tasks = store().gpus[0], Tasks(asyncio.get_running_loop())
    values = np.arange(1000, dtype="u1")
    source, target, stream, kept = (
        array_on(gpu, values),
        empty_array(gpu, (1000,), values.dtype),
        GpuStream(gpu),
        Kept(),
    )
    alive = weakref.ref(kept)
    await until_done(source.holder.work.writes())
    with held(gpu.driver, stream.ptr):
        copying = asyncio.ensure_future(copied(tasks, gpu, stream.ptr, target.address, source.address, 1000, kept))
        del kept
        await asyncio.sleep(0)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        del copying
        settle(gpu.driver)
        gc.collect()
        assert alive() is not None
    while alive() is not None:
        await asyncio.sleep(0.001)
    assert np.array_equal(seen(target), values)


async def test_a_copy_that_is_refused() -> None:
    gpu, tasks = store("fail=copy").gpus[0], Tasks(asyncio.get_running_loop())
    array = empty_array(gpu, (1000,), np.dtype("u1"))
    with pytest.raises(DeviceError, match="copy on GPU 0 failed"):
        await copied(tasks, gpu, 0, array.address, array.address, 10, array)


async def test_a_copy_that_breaks_the_context() -> None:
    gpu, tasks = store("fail=fatal").gpus[0], Tasks(asyncio.get_running_loop())
    array = empty_array(gpu, (1000,), np.dtype("u1"))
    with pytest.raises(DeviceError) as caught:
        await copied(tasks, gpu, 0, array.address, array.address + 100, 10, array)
    assert caught.value.fatal
