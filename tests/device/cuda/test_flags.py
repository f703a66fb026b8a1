"""Events that processes share, over the stand-in for CUDA: records that overlap, and processes that end."""

from __future__ import annotations

import os
import threading

import pytest

from tests.conformance.device_peer import DevicePeer, finish, mapped, read, until_done
from zcactor.errors import DeviceError

pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
from tests.device.cuda.stand_in import StandIn, opened_cuda, opened_held
from tests.device.helpers import held, settle
from zcactor.device.cuda import CudaGpuDriver


def test_an_event_recorded_again_before_its_work_is_done() -> None:
    driver = opened_cuda()
    calls = driver._api
    slow, fast, third = driver.stream(0), driver.stream(0), driver.stream(0)
    event, address = driver.event(0), mapped(driver, 0, driver.granularity)
    driver.fill(0, address, b"0", 100, 0)
    finish(driver, 0)
    with held(calls.gpus, calls._stream(slow)):
        driver.record(0, event, slow)
        driver.wait(0, third, event)
        driver.fill(0, address, b"1", 100, third)
        assert not driver.done(0, event)
        driver.record(0, event, fast)
        until_done(driver, 0, event)  # that of the last record alone
        assert read(driver, 0, address, 4) == b"0000", "a wait is for the record before it"
    finish(driver, 0, third)
    assert read(driver, 0, address, 4) == b"1111"
    finish(driver, 0, slow)
    assert driver.done(0, event), "the earlier record, done later, changes nothing"
    driver.end_event(0, event)


def test_an_event_given_up_before_its_work_is_done() -> None:
    driver = opened_cuda()
    calls = driver._api
    stream = driver.stream(0)
    with DevicePeer(opened_cuda) as peer, held(calls.gpus, calls._stream(stream)):
        peer.share_events(driver)
        event = driver.event(0)
        driver.record(0, event, stream)
        opened = peer.call("open_event", 0, driver.export_event(0, event))
        driver.end_event(0, event)
        others = [driver.event(0) for _ in range(200)]
        for each in others:
            driver.record(0, each, 0)
            driver.export_event(0, each)
        finish(driver, 0)
        assert not peer.call("done", 0, opened), "no other event had its place"
    finish(driver, 0, stream)
    assert all(driver.done(0, each) for each in others)


def test_an_exported_event_holds_no_other_back() -> None:
    driver = opened_cuda()
    calls, slow = driver._api, driver.stream(0)
    with DevicePeer(opened_cuda) as peer, held(calls.gpus, calls._stream(slow)):
        peer.share_events(driver)
        late, early = driver.event(0), driver.event(0)
        driver.record(0, late, slow)
        there = peer.call("open_event", 0, driver.export_event(0, late))
        driver.record(0, early, 0)
        other = peer.call("open_event", 0, driver.export_event(0, early))
        peer.call("wait", 0, 0, other)
        peer.call("finish", 0, 0)
        assert peer.call("done", 0, other) and not peer.call("done", 0, there)


@pytest.mark.slow
def test_streams_go_on_when_a_process_ends() -> None:
    driver = opened_cuda()
    calls, stream = driver._api, driver.stream(0)
    finish(driver, 0)
    calls.gpus.event(0)
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with DevicePeer(opened_held) as peer, DevicePeer(opened_cuda) as third:
        peer.share_events(driver)
        with peer.event_page() as page:
            third.call("know_events", -1, peer.process.pid, fd=page.fileno())
        event = peer.call("event", 0)
        peer.call("record", 0, event, 0)
        exported = peer.call("export_event", 0, event)
        opened, there = driver.open_event(0, exported), third.call("open_event", 0, exported)
        driver.wait(0, stream, opened)
        settle(calls.gpus)
        assert not driver.idle(0, stream) and not driver.event_is_lost(0, opened)
        peer.kill()
        finish(driver, 0, stream)
        assert driver.event_is_lost(0, opened) and not driver.done(0, opened)
        assert third.call("event_is_lost", 0, there) and not third.call("done", 0, there)
        driver.wait(0, stream, opened)
        finish(driver, 0, stream)
        driver.end_event(0, opened)
        third.share_events(driver)
        with pytest.raises(DeviceError, match="whose page is known"):
            driver.open_event(0, exported)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 6, "an epoll, its end, two pages and a process are left"
    assert threading.active_count() <= threads + 1
    driver.close()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.slow
def test_a_page_is_kept_until_all_streams_have_passed_it() -> None:
    driver = opened_cuda()
    calls, stream = driver._api, driver.stream(0)
    with DevicePeer(opened_held) as peer, DevicePeer(opened_cuda) as another:
        peer.share_events(driver)
        event = peer.call("event", 0)
        peer.call("record", 0, event, 0)
        opened = driver.open_event(0, peer.call("export_event", 0, event))
        finish(driver, 0)
        pinned = len(calls.registered)
        with held(calls.gpus, calls._stream(stream)):
            driver.wait(0, stream, opened)
            driver.end_event(0, opened)
            peer.kill()
            another.share_events(driver)
            driver.open_event(0, another.call("export_event", 0, another.call("event", 0)))
            assert len(calls.registered) == pinned + 1, "the GPU will read there"
        finish(driver, 0, stream)
        driver.open_event(0, another.call("export_event", 0, another.call("event", 0)))
        assert len(calls.registered) == pinned


def test_memory_that_cannot_be_pinned() -> None:
    driver = opened_cuda("fail=pin")
    event = driver.event(0)
    with pytest.raises(DeviceError, match="cuMemHostRegister"):
        driver.export_event(0, event)
    assert len({driver.export_event(0, event) for _ in range(3)}) == 1


def test_a_record_that_is_refused() -> None:
    calls = StandIn()
    driver = CudaGpuDriver(calls)
    event = driver.event(0)
    with pytest.raises(DeviceError):
        driver.record(0, event, 99 << 16)
    assert driver.done(0, event)
