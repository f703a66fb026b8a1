"""Pieces of host memory: few, kept, locked in place, and given up when the store is full."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from zcactor.device.driver import CudaCode
from zcactor.device.staging import PIECE_NBYTES, PIECES, Staging
from zcactor.errors import DeviceError, OutOfMemory
from zcactor.objectstore.store import Store
from zcactor.testing import until


@pytest.fixture
def store() -> Iterator[Store]:
    """An empty store of 64 MiB."""
    made = Store(64 << 20, bytes(16))
    yield made
    made.close()


class Driver:
    """The part of a driver that locks memory in place, and what is locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.fails = False

    def pin(self, address: int, nbytes: int) -> None:
        if self.fails:
            raise DeviceError("pin", CudaCode.UNKNOWN, 0, False, "it was told to fail")
        self.locked[address] = nbytes

    def unpin(self, address: int, nbytes: int) -> None:
        assert self.locked.pop(address) == nbytes


def staging(store: Store, driver: Any) -> Staging:
    return Staging(store, driver, asyncio.get_running_loop())


async def test_few_pieces_that_come_back(store: Store) -> None:
    driver = Driver()
    made = staging(store, driver)
    blocks = [await made.take(PIECE_NBYTES - number) for number in range(PIECES)]
    assert [block.nbytes for block in blocks] == [PIECE_NBYTES - number for number in range(PIECES)]
    assert driver.locked == dict.fromkeys([block.address for block in blocks], PIECE_NBYTES)
    assert (made.nbytes, made.idle_nbytes) == (PIECES * PIECE_NBYTES, 0)
    waiting = [asyncio.ensure_future(made.take(5)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert not any(each.done() for each in waiting[1:])
    addresses, numbers = {block.address for block in blocks}, {block.id for block in blocks}
    while blocks:
        blocks.pop()
    found = await asyncio.gather(*waiting[1:])
    assert {block.address for block in found} == addresses
    assert not numbers & {block.id for block in found}  # peers can tell them from the former objects
    assert len(driver.locked) == PIECES
    waiting.clear()
    found.clear()
    await until(lambda: made.idle_nbytes == PIECES * PIECE_NBYTES, "all are back")


async def test_one_that_is_cancelled_when_it_is_its_turn_lets_the_next_go(store: Store) -> None:
    made = staging(store, Driver())
    blocks = [await made.take(1) for _ in range(PIECES)]
    first, second = [asyncio.ensure_future(made.take(1)) for _ in range(2)]
    await asyncio.sleep(0)
    blocks.pop()
    await asyncio.sleep(0)  # the first has been woken, and has not run
    first.cancel()
    assert (await second).nbytes == 1
    assert first.cancelled()


async def test_a_store_with_room_for_one() -> None:
    small = Store(PIECE_NBYTES + 4096, bytes(16))
    try:
        made = staging(small, Driver())
        block: Any = await made.take(7)
        second = asyncio.ensure_future(made.take(7))
        await asyncio.sleep(0)
        assert not second.done() and made.nbytes == PIECE_NBYTES
        del block
        (await second).sealed = True
    finally:
        small.close()


async def test_a_full_store_takes_them_back(store: Store) -> None:
    driver = Driver()
    made = staging(store, driver)
    kept, idle = await made.take(1), await made.take(1)
    del idle
    capacity = store.stats().capacity
    large = store.allocate(capacity - PIECE_NBYTES - (1 << 20))
    assert list(driver.locked) == [kept.address] and made.nbytes == PIECE_NBYTES
    with pytest.raises(OutOfMemory):
        store.allocate(PIECE_NBYTES)
    assert made.nbytes == PIECE_NBYTES
    address = kept.address
    del large, kept
    assert (await made.take(1)).address == address


async def test_memory_that_cannot_be_locked_is_used_all_the_same(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    driver.fails = True
    made = staging(store, driver)
    blocks = [await made.take(1) for _ in range(PIECES)]
    blocks.clear()
    assert made.give_up() and not made.nbytes
    (told,) = [each.getMessage() for each in caplog.records if "not pinned" in each.getMessage()]
    assert "it was told to fail" in told


async def test_after_the_end_they_go_when_they_come_back(store: Store) -> None:
    driver = Driver()
    made = staging(store, driver)
    first, second = await made.take(1), await made.take(1)
    del first
    made.close()
    assert list(driver.locked) == [second.address]
    del second
    assert not driver.locked and made.nbytes == 0 and store.stats().used == 0
