"""Memory and leases that are given back on a loop, once work has ended."""

from __future__ import annotations

import asyncio

from tests.conformance.device_peer import mapped
from tests.device.helpers import held
from zcactor.device.arena import DeviceArena
from zcactor.device.events import EventPool
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.tending import Tending
from zcactor.device.work import Work
from zcactor.errors import DeviceError
from zcactor.testing import until


def is_broken(driver: FakeGpuDriver) -> bool:
    try:
        driver.free(0)
    except DeviceError:
        return True
    return False


async def test_calls_wait_for_work() -> None:
    driver = FakeGpuDriver()
    tending, pool = Tending(asyncio.get_running_loop()), EventPool(driver, 0)
    address, called = mapped(driver, 0, driver.granularity), list[str]()
    with held(driver):
        driver.fill(0, address, b"a", 1, 0)
        moment = pool.record(0)
        tending.when_done([moment], lambda: called.append("late" if moment.done() else "early"))
        tending.when_done([], lambda: called.append("at once"))
        assert not called
        await until(lambda: called, "what waits for nothing is called")
    await until(lambda: len(called) == 2, "both are called")
    assert called == ["at once", "late"]


async def test_memory_goes_back_when_work_has_ended() -> None:
    driver = FakeGpuDriver()
    tending, pool, arena = Tending(asyncio.get_running_loop()), EventPool(driver, 0), DeviceArena(driver, 0, None, 0)
    arena.on_freed = tending.freed
    tending.add(arena)
    offset, address, _ = arena.allocate(10)
    with held(driver):
        driver.fill(0, address, b"a", 1, 0)
        arena.give_back(offset, [pool.record(0)])
        looked: list[int] = []
        tending.when_done([], lambda: looked.append(1))
        await until(lambda: looked, "it has looked once")
        assert driver.free(0) < driver.devices()[0].total
    await until(lambda: driver.free(0) == driver.devices()[0].total, "the extent is given back")


async def test_work_of_libraries_is_waited_for() -> None:
    driver = FakeGpuDriver()
    tending, pool, arena = Tending(asyncio.get_running_loop()), EventPool(driver, 0), DeviceArena(driver, 0, None, 0)
    address, called, work = mapped(driver, 0, driver.granularity), list[str](), Work()
    work.give(pool, 0, None, work)
    with held(driver):
        driver.fill(0, address, b"a", 1, 0)
        tending.when_done(work, lambda: called.append("late"))
        tending.when_done([], lambda: called.append("at once"))
        offset, _, _ = arena.allocate(10)
        arena.give_back(offset, work)
        assert [each.lane for each in arena.allocate(10).after] == [0]
        await until(lambda: called, "it has looked once")
        assert called == ["at once"]
    await until(lambda: len(called) == 2, "both are called")


async def test_a_broken_context_holds_nothing_back() -> None:
    driver = FakeGpuDriver("fail=fatal")
    tending, pool = Tending(asyncio.get_running_loop()), EventPool(driver, 0)
    called, broken = list[int](), list[DeviceError]()
    tending.on_broken = broken.append
    address = mapped(driver, 0, driver.granularity)
    moment = pool.record(0)
    driver.fill(0, address, b"a", 1, 0)
    await until(lambda: is_broken(driver), "the fill breaks the context")
    tending.when_done([moment], lambda: called.append(1))
    await until(lambda: called, "it is called")
    assert [error.fatal for error in broken] == [True]


async def test_a_broken_context_is_noted_when_memory_goes_back() -> None:
    driver = FakeGpuDriver("fail=fatal")
    tending, arena = Tending(asyncio.get_running_loop()), DeviceArena(driver, 0, None, 0)
    broken = list[DeviceError]()
    arena.on_freed, tending.on_broken = tending.freed, broken.append
    tending.add(arena)
    offset, address, _ = arena.allocate(10)
    driver.fill(0, address, b"a", 1, 0)
    await until(lambda: is_broken(driver), "the fill breaks the context")
    arena.give_back(offset, [])
    await until(lambda: broken, "the extent cannot be given back")
    assert broken[0].fatal and broken[0].call == "unmap"


def test_after_the_loop() -> None:
    loop = asyncio.new_event_loop()
    tending = Tending(loop)
    loop.close()
    tending.wake()
    tending.when_done([], lambda: None)
