"""Work stays in order where CUDA gives no help: handles that are handed out again, streams that end, streams that are
another one in each thread, and questions that the driver does not answer for now."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.conformance.device_peer import finish, mapped
from tests.device.foreigners import Interfaced
from tests.device.helpers import NEVER, array_on, held, looked_often, opened, seen, settle
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.driver import THREAD_STREAM
from zcactor.device.events import EventPool
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.foreign import known_array
from zcactor.device.memory import GpuMemory
from zcactor.device.streams import GpuStream, streams
from zcactor.device.tending import Tending
from zcactor.device.work import Work
from zcactor.errors import DeviceError
from zcactor.testing import until


@contextmanager
def on(stream: GpuStream) -> Iterator[None]:
    """Let work of arrays be queued on a stream."""
    token = streams.set({0: stream.ptr})
    try:
        yield
    finally:
        streams.reset(token)


def zeros(gpu: GpuMemory) -> DeviceArray:
    return array_on(gpu, np.zeros(100, "u1"))


# ---- handles


def copied_by_the_next_stream(waits: str) -> int:
    """A byte that a stream copies which has the handle of the one that writes it."""
    with opened(f"waits={waits}") as store:
        gpu = store.gpu(0)
        x, y, first = zeros(gpu), zeros(gpu), GpuStream(gpu)
        with held(store.driver, first.ptr):
            with on(first):
                x.fill(7)
            handle = first.ptr
            del first
            second = GpuStream(gpu)
            assert second.ptr == handle, "the fake hands handles out again, as CUDA does"
            with on(second):
                y.copy_from(x)
            settle(store.driver)
        second.synchronize()
        return int(seen(y)[0])


def test_a_handle_that_is_handed_out_again_is_another_stream() -> None:
    assert copied_by_the_next_stream("yes") == 7
    assert copied_by_the_next_stream("no") == 0


def test_a_library_may_get_the_handle_of_a_stream_of_ours() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        x, y, first = zeros(gpu), zeros(gpu), GpuStream(gpu)
        with held(store.driver, first.ptr):
            with on(first):
                x.fill(7)
            del first
            theirs = store.driver.stream(0)
            x.__dlpack__(stream=theirs)
            gpu.driver.copy(0, y.address, x.address, 1, 100, (100, 100), theirs)
            settle(store.driver)
        finish(store.driver, 0, theirs)
        assert seen(y)[0] == 7


def test_work_goes_on_that_is_left_on_a_stream_which_has_ended() -> None:
    driver = FakeGpuDriver()
    first = driver.stream(0)
    with held(driver, first):
        driver.fill(0, mapped(driver, 0, driver.granularity), b"a", 1, first)
        driver.end_stream(0, first)
        second = driver.stream(0)
        assert second == first and driver.idle(0, second)
        event = driver.event(0)
        driver.record_all(0, event)
        assert not driver.done(0, event), "the work of a stream without a handle is work of the GPU"
    while not driver.done(0, event):
        settle(driver)


# ---- streams that nobody here keeps


def test_a_librarys_stream_may_end() -> None:
    with opened() as store:
        gpu = store.gpu(0)
        x, theirs = zeros(gpu), store.driver.stream(0)
        capsule = x.__dlpack__(stream=theirs)
        with held(store.driver, theirs):
            gpu.driver.fill(0, x.address, b"\7", 100, theirs)
            store.driver.end_stream(0, theirs)
            assert len(x.holder.work.writes()) == 1, "what the library has queued comes first"
            settle(store.driver)
        assert seen(x)[0] == 7
        x.fill(8)
        del capsule
        assert seen(x)[0] == 8
        assert not x.holder.work.is_given, "nothing more comes of a capsule that is gone"


@pytest.mark.parametrize("ordered", [True, False])
def test_memory_is_used_again_after_the_work_of_streams_that_ended(ordered: bool) -> None:
    with opened() as store:
        gpu = store.gpu(0)
        x, theirs = empty_array(gpu, (100,), np.dtype("u1")), store.driver.stream(0)
        capsule = x.__dlpack__(stream=theirs if ordered else -1)
        address = x.address
        with held(store.driver, theirs):
            gpu.driver.fill(0, address, b"a", 100, theirs)
            store.driver.end_stream(0, theirs)
            del x, capsule
            gc.collect()
            y = empty_array(gpu, (100,), np.dtype("u1"))
            assert y.address == address
            y.fill(7)
            settle(store.driver)
        assert seen(y)[0] == 7


# ---- streams that are another one in each thread


def in_a_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_the_default_stream_of_a_thread_is_its_own() -> None:
    driver = FakeGpuDriver()
    address = mapped(driver, 0, driver.granularity)
    driver.hold(0, THREAD_STREAM, NEVER)
    driver.fill(0, address, b"a", 1, THREAD_STREAM)
    settle(driver)
    assert not driver.idle(0, THREAD_STREAM)
    idle: list[bool] = []
    in_a_thread(lambda: idle.append(driver.idle(0, THREAD_STREAM)))
    assert idle == [True]


@pytest.mark.parametrize("way", ["dlpack", "passed"])
def test_work_on_the_default_stream_of_another_thread_comes_first(way: str) -> None:
    gate = threading.Event()
    with opened() as store:
        gpu = store.gpu(0)
        x = zeros(gpu)

        def library() -> None:
            store.driver.hold(0, THREAD_STREAM, gate.is_set)  # type: ignore[attr-defined]
            capsules.append(x.__dlpack__(stream=THREAD_STREAM) if way == "dlpack" else None)
            gpu.driver.fill(0, x.address, b"\7", 100, THREAD_STREAM)
            if way == "passed":
                known_array(store, Interfaced(x.address, (100,), "|u1", stream=THREAD_STREAM))

        capsules: list[Any] = []
        in_a_thread(library)
        y, mine = zeros(gpu), GpuStream(gpu)
        with on(mine):
            y.copy_from(x)
        settle(store.driver)
        gate.set()
        assert seen(y)[0] == 7


# ---- questions that are not answered for now


def test_an_unanswered_question_is_no_yes() -> None:
    driver = FakeGpuDriver("refuse=0.9")
    pool = EventPool(driver, 0)
    moment = pool.record(0)
    while not moment.done():
        pass
    with held(driver):
        driver.fill(0, mapped(driver, 0, driver.granularity), b"a", 1, 0)
        moment = pool.record(0)
        assert not any(moment.done() for _ in range(100)) and not any(pool.is_idle(0) for _ in range(100))


def test_a_question_that_is_never_answered_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeGpuDriver()

    def refused(device: int, event: int) -> bool:
        raise DeviceError("done", 900, device, False, "the stream is capturing")

    moment = EventPool(driver, 0).record(0)
    monkeypatch.setattr(driver, "done", refused)
    assert not moment.done()
    monkeypatch.setattr("zcactor.device.events.PATIENCE", -1.0)
    with pytest.raises(DeviceError, match="the stream is capturing"):
        moment.done()


@pytest.mark.parametrize("given", [False, True])
def test_memory_is_not_used_again_before_the_answer(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as store:
        gpu, driver = store.gpu(0), store.driver
        stream = GpuStream(gpu)
        x = empty_array(gpu, (100,), np.dtype("u1"))
        address = x.address
        with held(driver, stream.ptr):
            with on(stream):
                if given:
                    _ = x.__cuda_array_interface__
                    gpu.driver.fill(0, address, b"a", 100, stream.ptr)
                else:
                    x.fill(1)

            def refused(*_: Any) -> bool:
                raise DeviceError("record", 900, 0, False, "the stream is capturing")

            with monkeypatch.context() as patch:
                for call in ("done", "idle", "record"):
                    patch.setattr(driver, call, refused)
                del x
                gc.collect()
                assert gpu.arena.used == 256 or not given, "what cannot be asked is in use"
                gpu.arena.tidy()
            y = empty_array(gpu, (100,), np.dtype("u1"))
            y.fill(7)
            settle(driver)
        stream.synchronize()
        assert seen(y)[0] == 7


async def test_a_call_waits_for_the_answer() -> None:
    driver = FakeGpuDriver("refuse=0.9")
    tending, pool = Tending(asyncio.get_running_loop()), EventPool(driver, 0)
    called: list[bool] = []
    with held(driver):
        driver.fill(0, mapped(driver, 0, driver.granularity), b"a", 1, 0)
        moment = pool.record(0)
        work = Work([moment])
        tending.when_done(work, partial(called.append, True))
        tending.when_done([moment], partial(called.append, True))
        await looked_often()
        assert not called
    await until(lambda: len(called) == 2, "both are called")
