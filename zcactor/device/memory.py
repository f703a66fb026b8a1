"""The memory of this process on its GPUs, and the blocks in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from zcactor import ids
from zcactor.device.arena import DeviceArena
from zcactor.device.events import EventPool
from zcactor.device.tending import Tending
from zcactor.device.work import Work
from zcactor.errors import DeviceUnavailable, ObjectLost

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from zcactor.device.arena import Placed
    from zcactor.device.driver import GpuDriver, GpuFacts
    from zcactor.device.events import Moment

__all__ = ["DeviceBlock", "DeviceStore", "GpuMemory", "wait_on_host"]

_FIRST_PAUSE: Final = 20e-6
"""Seconds: about the time of a copy of a few KiB."""
_LAST_PAUSE: Final = 1e-3


def wait_on_host(moments: Iterable[Moment]) -> None:
    """Wait until the work of all moments is done, and block this thread meanwhile.

    Raises:
        DeviceError: the work, or other work, has broken the GPU's context.
        ObjectLost: the process that would do the work has ended.
    """
    for moment in moments:
        pause = _FIRST_PAUSE
        while not moment.done():
            if moment.is_lost():
                raise ObjectLost(
                    "the process that computes the array has ended before the work on its GPU was done; compute the "
                    "value again"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)


class _Hold:
    """The holder of a block's bytes, which frees them when it is dropped. It is apart from the block because weak
    references lead to blocks: while a ``__del__`` of the block ran, another thread could get the block back."""

    __slots__ = ("arena", "offset", "work")

    def __init__(self, arena: DeviceArena, placed: Placed) -> None:
        self.arena: Final = arena
        self.offset: Final = placed.offset
        self.work: Final = Work(placed.after)

    def __del__(self) -> None:
        self.arena.give_back(self.offset, self.work.all())


class DeviceBlock:
    """One object in the GPU memory of this process. Its bytes are free, for work after that which is queued on them,
    when the last array and the last lease are gone.

    Args:
        gpu: the memory.
        nbytes: bytes.

    Raises:
        OutOfMemory: the GPU has no room.
        DeviceError: the driver fails in another way.
    """

    __slots__ = ("__weakref__", "address", "exported", "gpu", "hold", "id", "nbytes", "of_numpy", "sealed")

    def __init__(self, gpu: GpuMemory, nbytes: int) -> None:
        placed = gpu.arena.allocate(nbytes)
        self.hold: Final = _Hold(gpu.arena, placed)
        self.gpu: Final = gpu
        self.id: Final = ids.bits(62) | 1 << 62
        """Id of the object (u64), which no peer can guess."""
        self.address: Final = placed.address
        self.nbytes: Final = nbytes
        self.sealed = False
        """Whether the object was shared, so that nobody may write to it."""
        self.exported = False
        self.of_numpy: Final = False
        """See `zcactor.objectstore.store.Block`, as for `exported`: the store keeps both kinds of blocks by their
        ids."""

    @property
    def work(self) -> Work:
        """The work that is queued on the bytes."""
        return self.hold.work

    @property
    def readonly(self) -> bool:
        """Whether nobody may write to the bytes."""
        return self.sealed


class GpuMemory:
    """The memory and the events of this process on one GPU.

    Args:
        driver: the driver.
        facts: the GPU.
        capacity: see `DeviceArena`.
        keep_nbytes: see `DeviceArena`.
        tending: gives memory back.
    """

    def __init__(
        self, driver: GpuDriver, facts: GpuFacts, capacity: int | None, keep_nbytes: int, tending: Tending
    ) -> None:
        self.driver: Final = driver
        self.index: Final = facts.index
        self.uuid: Final = facts.uuid
        self.arena: Final = DeviceArena(driver, facts.index, capacity, keep_nbytes)
        self.events: Final = EventPool(driver, facts.index)
        self.arena.on_freed = tending.wake
        tending.add(self.arena)


class DeviceStore:
    """The objects of one process on its GPUs. Any thread may use it.

    Args:
        driver: the driver; it belongs to the runtime, and lives on with arrays that outlive it.
        capacity: bytes that this process may take of each GPU; None for what the GPU has.
        keep_nbytes: bytes of free memory that are kept ready on each GPU.
        loop: the loop on which memory is given back.
    """

    def __init__(
        self, driver: GpuDriver, capacity: int | None, keep_nbytes: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.driver: Final = driver
        self.tending: Final = Tending(loop)
        self.gpus: Final = [GpuMemory(driver, facts, capacity, keep_nbytes, self.tending) for facts in driver.devices()]

    def gpu(self, index: int) -> GpuMemory:
        """The memory on the GPU of that index.

        Raises:
            DeviceUnavailable: this process sees no such GPU.
        """
        if index >= len(self.gpus):
            seen = ", ".join(f"cuda:{each.index}" for each in self.gpus) or "none"
            raise DeviceUnavailable(
                f"there is no GPU cuda:{index}: this process sees {seen}; zc.gpus() lists them, and "
                "CUDA_VISIBLE_DEVICES limits them"
            )
        return self.gpus[index]

    @property
    def used(self) -> int:
        """Bytes of all objects on all GPUs."""
        return sum(gpu.arena.used for gpu in self.gpus)


def open_store(gpu: str, fake: str, variable: str | None, *limits: Any) -> DeviceStore:
    """Open the GPUs of this process.

    Args:
        gpu: ``"fake"``, or ``"off"``.
        fake: the options of the fake, for `zcactor.device.fake.options.FakeOptions`.
        variable: the value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        limits: the further arguments of `DeviceStore`.

    Raises:
        DeviceUnavailable: GPUs are switched off.
        ValueError: an option of the fake is unknown or malformed.
    """
    if gpu != "fake":
        raise DeviceUnavailable(
            "GPUs are switched off: the setting gpu is 'off'; set it to 'fake' (ZCACTOR_GPU=fake) for fake GPUs, the "
            "only ones that this version supports"
        )
    from zcactor.device.fake import FakeGpuDriver

    return DeviceStore(FakeGpuDriver(fake, variable), *limits)
