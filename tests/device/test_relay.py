"""The relay: outcomes of work that depends on other processes, told to peers."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conformance.device_peer import mapped
from tests.device.helpers import held, opened
from zcactor.device import events, relay
from zcactor.device.driver import CudaCode
from zcactor.device.events import Moment
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.imports import OpenEvent
from zcactor.device.memory import GpuMemory
from zcactor.device.store import DeviceStore
from zcactor.errors import DeviceError
from zcactor.testing import until


def promised(gpu: GpuMemory) -> Moment:
    """Stands for another process's work."""
    return OpenEvent(gpu, gpu.driver.promise_event(gpu.index)).moment()


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """A descriptor that is closed after the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def tell(moment: Moment, done: bool) -> None:
    moment.driver.keep_promise(moment.device, moment.event, done)


async def looked_again(store: DeviceStore) -> None:
    """Wait until the relay has looked at all that was promised before."""
    gpu = store.gpus[0]
    work = promised(gpu)
    after = store.relay.promise(gpu, [work])
    tell(work, True)
    await until(after.done, "the relay tells an outcome")


@pytest.mark.parametrize("fail", ["", "fail=keep_promise:5"])
async def test_done_when_all_work_is(fail: str) -> None:
    with opened(fail) as store:
        gpu = store.gpus[0]
        first, second = promised(gpu), promised(gpu)
        after = store.relay.promise(gpu, [first, second])
        await looked_again(store)
        tell(first, True)
        await looked_again(store)
        assert not after.done() and not after.is_lost()
        with held(gpu.driver):
            own = gpu.events.record(0)
            last = store.relay.promise(gpu, [second, own])
            tell(second, True)
            await until(after.done, "its work is done")
            await looked_again(store)
            assert not last.done() and not last.is_lost()
        await until(last.done, "this process's own work is done")


async def test_lost_when_any_work_is() -> None:
    with opened() as store:
        gpu = store.gpus[0]
        first, second = promised(gpu), promised(gpu)
        after = store.relay.promise(gpu, [first, second])
        further = store.relay.promise(gpu, [after])
        tell(second, False)
        await until(lambda: after.is_lost() and further.is_lost(), "both are lost")
        assert not (after.done() or further.done() or first.is_lost())
        tell(first, True)
        await looked_again(store)
        assert after.is_lost()


async def test_lost_with_the_context() -> None:
    peer = FakeGpuDriver()
    with opened("fail=fatal") as store, closing(os.pidfd_open(os.getpid())) as process:
        gpu = store.gpus[0]
        with closing(gpu.driver.event_page()) as page:
            peer.add_event_page(page, process)
        after = store.relay.promise(gpu, [gpu.events.record(0), promised(gpu)])
        there = peer.open_event(0, gpu.driver.export_event(0, after.event))
        assert not peer.event_is_lost(0, there)
        gpu.driver.fill(0, mapped(gpu.driver, 0, gpu.driver.granularity), b"a", 1, 0)
        await until(lambda: peer.event_is_lost(0, there), "a broken context does no work")
        assert not peer.done(0, there)
    peer.close()


async def test_an_error_that_is_not_fatal_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PATIENCE", 0)
    with opened() as store:
        gpu = store.gpus[0]
        refused = list[bool]()

        def refuses(self: FakeGpuDriver, device: int, event: int) -> bool:
            refused.append(True)
            raise DeviceError("done", CudaCode.NOT_SUPPORTED, device)

        with held(gpu.driver):
            after = store.relay.promise(gpu, [gpu.events.record(0)])
            with monkeypatch.context() as patch:
                patch.setattr(FakeGpuDriver, "done", refuses)
                await until(lambda: len(refused) > 3, "it asks again")
            assert not after.is_lost()
        await until(after.done, "its work is done")


async def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened() as store:
        gpu = store.gpus[0]
        work = promised(gpu)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
            patch.setattr(threading.Thread, "start", refuses)
            store.relay.promise(gpu, [work])
        after = store.relay.promise(gpu, [work])
        tell(work, True)
        await until(after.done, "the next promise is kept")


async def test_a_thread_that_ends_by_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[type[BaseException]] = []

    def fails(*_: object) -> bool:
        raise ZeroDivisionError

    with opened() as store:
        gpu = store.gpus[0]
        work = promised(gpu)
        with monkeypatch.context() as patch:
            patch.setattr(relay, "_is_told", fails)
            patch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
            first = store.relay.promise(gpu, [work])
            await until(lambda: told == [ZeroDivisionError], "the thread has ended, and the defect is told")
        after = store.relay.promise(gpu, [work])
        tell(work, True)
        await until(lambda: first.done() and after.done(), "both promises are kept")
