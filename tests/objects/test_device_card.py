"""A fake card beside a fake GPU: the registration of the extent around an object, and the proof."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.device.helpers import array_on
from tests.transport.verbs.parts import open_device
from zcactor.device.array import empty_array
from zcactor.device.memory import GpuMemory
from zcactor.device.store import open_store
from zcactor.device.streams import GpuStream
from zcactor.errors import OutOfMemory
from zcactor.objects.device_card import prove, registered
from zcactor.objects.device_waiting import until_done
from zcactor.process.tasks import Tasks
from zcactor.testing import until
from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric

MIB = 1 << 20


@dataclass
class Card:
    """An open card."""

    fabric: FakeFabric
    device: FakeDevice
    memory: RegisteredGpuMemory

    def gpu(self, options: str = "", capacity: int | None = None) -> GpuMemory:
        """The first of these fake GPUs."""
        return open_store(f"fake:{options}", None, capacity, 0, asyncio.get_running_loop()).gpus[0]

    async def proof(self, gpu: GpuMemory) -> str:
        """The result of the proof."""
        stream = GpuStream(gpu)
        return await prove(Tasks(asyncio.get_running_loop()), self.memory, gpu, stream.ptr)


@pytest.fixture
async def card() -> AsyncIterator[Card]:
    fabric = FakeFabric()
    device = open_device(fabric, "fake0")
    memory = RegisteredGpuMemory(device, device.port(1), device.gids(1)[1])
    yield Card(fabric, device, memory)
    memory.close()
    assert not device.regions, "nothing is registered any more"
    device.close()


async def test_a_proof(card: Card) -> None:
    gpu = card.gpu()
    objects = len(card.device.ledger)
    assert await card.proof(gpu) == ""
    assert card.fabric.statistics().reads == 2
    assert card.fabric.statistics().bytes_read == 2 * 64 * 1024
    assert len(card.device.ledger) == objects + 1, "the extent stays registered"
    await until(lambda: gpu.arena.used == 0, "the memory is given back")


async def test_an_object_and_the_extent_around_it(card: Card) -> None:
    gpu = card.gpu()
    values = np.arange(100, dtype="u1")
    first, second, large = (array_on(gpu, values), array_on(gpu, values), empty_array(gpu, (70 * MIB,), values.dtype))
    await until_done(second.holder.work.writes())
    blocks: list[Any] = [each.holder for each in (first, second, large)]
    found = [await registered(card.memory, each) for each in blocks]
    blocks.clear()
    assert found[0][0] is found[1][0] is not found[2][0]
    assert [at for _, at in found] == [0, 256, 0]
    assert [region.nbytes for region, _ in found] == [64 * MIB, 64 * MIB, 70 * MIB]
    region, at = found[1]
    place = card.device.regions[region.lkey].at(region.address + at)
    assert np.array_equal(np.frombuffer(ctypes.string_at(place, 100), "u1"), values)
    del large

    def left() -> list[int]:  # the thread that registered the extent may have its object for a moment more
        gpu.arena.tidy()
        return [one.nbytes for one in card.device.regions.values()]

    await until(lambda: left() == [64 * MIB], "the region to go with its extent")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("dmabuf=no", "the GPU's driver exports no memory to network cards"),
        ("fail=dma_buf", "dma_buf on GPU 0 failed"),
        ("fail=flush", "flush on GPU 0 failed"),
        ("fail=copy", "copy on GPU 0 failed"),
        ("fail=copy:2", "copy on GPU 0 failed"),
        ("fail=record:1", "record on GPU 0 failed"),
    ],
)
async def test_a_gpu_that_refuses(card: Card, options: str, reason: str) -> None:
    gpu = card.gpu(options)
    assert reason in await card.proof(gpu)
    await until(lambda: _used(gpu) == 0, "the memory is given back")
    assert len(card.device.ledger) <= 1, "no more than the extent"


def _used(gpu: GpuMemory) -> int:
    gc.collect()  # an error that the fake raises refers to itself
    return gpu.arena.used


ONCE = ("register", "register_dma_buf")
TWICE = ("create_queue_pair", "connect", "post_reads", "poll")


@pytest.mark.parametrize(
    ("call", "after"), [*((call, 0) for call in ONCE), *((call, after) for call in TWICE for after in range(2))]
)
async def test_a_card_that_refuses(card: Card, call: str, after: int) -> None:
    gpu = card.gpu()
    card.fabric.fail(call, OSError(errno.EIO, f"{call} failed"), after=after)
    assert f"{call} failed" in await card.proof(gpu)
    assert card.fabric.failed
    await until(lambda: _used(gpu) == 0, "the memory is given back")
    assert len(card.device.ledger) <= 1, "no more than the extent"


async def test_a_gpu_without_room(card: Card) -> None:
    gpu = card.gpu("memory=64MiB")
    kept = empty_array(gpu, (64 * MIB,), np.dtype("u1"))
    with pytest.raises(OutOfMemory):
        await card.proof(gpu)
    del kept
    assert await card.proof(gpu) == ""


async def test_no_descriptor_is_left(card: Card) -> None:
    gpu = card.gpu()
    assert await card.proof(gpu) == ""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert await card.proof(gpu) == ""
    assert len(os.listdir("/proc/self/fd")) <= before
