"""Device arenas: places for objects, memory that comes back in order, extents for peers, and every failure."""

from __future__ import annotations

import os
import random
import threading

import pytest

from tests.conformance.device_peer import finish, read, until_done, write
from tests.device.helpers import NEVER, held, settle
from zcactor.device.arena import ALIGNMENT, EXTENT_NBYTES, DeviceArena, ExportedExtent
from zcactor.device.driver import CudaCode
from zcactor.device.events import EventPool
from zcactor.device.fake import FakeGpuDriver
from zcactor.errors import DeviceError, OutOfMemory

MIB = 1 << 20
STEP = FakeGpuDriver.granularity


def arena_of(driver: FakeGpuDriver, capacity: int | None = None, keep: int = 0) -> DeviceArena:
    return DeviceArena(driver, 0, capacity, keep)


def test_places_are_aligned_and_apart() -> None:
    driver = FakeGpuDriver()
    arena = arena_of(driver)
    draw, places = random.Random(1), []
    for number in range(200):
        nbytes = draw.choice([0, 1, 4, 255, 257, 4096, 1_000_000])
        offset, address, after = arena.allocate(nbytes)
        assert offset % ALIGNMENT == address % ALIGNMENT == 0 and after == []
        if nbytes:
            driver.fill(0, address, bytes((number,)), nbytes, 0)
        places.append((offset, nbytes, address, number))
    assert arena.taken % EXTENT_NBYTES == 0
    for _, nbytes, address, number in places:
        assert read(driver, 0, address, nbytes) == bytes((number,)) * nbytes
    for offset, *_ in places:
        arena.give_back(offset, [])
    assert arena.used == 0 and arena.taken > 0
    assert not arena.tidy()
    assert arena.taken == 0 and driver.free(0) == driver.devices()[0].total


def test_many_small_objects_take_one_extent() -> None:
    driver = FakeGpuDriver()
    arena = arena_of(driver)
    places = {arena.allocate(4).address for _ in range(10_000)}
    assert len(places) == 10_000 and arena.taken == EXTENT_NBYTES


def test_a_large_object_gets_an_extent_of_its_size() -> None:
    arena = arena_of(FakeGpuDriver())
    arena.allocate(100 * MIB + 1)
    assert arena.taken == 102 * MIB


def test_the_tightest_extent_is_taken() -> None:
    arena = arena_of(FakeGpuDriver())
    large = arena.allocate(200 * MIB).offset
    small = arena.allocate(EXTENT_NBYTES).offset
    arena.give_back(large, [])
    arena.give_back(small, [])
    assert arena.allocate(10 * MIB).offset == small
    assert arena.allocate(100 * MIB).offset == large


@pytest.mark.parametrize("keep", [0, EXTENT_NBYTES, 1 << 30])
def test_extents_are_kept_up_to_a_limit(keep: int) -> None:
    driver = FakeGpuDriver()
    arena = arena_of(driver, keep=keep)
    places = [arena.allocate(EXTENT_NBYTES).offset for _ in range(3)]
    freed: list[int] = []
    arena.on_freed = lambda: freed.append(1)
    for offset in places:
        arena.give_back(offset, [])
    assert len(freed) == 3
    arena.tidy()
    assert arena.taken == min(keep, 3 * EXTENT_NBYTES) == driver.devices()[0].total - driver.free(0)


def test_addresses_are_used_again_and_offsets_are_not() -> None:
    arena = arena_of(FakeGpuDriver("memory=256MiB"))
    seen, first = set[int](), 0
    for _ in range(20):
        offset, address, _ = arena.allocate(100 * MIB)
        assert offset not in seen
        seen.add(offset)
        first = first or address
        assert address == first
        arena.give_back(offset, [])
        arena.tidy()


def test_holes_between_addresses_are_filled() -> None:
    arena = arena_of(FakeGpuDriver("memory=200MiB"))
    places = [arena.allocate(size * MIB) for size in (64, 70, 66)]
    arena.give_back(places[1].offset, [])
    arena.tidy()
    assert arena.allocate(68 * MIB).address == places[1].address
    with pytest.raises(OutOfMemory):
        arena.allocate(66 * MIB)


# ---- order


@pytest.mark.parametrize(("waits", "wrong"), [("yes", False), ("no", True)])
def test_freed_bytes_are_written_after_their_last_use(waits: str, wrong: bool) -> None:
    """A copy out of an object, which comes late, still reads it, when the bytes belong to the next object already."""
    driver = FakeGpuDriver(f"waits={waits}")
    arena, pool, stream = arena_of(driver), EventPool(driver, 0), driver.stream(0)
    offset, address, _ = arena.allocate(1000)
    target = arena.allocate(1000).address
    write(driver, 0, address, b"old" * 300)
    with held(driver, stream):
        driver.copy(0, target, address, 1, 900, (0, 0), stream)
        moment = pool.record(stream)
        arena.give_back(offset, [moment])
        again, address, after = arena.allocate(1000)
        assert again == offset and after == [moment]
        for each in after:
            each.order(0, 0)
        driver.fill(0, address, b"n", 1000, 0)
        settle(driver)
    finish(driver, 0, stream)
    assert (read(driver, 0, target, 900) != b"old" * 300) is wrong


def test_bytes_beside_pending_ones_need_no_wait() -> None:
    driver = FakeGpuDriver()
    driver.hold(0, 0, NEVER)
    arena, pool = arena_of(driver), EventPool(driver, 0)
    offset, address, _ = arena.allocate(1 * MIB)
    driver.fill(0, address, b"a", 1, 0)
    moment = pool.record(0)
    arena.give_back(offset, [moment])
    assert arena.allocate(MIB // 2).after == [moment]
    assert arena.allocate(MIB // 2).after == [moment]
    assert arena.allocate(MIB).after == []


def test_an_extent_in_use_is_not_given_back() -> None:
    driver = FakeGpuDriver()
    arena, pool = arena_of(driver), EventPool(driver, 0)
    offset, address, _ = arena.allocate(10)
    with held(driver):
        driver.fill(0, address, b"a", 1, 0)
        moment = pool.record(0)
        arena.give_back(offset, [moment])
        assert arena.tidy() and arena.taken
    until_done(driver, 0, moment.event)
    assert not arena.tidy() and not arena.taken


# ---- limits and failures


def test_out_of_memory_names_the_gpu() -> None:
    driver = FakeGpuDriver("memory=128MiB")
    arena = arena_of(driver)
    offset, *_ = arena.allocate(100 * MIB)
    with pytest.raises(OutOfMemory, match="GPU 0: it has 134,217,728 bytes") as caught:
        arena.allocate(64 * MIB)
    assert (caught.value.requested, caught.value.used, caught.value.capacity) == (64 * MIB, 100 * MIB, 128 * MIB)
    assert "a larger device_capacity" in str(caught.value)
    arena.give_back(offset, [])
    arena.allocate(128 * MIB)


def test_the_capacity() -> None:
    arena = arena_of(FakeGpuDriver(), capacity=10 * MIB)
    arena.allocate(9 * MIB)
    assert arena.taken == 10 * MIB
    with pytest.raises(OutOfMemory, match="device_capacity is 10,485,760 bytes"):
        arena.allocate(2 * MIB)


def test_kept_extents_make_room_for_a_larger_one() -> None:
    arena = arena_of(FakeGpuDriver("memory=128MiB"), keep=1 << 30)
    places = [arena.allocate(64 * MIB).offset for _ in range(2)]
    for offset in places:
        arena.give_back(offset, [])
    arena.tidy()
    assert arena.taken == 128 * MIB
    arena.allocate(100 * MIB)
    assert arena.taken == 100 * MIB


@pytest.mark.parametrize("call", ["reserve", "create", "map"])
def test_a_failure_leaks_nothing(call: str) -> None:
    driver = FakeGpuDriver(f"fail={call}")
    arena = arena_of(driver)
    with pytest.raises(DeviceError) as caught:
        arena.allocate(10)
    assert caught.value.call == call
    assert driver.free(0) == driver.devices()[0].total
    arena.allocate(10)
    assert arena.taken == EXTENT_NBYTES


@pytest.mark.usefixtures("no_leftovers")
def test_a_failure_of_an_export() -> None:
    arena = arena_of(FakeGpuDriver("fail=export:2"))
    offsets = [arena.allocate(EXTENT_NBYTES).offset for _ in range(2)]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DeviceError):
        arena.exports(offsets, b"one")
    assert len(closed(arena.exports(offsets, b"one"))) == 2
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("call", ["unmap", "release"])
def test_an_extent_that_is_not_given_back_is_given_back_later(call: str) -> None:
    driver = FakeGpuDriver(f"fail={call}")
    arena = arena_of(driver)
    arena.give_back(arena.allocate(10).offset, [])
    with pytest.raises(DeviceError):
        arena.tidy()
    assert driver.free(0) < driver.devices()[0].total
    arena.tidy()
    assert driver.free(0) == driver.devices()[0].total and not arena.taken


# ---- peers


def closed(exported: list[ExportedExtent]) -> list[tuple[int, int]]:
    """Close the descriptors of exported extents. Returns their offsets and bytes."""
    for each in exported:
        os.close(each.fd)
    return [(each.offset, each.nbytes) for each in exported]


@pytest.mark.usefixtures("no_leftovers")
def test_extents_are_exported_when_they_are_needed_and_told_of_when_they_are_gone() -> None:
    driver, gone = FakeGpuDriver(), list[tuple[int, set[bytes]]]()
    arena = arena_of(driver)
    arena.on_gone = lambda offset, readers: gone.append((offset, readers))
    first, second, third = (arena.allocate(EXTENT_NBYTES).offset for _ in range(3))
    before = len(os.listdir("/proc/self/fd"))
    for reader in (b"one", b"two"):
        assert closed(arena.exports([second + 5, second, second + EXTENT_NBYTES - 1], reader)) == [
            (second, EXTENT_NBYTES)
        ]
    assert arena.exports([-1, 3 * EXTENT_NBYTES, 1 << 60], b"one") == arena.exports([], b"one") == []
    assert len(os.listdir("/proc/self/fd")) == before
    for offset in (first, second):
        arena.give_back(offset, [])
    arena.tidy()
    assert gone == [(second, {b"one", b"two"})]  # nobody has the first one
    assert arena.exports([first, second], b"one") == []
    assert closed(arena.exports([third], b"one")) == [(third, EXTENT_NBYTES)]


def test_extents_that_cannot_leave() -> None:
    arena = arena_of(FakeGpuDriver("export=none"))
    offset = arena.allocate(10).offset
    with pytest.raises(DeviceError) as caught:
        arena.exports([offset], b"one")
    assert caught.value.code == CudaCode.NOT_SUPPORTED


def test_threads() -> None:
    driver = FakeGpuDriver()
    arena, errors = arena_of(driver, keep=1 << 30), []

    def work(seed: int) -> None:
        draw, held = random.Random(seed), list[int]()
        try:
            for _ in range(300):
                if held and draw.random() < 0.5:
                    arena.give_back(held.pop(draw.randrange(len(held))), [])
                else:
                    held.append(arena.allocate(draw.randrange(1, 1 << 16)).offset)
                if draw.random() < 0.1:
                    arena.tidy()
            for offset in held:
                arena.give_back(offset, [])
        except (OutOfMemory, ValueError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and arena.used == 0
    assert STEP <= arena.taken <= 4 * EXTENT_NBYTES


class Registrations:
    """A card, and the addresses that it was to forget while nothing was unmapped yet."""

    def __init__(self, driver: FakeGpuDriver) -> None:
        self._driver = driver
        self.forgotten: list[int] = []

    def forget(self, key: int) -> None:
        """Note an extent that leaves."""
        assert self._driver.owner_of(key) is not None, "it is mapped"
        self.forgotten.append(key)


def test_cards_forget_extents_before_they_are_unmapped() -> None:
    driver = FakeGpuDriver()
    arena, cards = arena_of(driver), [Registrations(driver), Registrations(driver)]
    for card in cards * 2:
        arena.add_card(card)
    del card
    first, second = arena.allocate(100), arena.allocate(70 * MIB)
    assert arena.extent_around(first.address + 99) == (first.address, EXTENT_NBYTES)
    assert arena.extent_around(second.address) == (second.address, 70 * MIB)
    with pytest.raises(LookupError, match="is in no extent"):
        arena.extent_around(second.address + 70 * MIB)
    arena.give_back(second.offset, [])
    arena.tidy()
    assert [card.forgotten for card in cards] == [[second.address]] * 2
    del cards[1]
    arena.give_back(first.offset, [])
    arena.tidy()
    assert [card.forgotten for card in cards] == [[second.address, first.address]]
    assert driver.owner_of(first.address) is None
