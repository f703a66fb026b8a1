"""Moments of streams: order without waiting, and events that are used again."""

from __future__ import annotations

import pytest

from tests.conformance.device_peer import finish, mapped, read, until_done
from tests.device.helpers import NEVER, held, settle
from zcactor.device.events import OTHERS, EventPool, Moment, ordered, pending
from zcactor.device.fake import FakeGpuDriver
from zcactor.errors import DeviceError


def test_a_moment_is_done_with_its_work() -> None:
    driver = FakeGpuDriver()
    pool, address = EventPool(driver, 0), mapped(driver, 0, driver.granularity)
    with held(driver):
        driver.fill(0, address, b"a", 1, 0)
        moment = pool.record(0)
        assert pending([moment, None]) == [moment]
    until_done(driver, 0, moment.event)
    assert moment.done() and pending([moment]) == [] and not moment.is_lost()


@pytest.mark.parametrize("waits", ["yes", "no"])
def test_other_streams_are_ordered(waits: str) -> None:
    driver = FakeGpuDriver(f"waits={waits}")
    pool, address, stream = EventPool(driver, 0), mapped(driver, 0, driver.granularity), driver.stream(0)
    with held(driver):
        driver.fill(0, address, b"n", 3, 0)
        ordered([None, pool.record(0)], 0, stream)
        driver.copy(0, address + 8, address, 1, 3, (0, 0), stream)
        settle(driver)
    finish(driver, 0, stream)
    finish(driver, 0)
    assert (read(driver, 0, address + 8, 3) == b"nnn") is (waits == "yes")


def test_the_same_stream_needs_no_wait() -> None:
    driver = FakeGpuDriver("fail=wait")
    driver.hold(0, 0, NEVER)
    pool, address = EventPool(driver, 0), mapped(driver, 0, driver.granularity)
    driver.fill(0, address, b"a", 1, 0)
    moment = pool.record(0)
    moment.order(0, 0)
    with pytest.raises(DeviceError, match="wait on GPU 0"):
        moment.order(0, driver.stream(0))


def test_events_are_used_again() -> None:
    driver = FakeGpuDriver()
    pool = EventPool(driver, 0)
    for _ in range(1000):
        pool.record(0)
    assert pool.made == EventPool.STEP
    kept = [pool.record(0) for _ in range(EventPool.STEP + 1)]
    assert pool.made == 2 * EventPool.STEP and len({each.event for each in kept}) == len(kept)


@pytest.mark.parametrize("fail", ["event", "event:5", "record"])
def test_failures_lose_no_event(fail: str) -> None:
    driver = FakeGpuDriver(f"fail={fail}")
    pool = EventPool(driver, 0)
    with pytest.raises(DeviceError):
        pool.record(0)
    made = [pool.record(0) for _ in range(pool.made)]
    assert len({each.event for each in made}) == pool.made


def test_a_moment_of_another_process_keeps_its_event() -> None:
    driver = FakeGpuDriver()
    event = driver.event(0)
    Moment(None, driver, 0, event, OTHERS)
    assert driver.done(0, event)
