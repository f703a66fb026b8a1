"""Extents: memory is registered once, on demand, and with a way out where it cannot be registered."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import threading
from collections.abc import Iterator

import pytest

from tests.conformance.connection import turns
from tests.transport.verbs.parts import arena as make_arena
from tests.transport.verbs.parts import open_device
from tests.transport.verbs.sides import Arena
from zcactor.errors import OutOfMemory
from zcactor.transport.verbs.device.registration_cache import ExtentTable
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric

EXTENT = 1 << 16
NBYTES = 5 * EXTENT + 4096


@pytest.fixture
def arena() -> Iterator[Arena]:
    with make_arena(NBYTES) as made:
        yield made


@pytest.fixture
def device() -> FakeDevice:
    return open_device(FakeFabric(), "a")


@pytest.fixture
def table(device: FakeDevice, arena: Arena) -> Iterator[ExtentTable]:
    made = ExtentTable(device, arena, EXTENT)
    yield made
    made.close()


async def settle(table: ExtentTable) -> None:
    """Wait until no registration is under way."""
    while table._under_way:
        await asyncio.wait(list(table._under_way.values()))
        await turns(2)


class Gate(Arena):
    """An arena whose pinning waits for the test."""

    def __init__(self, arena: Arena) -> None:
        self.__dict__.update(arena.__dict__)
        self.may = threading.Event()
        self.raises: Exception | None = None

    def pin(self, offset: int, nbytes: int) -> None:
        """Wait for the test, then pin or raise."""
        self.may.wait()
        if self.raises is not None:
            raise self.raises
        super().pin(offset, nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes", "first", "last"),
    [
        (0, 1, 0, 0),
        (0, 0, 0, 0),
        (0, EXTENT, 0, 0),
        (EXTENT - 1, 1, 0, 0),
        (EXTENT, 1, 1, 1),
        (EXTENT - 1, 2, 0, 1),
        (10, 3 * EXTENT, 0, 3),
        (5 * EXTENT, 1, 5, 5),
        (0, NBYTES, 0, 5),
    ],
)
async def test_the_extents_that_bytes_are_in(
    table: ExtentTable, arena: Arena, device: FakeDevice, offset: int, nbytes: int, first: int, last: int
) -> None:
    assert table.find(offset, nbytes) is None and not table.registered(offset, nbytes)
    regions = await table.get(offset, nbytes)
    spans = [(number * EXTENT, min(EXTENT, NBYTES - number * EXTENT)) for number in range(first, last + 1)]
    assert [(region.address - arena.address, region.nbytes) for region in regions] == spans == arena.pinned
    assert all(device.regions[region.rkey].remote_read for region in regions)
    assert table.find(offset, nbytes) is (regions[0] if first == last else None)
    assert table.registered(offset, nbytes)
    assert await table.get(offset, nbytes) == regions
    keys = await table.keys(offset, nbytes)
    assert [region for _, region in keys] == regions
    assert sum(count for count, _ in keys) == nbytes
    total = sum(count for _, count in spans)
    assert (table.registrations, table.nbytes, len(device.regions)) == (len(spans), total, len(spans))


async def test_one_registration_per_extent(table: ExtentTable, device: FakeDevice) -> None:
    for offset in range(0, NBYTES, 1000):
        await table.get(offset, min(10, NBYTES - offset, EXTENT - offset % EXTENT))
    assert table.registrations == 6 == len(device.regions)


async def test_no_byte_is_registered_twice(table: ExtentTable, arena: Arena, device: FakeDevice) -> None:
    """The sizes are random: a pinned page counts once for each region that it is in."""
    numbers = random.Random(1)
    for _ in range(2000):
        nbytes = numbers.randrange(EXTENT // 64, 4 * EXTENT)
        await table.get(numbers.randrange(0, NBYTES - nbytes), nbytes)
    assert table.nbytes <= 1.1 * NBYTES
    assert sum(region.nbytes for region in device.regions.values()) == table.nbytes == NBYTES
    assert sorted(arena.pinned) == [(low, min(EXTENT, NBYTES - low)) for low in range(0, NBYTES, EXTENT)]


async def test_keys_across_extents(table: ExtentTable) -> None:
    first, second, third = await table.get(0, 3 * EXTENT)
    assert await table.keys(EXTENT - 1, EXTENT + 3) == [(1, first), (EXTENT, second), (2, third)]
    assert await table.keys(EXTENT, 10) == [(10, second)]


async def test_twice_at_once_is_one_registration(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    table = ExtentTable(device, gate, EXTENT)
    tasks = [asyncio.create_task(table.get(offset, 10)) for offset in (0, 500, EXTENT - 10)]
    table.ahead(3, 4)
    await turns()
    assert table.find(0, 1) is None
    gate.may.set()
    regions = await asyncio.gather(*tasks)
    assert len({id(region) for (region,) in regions}) == 1
    assert (table.registrations, len(device.regions)) == (1, 1)
    table.close()


async def test_who_comes_when_it_is_just_done(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    table = ExtentTable(device, gate, EXTENT)
    table.ahead(0, 1)
    await turns()
    (under_way,) = table._under_way.values()
    gate.may.set()
    while not under_way.done():
        await asyncio.sleep(0)
    assert await table.get(0, 1) == [table.find(0, 1)]
    await turns()
    assert table.registrations == 1
    table.close()


async def test_the_loop_goes_on_meanwhile(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    table = ExtentTable(device, gate, EXTENT)
    task = asyncio.create_task(table.get(0, 1))
    await turns(20)
    assert not task.done()
    gate.may.set()
    await task
    table.close()


async def test_cancelling_leaves_the_registration(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    table = ExtentTable(device, gate, EXTENT)
    task = asyncio.create_task(table.get(0, 1))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.may.set()
    assert await table.get(0, 1) == [table.find(0, 1)]
    assert table.registrations == 1
    table.close()


async def test_ahead(table: ExtentTable) -> None:
    table.ahead(0, EXTENT + 1)
    assert table.find(0, 1) is None
    await turns(1)
    await settle(table)
    assert table.registered(0, 2 * EXTENT)
    table.ahead(100, 100)
    await turns()
    assert table.registrations == 2


@pytest.fixture
def tight(arena: Arena) -> Iterator[ExtentTable]:
    """A table on a device that pins one extent and no more."""
    fabric = FakeFabric()
    fabric.add_nic("a", pin_limit=EXTENT)
    table = ExtentTable(open_device(fabric, "a"), arena, EXTENT)
    yield table
    table.close()


async def test_limit_of_pinned_memory(tight: ExtentTable) -> None:
    (region,) = await tight.get(0, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="ulimit -l") as caught:
            await tight.get(EXTENT, 1)
        assert caught.value.errno == errno.ENOMEM
    assert tight.find(0, 1) is region, "what is registered stays so"
    assert (tight.registrations, tight.nbytes) == (1, EXTENT)


async def test_failure_ahead_is_logged_and_met_later(tight: ExtentTable, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zcactor")
    tight.ahead(0, 2 * EXTENT)
    await turns(1)
    await settle(tight)
    await turns()
    (record,) = caplog.records
    assert "could not be registered ahead of need" in record.message and "ulimit -l" in record.message
    with pytest.raises(OSError, match="ulimit -l"):
        await tight.get(0, 2 * EXTENT)
    await tight.get(0, 1)


async def test_no_memory_to_pin(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    gate.may.set()
    gate.raises = OutOfMemory(1, 2, 3, 4)
    table = ExtentTable(device, gate, EXTENT)
    with pytest.raises(OutOfMemory):
        await table.get(0, 1)
    assert not device.regions
    gate.raises = None
    await table.get(0, 1)
    table.close()


async def test_close(table: ExtentTable, device: FakeDevice) -> None:
    await table.get(0, 1)
    table.close()
    table.close()
    assert not device.regions
    assert table.find(0, 1) is None
    table.ahead(0, 1)
    await turns()
    for offset in (0, EXTENT):
        with pytest.raises(OSError, match="closed"):
            await table.get(offset, 1)
    assert not device.regions


async def test_close_waits_for_what_is_under_way(device: FakeDevice, arena: Arena) -> None:
    gate = Gate(arena)
    table = ExtentTable(device, gate, EXTENT)
    task = asyncio.create_task(table.get(0, 1))
    await turns()
    gate.may.set()
    table.close()
    await task
    assert not device.regions, "what was registered after all is not left over"
    assert arena.pinned
