"""Work on an object's bytes: reads come after writes, and writes after everything."""

from __future__ import annotations

import pytest

from zcactor.device.events import EventPool
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.work import Work
from zcactor.testing.device_peer import finish, mapped, read

pytestmark = pytest.mark.slow


def late(waits: str = "yes") -> tuple[FakeGpuDriver, EventPool, int, int]:
    """A driver, its events, an address, and a second stream."""
    driver = FakeGpuDriver(f"late=100,seed=1,waits={waits}")
    return driver, EventPool(driver, 0), mapped(driver, 0, driver.granularity), driver.stream(0)


def read_after_write(waits: str) -> bytes:
    driver, pool, address, stream = late(waits)
    work = Work()
    for byte in b"abc" if waits == "yes" else b"0123456789" * 2:  # without waits, it is far from its end then
        driver.fill(0, address, bytes((byte,)), 4, 0)
    work.has_written(pool.record(0))
    work.before_reading(0, stream)
    return read(driver, 0, address, 4, stream)


def write_after_read(waits: str) -> bytes:
    driver, pool, address, stream = late(waits)
    driver.fill(0, address, b"o", 4, 0)
    finish(driver, 0)
    work = Work()
    for _ in range(3 if waits == "yes" else 12):
        driver.copy(0, address + 100, address, 1, 4, (0, 0), stream)
    work.has_read(pool.record(stream))
    work.before_writing(0, 0)
    driver.fill(0, address, b"n", 4, 0)
    finish(driver, 0)
    finish(driver, 0, stream)
    return read(driver, 0, address + 100, 4)


def test_order() -> None:
    assert read_after_write("yes") == b"cccc"
    assert write_after_read("yes") == b"oooo"


def test_the_tests_of_order_fail_without_waits() -> None:
    assert read_after_write("no") != b"9999"
    assert write_after_read("no") != b"oooo"


def test_many_reads_keep_few_events() -> None:
    driver = FakeGpuDriver()
    pool, work = EventPool(driver, 0), Work()
    for _ in range(1000):
        work.has_read(pool.record(0))
        finish(driver, 0)
    assert len(work.all()) <= 16 and pool.made == EventPool.STEP


def test_a_write_takes_the_place_of_earlier_work() -> None:
    driver = FakeGpuDriver("late=20000")
    pool, address = EventPool(driver, 0), mapped(driver, 0, driver.granularity)
    driver.fill(0, address, b"a", 1, 0)
    first = pool.record(0)
    work = Work([first])
    assert work.writes() == work.all() == [first]
    work.has_read(pool.record(0))
    last = pool.record(0)
    work.has_written(last)
    assert work.all() == [last]
