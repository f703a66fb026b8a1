"""Device stores for tests, without a runtime."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.driver import GpuDriver
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.memory import GpuMemory
from zcactor.device.store import DeviceStore, open_store
from zcactor.testing import until
from zcactor.transport.local.extents import ExtentReply

__all__ = [
    "NEVER",
    "array_on",
    "draw_openers",
    "drawn_options",
    "fetched",
    "held",
    "looked_often",
    "opened",
    "seen",
    "settle",
]

NEVER = bool
"""A function that is never true, and that can be passed to a `DevicePeer`: a stream that is held until then does
nothing."""


def drawn_options(seed: int) -> str:
    """Options of fake GPUs for two and more GPUs."""
    draw = random.Random(seed)
    drawn = {
        "devices": draw.randint(2, 4), "late": draw.choice([0, 0, 3, 10]), "seed": seed,
        "peer": draw.choice(["all", "none"]), "export": draw.choice(["vmm", "vmm", "none"]),
        "events": draw.choice(["ipc", "ipc", "none"]), "readonly": draw.choice(["yes", "no"]),
        "dmabuf": draw.choice(["yes", "no"]), "refuse": draw.choice([0, 0.1, 0.4]), "captures": draw.choice([0, 0.3]),
        "context": draw.choice(["0", "16MiB"]), "host": draw.choice(["", f"drawn-{os.getpid()}-{seed}"]),
    }  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in drawn.items())


def draw_openers(metafunc: pytest.Metafunc, opener: Callable[[str], GpuDriver]) -> None:
    """Run a test of the suite of drivers with the options of two seeds, times ``--rounds``."""
    seeds = range(2 * metafunc.config.getoption("--rounds"))
    metafunc.parametrize("opener", [partial(opener, drawn_options(seed)) for seed in seeds], ids=map(str, seeds))


@contextmanager
def held(driver: GpuDriver, *streams: int, device: int = 0) -> Iterator[None]:
    """Hold back the work of streams of a fake GPU, by default of the default stream, until the block is left."""
    assert isinstance(driver, FakeGpuDriver)
    gate = threading.Event()
    for stream in streams or (0,):
        driver.hold(device, stream, gate.is_set)
    try:
        yield
    finally:
        gate.set()


def settle(driver: GpuDriver, device: int = 0) -> None:
    """Wait until a fake GPU has done all that it can do while streams are held."""
    assert isinstance(driver, FakeGpuDriver)
    end = time.monotonic() + 60
    while not driver.rests(device):
        assert time.monotonic() < end, "the GPU has something to do for a minute"
        time.sleep(0.0002)  # an event that a stream waits for may be another process's, which tells nobody


async def looked_often() -> None:
    """Let the loop go on for a hundred looks of `until`, between which it looks at the work of GPUs."""
    looks = itertools.count()
    await until(lambda: next(looks) > 100, "it has looked often")


@contextmanager
def opened(options: str = "", capacity: int | None = None, keep: int = 0) -> Iterator[DeviceStore]:
    """A device store on a loop that does not run by itself."""
    loop = asyncio.new_event_loop()
    try:
        yield open_store(f"fake:{options}", None, capacity, keep, loop)
    finally:
        loop.close()


def array_on(gpu: GpuMemory, values: npt.NDArray[Any]) -> DeviceArray:
    """An array on a GPU with the values of a NumPy array."""
    made = empty_array(gpu, values.shape, values.dtype)
    made.copy_from(values)
    return made


def seen(array: DeviceArray) -> npt.NDArray[Any]:
    """The values of an array on a GPU."""
    target = np.empty(array.shape, array.dtype)
    array.copy_to_host(target)
    return target


def fetched(owner: DeviceStore, *places: int) -> ExtentReply:
    """The extents around places of another store, as they come to another process."""
    answer = owner.supply(b"r" * 16, places)
    answer.process = os.pidfd_open(os.getpid())
    return answer
