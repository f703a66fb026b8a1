"""The objects of one process on its GPUs, and the way to open these."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from zcactor.device.imports import Imports
from zcactor.device.lease import DeviceLease
from zcactor.device.memory import DeviceBlock, GpuMemory, gpu_number
from zcactor.device.relay import EventRelay
from zcactor.device.tending import Tending
from zcactor.errors import DeviceError, DeviceUnavailable
from zcactor.transport.local.extents import ExtentReply, RemoteExtent

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection

    from zcactor.device.driver import GpuDriver
    from zcactor.device.torch_memory import TorchMemory

__all__ = ["DeviceStore", "open_store"]


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
        self.imports: Final = Imports(self.gpus)
        self.relay: Final = EventRelay()
        self._limits: Final = capacity, keep_nbytes, loop
        self._torch: TorchMemory | None = None
        self.bytes_mapped = 0
        """Bytes of arrays received by importing their owner's memory."""
        self.bytes_pulled = 0
        """Bytes of arrays copied here from GPUs that this process does not see."""
        self.syncs = 0
        """Number of times that a thread waited for a GPU, because events are not shared between processes."""

    def gpu(self, index: int) -> GpuMemory:
        """The memory on the GPU of that index.

        Raises:
            DeviceUnavailable: this process sees no such GPU.
        """
        if index >= len(self.gpus):
            seen = ", ".join(f"cuda:{each.index}" for each in self.gpus) or "none"
            raise DeviceUnavailable(
                f"there is no GPU cuda:{index}: this process sees {seen}; zc.gpu.gpus() lists them, and "
                "CUDA_VISIBLE_DEVICES limits them"
            )
        return self.gpus[index]

    def torch_memory(self) -> TorchMemory:
        """PyTorch's memory in the store, which is made when it is first needed."""
        if self._torch is None:
            from zcactor.device.torch_memory import TorchMemory

            self._torch = TorchMemory(self.gpus, *self._limits)
        return self._torch

    def block_at(self, low: int, high: int, value: Any) -> DeviceBlock | None:
        """The object of ours whose bytes contain the addresses ``[low, high)``, or None.

        Args:
            low: the lowest address.
            high: the address after the highest.
            value: the library's array that lies there.
        """
        blocks = (gpu.block_at(low, high) for gpu in self.gpus)
        found = next((each for each in blocks if each is not None), None)
        return self._torch.block_at(low, high, value) if found is None and self._torch is not None else found

    def close(self) -> None:
        """Make nothing ahead any more. Arrays stay valid. Idempotent."""
        if self._torch is not None:
            self._torch.close()

    def supply(self, reader: bytes, places: Collection[int]) -> ExtentReply:
        """The extents around places, for a peer; see `zcactor.transport.local.extents`. There are none where memory
        cannot leave the process."""
        answer = ExtentReply([])
        if self.driver.shared_events:
            answer.events = self.driver.event_page()
        for gpu in self.gpus:
            inside = [place - gpu.base for place in places if gpu_number(place) == gpu.index]
            with contextlib.suppress(DeviceError):  # the peer asks for the bytes themselves
                exported = gpu.arena.exports(inside, reader)
                answer.extents += [
                    RemoteExtent(gpu.base + each.offset, each.nbytes, gpu.uuid, each.fd) for each in exported
                ]
        return answer

    def holds(self, x: Any) -> bool:
        """Whether `x` is an array on a GPU whose bytes peers of this runtime can map."""
        holder = getattr(x, "holder", None)
        return isinstance(holder, DeviceBlock | DeviceLease) and holder.gpu in self.gpus

    @property
    def used(self) -> int:
        """Bytes of all objects on all GPUs."""
        return sum(gpu.arena.used for gpu in self.gpus)


def open_store(gpu: str, variable: str | None, *limits: Any) -> DeviceStore:
    """Open the GPUs of this process.

    Args:
        gpu: the setting, as in `zcactor.config.Config.gpu`.
        variable: the value of ``CUDA_VISIBLE_DEVICES``, for the fake; None where it is not set.
        limits: the further arguments of `DeviceStore`.

    Raises:
        DeviceUnavailable: GPUs are switched off, or CUDA does not work here; the message says why.
        ValueError: an option of the fake is unknown or malformed.
    """
    if gpu == "off":
        raise DeviceUnavailable(
            "GPUs are switched off: the setting gpu is 'off'; set it to 'auto' for the GPUs of this machine, or to "
            "'fake' (ZCACTOR_GPU=fake) for fake GPUs"
        )
    kind, _, options = gpu.partition(":")
    if kind != "fake":
        from zcactor.device.cuda import CudaGpuDriver

        return DeviceStore(CudaGpuDriver(), *limits)
    from zcactor.device.fake import FakeGpuDriver

    return DeviceStore(FakeGpuDriver(options, variable), *limits)
