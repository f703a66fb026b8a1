"""Finalizers that the garbage collector runs in the midst of the package's own work, and that make arrays on GPUs."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.device.cuda.stand_in import opened_cuda
from tests.device.helpers import array_on, opened, seen
from zcactor.device.array import DeviceArray, empty_array
from zcactor.device.driver import GpuDriver
from zcactor.device.fake import FakeGpuDriver
from zcactor.device.memory import GpuMemory
from zcactor.device.store import DeviceStore

PATIENCE = 60.0
"""Seconds after which threads count as stopped for ever."""


def ends(work: Callable[[], None]) -> bool:
    """Do work in a thread. Returns whether it ended."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return not thread.is_alive()


class Garbage:
    """An object in a cycle, whose finalizer makes an array."""

    def __init__(self, gpu: GpuMemory, made: list[DeviceArray]) -> None:
        self.gpu, self.made = gpu, made
        self.itself = self

    def __del__(self) -> None:
        array = empty_array(self.gpu, (1000,), np.dtype("u1"))
        array.fill(len(self.made) % 251)
        address = array.__cuda_array_interface__["data"][0]
        if self.gpu.block_at(address, address + array.nbytes) is array.holder:  # as where it is passed
            self.made.append(array)


class CollectingDriver(FakeGpuDriver):
    """Fake GPUs in whose calls the garbage collector runs."""

    def create(self, device: int, nbytes: int) -> int:
        gc.collect()
        return super().create(device, nbytes)


def test_a_finalizer_makes_an_array_while_another_one_is_made() -> None:
    with opened() as store:
        gpu = DeviceStore(CollectingDriver(), None, 0, store.tending._loop).gpu(0)
        made, arrays = list[DeviceArray](), list[DeviceArray]()

        def work() -> None:
            Garbage(gpu, made)
            arrays.append(array_on(gpu, np.arange(100)))

        assert ends(work)
        assert np.array_equal(seen(arrays[0]), np.arange(100))
        assert np.array_equal(seen(made[0]), np.zeros(1000, "u1"))
        addresses = [each.__cuda_array_interface__["data"][0] for each in made]
        assert [gpu.block_at(each, each + 1000) for each in addresses] == [each.holder for each in made]
        made.clear()
        arrays.clear()
        assert not gpu.arena.tidy() and gpu.arena.taken == 0


@pytest.mark.parametrize("opener", [FakeGpuDriver, opened_cuda])
def test_finalizers_make_arrays_at_any_moment(opener: Callable[[], GpuDriver], rounds: int) -> None:
    draw, numbers = random.Random(rounds), itertools.count()
    with opened() as other:
        store = DeviceStore(opener(), None, 0, other.tending._loop)
        gpu, made, wrong = store.gpu(0), list[DeviceArray](), list[int]()

        def collect(*_: object) -> None:
            if draw.random() < 0.01 and next(numbers) < 300:
                Garbage(gpu, made)
                gc.collect(0)

        def work() -> None:
            sys.setprofile(collect)  # called before and after each function, under whichever lock
            try:
                for number in range(10 * rounds):
                    array = array_on(gpu, np.full(5000, number))
                    copy = array.copy()
                    store.driver.export_event(0, gpu.events.record(0).event)
                    if not (seen(copy) == number).all():
                        wrong.append(number)
                    gpu.arena.tidy()
            finally:
                sys.setprofile(None)

        threading.setprofile(collect)  # in the thread of the fake, too
        try:
            assert ends(work)
        finally:
            threading.setprofile(None)
        gc.collect()
        assert made and not wrong
        for array in made:
            assert len(set(seen(array))) == 1
