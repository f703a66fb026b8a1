"""Graphs that a program captures: no call of ours invalidates one, and no work of ours becomes a part of one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import numpy as np
import pytest

from zcactor.errors import DeviceError

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.conformance.device_peer import mapped, write
from tests.device.cuda.stand_in import StandIn
from tests.device.helpers import held, looked_often, seen, settle
from zcactor.device.array import empty_array
from zcactor.device.cuda import CudaGpuDriver
from zcactor.device.driver import GpuDriver
from zcactor.device.events import EventPool
from zcactor.device.store import DeviceStore
from zcactor.device.streams import GpuStream, streams
from zcactor.device.tending import Tending
from zcactor.device.work import LibraryLoan, Work
from zcactor.testing import until

CALLS: dict[str, Callable[[GpuDriver, int, int], object]] = {
    "copy": lambda driver, address, stream: driver.copy(0, address, address + 100, 1, 8, (8, 8), stream),
    "fill": lambda driver, address, stream: driver.fill(0, address, b"a", 8, stream),
    "record": lambda driver, _, stream: driver.record(0, driver.event(0), stream),
    "wait": lambda driver, _, stream: driver.wait(0, stream, driver.event(0)),
    "idle": lambda driver, _, stream: driver.idle(0, stream),
}


def capturing(version: int = 13000) -> tuple[StandIn, CudaGpuDriver, int, int]:
    """CUDA's calls, the driver over them, memory, and a stream, which a program begins to capture."""
    calls = StandIn("devices=2", version)
    driver = CudaGpuDriver(calls)
    address, stream = mapped(driver, 0, driver.granularity), driver.stream(0)
    driver.record(0, driver.event(0), 0)
    calls.gpus.captured.add(calls._stream(stream))
    return calls, driver, address, stream


def test_memory_and_questions_invalidate_no_capture() -> None:
    calls, driver, address, _ = capturing()
    write(driver, 0, address, b"while it lasts")
    other, event = driver.stream(0), driver.event(0)
    driver.fill(0, mapped(driver, 0, driver.granularity), b"a", 1 << 20, other)
    driver.record(0, event, other)
    while not (driver.done(0, event) and driver.idle(0, other)):
        pass
    driver.end_event(0, event)
    driver.end_stream(0, other)
    driver.unmap(0, address, driver.granularity)
    assert driver.free(0) > 0
    assert calls.gpus.captures_are_valid
    assert calls.mode == calls.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL, "it is the program's"


def test_the_first_use_of_a_gpu_invalidates_no_capture() -> None:
    calls, driver, _, _ = capturing()
    mapped(driver, 1, driver.granularity)
    assert calls.gpus.captures_are_valid


def test_memory_stays_where_a_capture_hides_the_end_of_work() -> None:
    calls, driver, address, _ = capturing()
    other, event = driver.stream(0), driver.event(0)
    with held(calls.gpus, calls._stream(other)):
        driver.fill(0, address, b"a", 1 << 20, other)
        driver.record(0, event, other)
        driver.export_event(0, event)
        driver.close()
        del driver
        gc.collect()
        assert calls.gpus.owner_of(address), "the fill has yet to be done"
        assert calls.registered, "and the event to be set"
    settle(calls.gpus)
    assert calls.gpus._engines[0].broken is None
    calls.gpus.captured.clear()
    CudaGpuDriver(StandIn()).close()
    assert not calls.registered and calls.gpus.free(0) == calls.gpus.devices()[0].total, "the next end gives it back"


@pytest.mark.parametrize("seed", range(12))
def test_all_memory_is_given_back_or_none(seed: int) -> None:
    """A capture may begin behind the wait for all work."""
    calls = StandIn(f"captures=0.5,seed={seed}")
    driver = CudaGpuDriver(calls)
    extents = [mapped(driver, 0, driver.granularity) for _ in range(8)]
    driver.close()
    left = [address for address in extents if calls.gpus.owner_of(address)]
    assert left in ([], extents)
    assert bool(left) is bool(calls.retained)


@pytest.mark.parametrize("call", CALLS)
def test_a_stream_that_is_captured_is_refused(call: str) -> None:
    calls, driver, address, stream = capturing()
    with pytest.raises(DeviceError, match="captured into a graph") as caught:
        CALLS[call](driver, address, stream)
    assert not caught.value.fatal and calls.gpus.captures_are_valid
    calls.gpus.captured.clear()
    CALLS[call](driver, address, stream)


def test_an_array_that_is_used_while_the_current_stream_is_captured() -> None:
    calls = StandIn()
    loop = asyncio.new_event_loop()
    store = DeviceStore(CudaGpuDriver(calls), None, 0, loop)
    x, stream = empty_array(store.gpu(0), (10,), np.dtype("u1")), GpuStream(store.gpu(0))
    x.fill(1)
    token = streams.set({0: stream.ptr})
    calls.gpus.captured.add(calls._stream(stream.ptr))
    for use in (lambda: x.fill(2), x.copy, lambda: x.copy_from(np.zeros(10, "u1"))):
        with pytest.raises(DeviceError, match="before the capture or behind it"):
            use()
    assert calls.gpus.captures_are_valid
    calls.gpus.captured.clear()
    x.fill(3)
    assert seen(x).tolist() == [3] * 10
    streams.reset(token)
    loop.close()


@pytest.mark.parametrize("version", [12000, 13000])
async def test_bytes_on_streams_that_nobody_keeps_end_captures(version: int) -> None:
    """CUDA has no other call behind all work of a GPU. The page says so."""
    calls, driver, _, _ = capturing(version)
    tending, pool, work = Tending(asyncio.get_running_loop()), EventPool(driver, 0), Work()
    work.give(pool, -1, None, loan := LibraryLoan(None))
    called: list[bool] = []
    tending.when_done(work, lambda: called.append(True))
    await looked_often()
    assert not called and not calls.gpus.captures_are_valid
    calls.gpus.captured.clear()
    del loan
    await until(lambda: called, "it is called")


async def test_memory_waits_for_the_end_of_a_capture() -> None:
    calls, driver, _, stream = capturing()
    tending, pool, work = Tending(asyncio.get_running_loop()), EventPool(driver, 0), Work()
    work.give(pool, stream, "the keeper", work)
    called: list[bool] = []
    tending.when_done(work, lambda: called.append(True))
    await looked_often()
    assert not called and calls.gpus.captures_are_valid
    calls.gpus.captured.clear()
    await until(lambda: called, "it is called")
