"""Work on an object's bytes: reads come after writes, and writes after everything."""

from __future__ import annotations

import pytest

from tests.conformance.device_peer import finish, mapped, read, write
from tests.device.helpers import NEVER, held, opened, settle
from zcactor.device.events import EventPool
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.imports import OpenEvent
from zcactor.device.work import Work, lend, lent_others, looks
from zcactor.errors import ObjectLost


def late(waits: str) -> tuple[FakeGpuDriver, EventPool, int, int]:
    """A driver, its events, an address with old bytes, and a second stream."""
    driver = FakeGpuDriver(f"waits={waits}")
    address = mapped(driver, 0, driver.granularity)
    write(driver, 0, address, b"oooo")
    return driver, EventPool(driver, 0), address, driver.stream(0)


def read_after_write(waits: str) -> bytes:
    """The bytes that a second stream reads, whose turn it is before the work of the first is done."""
    driver, pool, address, stream = late(waits)
    work = Work()
    with held(driver):
        for byte in b"abn":
            driver.fill(0, address, bytes((byte,)), 4, 0)
        work.has_written(pool.record(0), whole=True)
        work.before_reading(0, stream)
        driver.copy(0, address + 100, address, 1, 4, (0, 0), stream)
        settle(driver)
    finish(driver, 0, stream)
    finish(driver, 0)
    return read(driver, 0, address + 100, 4)


def write_after_read(waits: str) -> bytes:
    """The bytes that a second stream reads, whose turn it is after the first has something new to write."""
    driver, pool, address, stream = late(waits)
    work = Work()
    with held(driver, stream):
        driver.copy(0, address + 100, address, 1, 4, (0, 0), stream)
        work.has_read(pool.record(stream))
        work.before_writing(0, 0)
        driver.fill(0, address, b"n", 4, 0)
        settle(driver)
    finish(driver, 0)
    finish(driver, 0, stream)
    return read(driver, 0, address + 100, 4)


def test_order() -> None:
    assert read_after_write("yes") == b"nnnn"
    assert write_after_read("yes") == b"oooo"


def test_the_tests_of_order_fail_without_waits() -> None:
    assert read_after_write("no") == b"oooo"
    assert write_after_read("no") == b"nnnn"


def test_work_of_libraries_counts_as_writes_until_sealed() -> None:
    driver = FakeGpuDriver()
    pool, address, stream = EventPool(driver, 0), mapped(driver, 0, driver.granularity), driver.stream(0)
    work = Work()
    work.give(pool, stream, "the keeper", work)
    assert work.is_given and work.writes() == work.all() == []
    with held(driver, stream):
        driver.fill(0, address, b"a", 4, stream)
        assert len(work.writes()) == len(work.all()) == 1
        work.seal()
        (before,) = work.writes()
        driver.fill(0, address, b"b", 4, stream)
        work.seal()
        assert work.writes() == [before] and len(work.all()) == 2
    assert Work(sealed=True).writes() == []


def test_many_reads_keep_few_events() -> None:
    driver = FakeGpuDriver()
    pool, work = EventPool(driver, 0), Work()
    for _ in range(1000):
        work.has_read(pool.record(0))
        finish(driver, 0)
    assert len(work.all()) <= 16 and pool.made == EventPool.STEP


def test_a_write_takes_the_place_of_earlier_work() -> None:
    driver = FakeGpuDriver()
    driver.hold(0, 0, NEVER)
    pool, address = EventPool(driver, 0), mapped(driver, 0, driver.granularity)
    driver.fill(0, address, b"a", 1, 0)
    first = pool.record(0)
    work = Work([first])
    assert work.writes() == work.all() == [first]
    work.has_read(pool.record(0))
    last = pool.record(0)
    work.has_written(last, whole=True)
    assert work.all() == [last]


def test_bytes_that_are_lost_are_read_by_nobody_until_all_are_written_again() -> None:
    with opened() as store:
        gpu = store.gpus[0]
        event = OpenEvent(gpu, gpu.driver.promise_event(0))
        work = Work()
        work.has_written(gpu.events.record(0), [event.moment()], whole=True)
        assert [each.key for each in work.before_reading(0, 0)] == [event.moment().key]
        gpu.driver.keep_promise(0, event.event, False)
        work.has_written(gpu.events.record(0), whole=False)
        for read_them in (lambda: work.before_reading(0, 0), work.writes, work.seal):
            with pytest.raises(ObjectLost, match="compute the value again"):
                read_them()
        assert len(work.all()) == 1, "the memory waits for this process's work alone"
        work.has_written(gpu.events.record(0), whole=True)
        work.before_reading(0, 0)
        work.seal()


def test_a_wait_for_several_ends_with_any_loss() -> None:
    with opened() as store:
        gpu = store.gpus[0]
        events = [OpenEvent(gpu, gpu.driver.promise_event(0)) for _ in range(2)]
        waiting = looks((event.moment() for event in events), 0, 0)
        next(waiting)
        gpu.driver.keep_promise(0, events[1].event, False)
        with pytest.raises(ObjectLost):
            next(waiting)


def test_work_of_others_is_noted_once() -> None:
    with opened() as store:
        gpu = store.gpus[0]
        event = OpenEvent(gpu, gpu.driver.promise_event(0))
        first, second = Work(), Work()
        first.comes_after(event.moment())
        for _ in range(20):
            second.has_written(gpu.events.record(0), [*first.before_reading(0, 0), event.moment()], whole=False)
            first.has_written(gpu.events.record(0), second.before_reading(0, 0), whole=False)
            lend(first.before_writing(0, 0))
        assert len(first.writes()) == len(second.writes()) <= 2
        assert [each.key for each in lent_others(gpu.driver)] == [event.moment().key]
        gpu.driver.keep_promise(0, event.event, True)
        assert lent_others(gpu.driver) == []


def test_results_of_libraries_depend_on_what_they_had() -> None:
    with opened() as store, opened() as other:
        gpu = store.gpus[0]
        events = [OpenEvent(gpu, gpu.driver.promise_event(0)) for _ in range(2)]
        moments = [event.moment() for event in events]
        lend(moments)
        assert lent_others(gpu.driver) == moments and lent_others(other.driver) == []
        gpu.driver.keep_promise(0, events[0].event, True)
        gpu.driver.keep_promise(0, events[1].event, False)
        for _ in range(2):
            assert lent_others(gpu.driver) == moments[1:], "nobody knows which of the library's objects had the bytes"
