"""Memory of GPUs that is registered with a fake card, and READs through the card itself."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial

import pytest

from tests.descriptors import opened
from tests.transport.verbs.parts import open_device
from zcactor.transport.verbs.device.gpu_memory import RegisteredGpuMemory
from zcactor.transport.verbs.driver.base import Read
from zcactor.transport.verbs.driver.fake import FakeDevice, FakeFabric

NBYTES = 8192


def on(device: FakeDevice) -> RegisteredGpuMemory:
    """The registered memory of a card."""
    return RegisteredGpuMemory(device, device.port(1), device.gids(1)[1])


def exporter(data: bytes = bytes(NBYTES)) -> Callable[[], int]:
    """A function that makes descriptors of memory with these bytes."""

    def export() -> int:
        fd = os.memfd_create("zcactor-gpu0")
        os.write(fd, data)
        return fd

    return export


@pytest.fixture
def fabric() -> FakeFabric:
    """A fabric without cards."""
    return FakeFabric()


async def test_each_extent_is_registered_once(fabric: FakeFabric) -> None:
    before, device = opened(), open_device(fabric, "a")
    memory = on(device)
    asked: list[str] = []

    def export() -> int:
        asked.append(threading.current_thread().name)
        return exporter()()

    first, second = await asyncio.gather(*(memory.get(4096, NBYTES, export) for _ in range(2)))
    assert first is second is await memory.get(4096, NBYTES, export)
    assert len(asked) == 1 and asked != [threading.current_thread().name]
    assert await memory.get(1 << 40, NBYTES, export) is not first
    assert memory.nbytes == 2 * NBYTES
    memory.forget(4096)
    memory.forget(4096)
    memory.forget(12345)
    assert memory.nbytes == NBYTES and list(device.regions) != [first.lkey]
    assert await memory.get(4096, NBYTES, export) is not first, "the address has another extent by now"
    memory.close()
    memory.close()
    assert memory.nbytes == 0 and not device.regions
    assert opened() <= before, "no descriptor is left"
    with pytest.raises(OSError, match="nothing is registered with a any more") as caught:
        await memory.get(4096, NBYTES, export)
    assert caught.value.errno == errno.ESHUTDOWN
    assert opened() <= before
    memory.device.close()


async def test_a_registration_that_fails_is_tried_again(fabric: FakeFabric) -> None:
    before = opened()
    memory = on(open_device(fabric, "a"))
    fabric.fail("register_dma_buf", OSError(errno.ENOMEM, "no memory"))
    with pytest.raises(OSError, match="no memory"):
        await memory.get(4096, NBYTES, exporter())
    assert opened() <= before and memory.nbytes == 0

    def refuse() -> int:
        raise OSError(errno.EINVAL, "no descriptor")

    with pytest.raises(OSError, match="no descriptor"):
        await memory.get(4096, NBYTES, refuse)
    assert (await memory.get(4096, NBYTES, exporter())).nbytes == NBYTES
    memory.close()
    memory.device.close()


async def test_a_registration_goes_on_when_nobody_waits(fabric: FakeFabric) -> None:
    memory, gate, begun = on(open_device(fabric, "a")), threading.Event(), threading.Event()

    def export() -> int:
        begun.set()
        assert gate.wait(60)
        return exporter()()

    waiting = asyncio.ensure_future(memory.get(4096, NBYTES, export))
    await asyncio.to_thread(begun.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    again = asyncio.ensure_future(memory.get(4096, NBYTES, exporter()))
    await asyncio.sleep(0)
    gate.set()
    assert (await again).nbytes == memory.nbytes == NBYTES
    memory.close()
    memory.device.close()


async def test_memory_that_stays_registered_is_told(fabric: FakeFabric, caplog: pytest.LogCaptureFixture) -> None:
    memory = on(open_device(fabric, "a"))
    for key in range(2):
        await memory.get(key, NBYTES, exporter())
    ends: list[Callable[[], None]] = [partial(memory.forget, 0), memory.close]
    for end in ends:
        caplog.clear()
        fabric.fail("ibv_dereg_mr", OSError(errno.EBUSY, "busy"))
        end()
        assert "could not be deregistered from a: [Errno 16] busy" in caplog.text
    assert memory.nbytes == 0
    memory.device.close()


async def test_a_read_of_its_own(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(fabric, "a")
    memory = on(device)
    region = await memory.get(0, NBYTES, exporter(b"from the GPU" + bytes(NBYTES - 12)))
    host = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    ours = memory.device.register(address, 4096, remote_read=True)
    objects = len(device.ledger)
    assert await memory.read_itself(Read(1, address, 12, ours.lkey, 0, region.rkey)) == ""
    assert host[:12] == b"from the GPU"
    wrong = await memory.read_itself(Read(1, address, 12, ours.lkey, NBYTES, region.rkey))
    assert wrong.startswith("a READ of 12 bytes from itself failed: ")
    fabric.manual = True
    monkeypatch.setattr("zcactor.transport.verbs.device.gpu_memory._PATIENCE", 0.0)
    late = await memory.read_itself(Read(1, address, 12, ours.lkey, 0, region.rkey))
    assert late == "a READ of 12 bytes from itself did not complete in 0 s"
    assert len(device.ledger) == objects, "its queues are closed"
    fabric.fail("create_queue_pair", OSError(errno.ENOMEM, "no memory"))
    with pytest.raises(OSError, match="no memory"):
        await memory.read_itself(Read(1, address, 12, ours.lkey, 0, region.rkey))
    assert len(device.ledger) == objects
    memory.device.close()
