"""The memory of this process's GPUs that is registered with the card, by dma-buf, and a READ that proves it.

Each extent is registered as a whole, once, when it is first needed. It is deregistered before the GPU's driver unmaps
it: until then the card may read and write there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from zcactor.logs import logger
from zcactor.transport.verbs.device.self_loopback import connect_to_itself
from zcactor.transport.verbs.driver.base import UNMARKED
from zcactor.transport.verbs.driver.codes import CompletionStatus, describe_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.transport.verbs.driver.base import Device, Gid, Marking, MemoryRegion, PortAttributes, Read

__all__ = ["RegisteredGpuMemory"]

_PATIENCE: Final = 5.0
"""Seconds for a READ from this process to itself; see `zcactor.transport.verbs.device.viability.PROOF_SECONDS`."""
_FIRST_PAUSE: Final = 0.0001
_LAST_PAUSE: Final = 0.005
"""Seconds between looks at such a READ."""


class RegisteredGpuMemory:
    """The registered extents of all GPUs of this process, with one card.

    Args:
        device: the card.
        port: the port to use.
        gid: the address to use; None on an InfiniBand port, where the LID is used.
        marking: the marks of packets.
    """

    def __init__(self, device: Device, port: PortAttributes, gid: Gid | None, marking: Marking = UNMARKED) -> None:
        self.device: Final = device
        self.path = port, gid, marking
        """The port, the address and the marks to use."""
        self.proofs: Final[dict[str, asyncio.Task[Any]]] = {}
        """The proofs that the card reaches a GPU, by its UUID: each is the reason why it does not, which is empty where
        bytes were moved both ways."""
        self._regions: dict[int, MemoryRegion] = {}
        self._under_way: dict[int, asyncio.Task[MemoryRegion]] = {}
        self._lock: Final = threading.Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        with self._lock:
            return sum(region.nbytes for region in self._regions.values())

    async def get(self, key: int, nbytes: int, export: Callable[[], int]) -> MemoryRegion:
        """The region of an extent, which is registered on a thread if it is not yet. Cancelling does not stop that.

        Args:
            key: a number that no other extent has, until this one is forgotten: its address.
            nbytes: bytes of the extent.
            export: makes a descriptor of the extent, a dma-buf, on the thread. It has to keep the extent in use.

        Raises:
            OSError: the device refused, or is closed.
            DeviceError: the GPU's driver refused.
        """
        region = self._regions.get(key)
        if region is not None:
            return region
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.ensure_future(self._on_thread(key, nbytes, export))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._registered(key, done))
        del export
        try:
            return await asyncio.shield(task)
        finally:
            del task  # the error's traceback has this frame, and would keep itself

    async def _on_thread(self, key: int, nbytes: int, export: Callable[[], int]) -> MemoryRegion:
        """Register an extent for all who wait for it: a coroutine of our own, as the end of the actor that is the first
        to need it cancels tasks of others'."""
        return await asyncio.to_thread(self._register, key, nbytes, export)

    def _register(self, key: int, nbytes: int, export: Callable[[], int]) -> MemoryRegion:
        fd = export()
        try:
            with self._lock:
                if self._closed:
                    raise OSError(errno.ESHUTDOWN, f"nothing is registered with {self.device.name} any more")
                region = self._regions[key] = self.device.register_dma_buf(fd, nbytes, remote_read=True)
        finally:
            os.close(fd)
        logger.debug("registered %d MiB of a GPU with %s", nbytes >> 20, self.device.name)
        return region

    def _registered(self, key: int, done: asyncio.Task[MemoryRegion]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # nobody may wait for it any more

    def forget(self, key: int) -> None:
        """Deregister an extent that is about to be unmapped, if it is registered. Any thread may call this."""
        with self._lock:
            region = self._regions.pop(key, None)
            if region is not None:
                self._end(region)

    def _end(self, region: MemoryRegion) -> None:
        try:
            region.close()
        except OSError as error:  # its keys cannot be used any more, and the kernel keeps the memory
            logger.warning("memory of a GPU could not be deregistered from %s: %s", self.device.name, error)

    async def read_itself(self, read: Read) -> str:
        """READ through a queue pair that is connected to itself.

        Args:
            read: the READ; its remote address and key are of this process, too.

        Returns:
            The reason why it has failed; empty where it has not. Nothing is written to its memory any more.

        Raises:
            OSError: a verb failed.
        """
        loop, pause, what = asyncio.get_running_loop(), _FIRST_PAUSE, f"a READ of {read.nbytes} bytes from itself"
        with ExitStack() as stack:  # the queue pair ends first
            cq = self.device.create_completion_queue(4)
            stack.callback(cq.close)
            qp = self.device.create_queue_pair(cq, None, max_send_wr=2, max_inline=0)
            stack.callback(qp.close)
            connect_to_itself(qp, self.device, *self.path)
            qp.post_reads([read])
            end = loop.time() + _PATIENCE
            while not (found := cq.poll(1)):
                if loop.time() >= end:
                    return f"{what} did not complete in {_PATIENCE:g} s"
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
            status = found[0].status
        return "" if status == CompletionStatus.SUCCESS else f"{what} failed: {describe_status(status)}"

    def close(self) -> None:
        """Deregister everything, and register nothing any more. Idempotent."""
        with self._lock:
            self._closed = True
            while self._regions:
                self._end(self._regions.popitem()[1])
