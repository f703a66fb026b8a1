"""A network card and the GPUs of this process: the registration of memory, and the proof that both reach each other.

Cards and GPUs that were passed through to a virtual machine have delivered other bytes without an error. So 64 KiB are
moved in both directions, and compared, before an array is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from zcactor.errors import OutOfMemory, ZcactorError
from zcactor.objects.device_waiting import copied, until_done

if TYPE_CHECKING:
    from zcactor.device.memory import DeviceBlock, GpuMemory
    from zcactor.process.tasks import Tasks

__all__ = ["Momentary", "prove", "registered"]

_PROOF_NBYTES: Final = 64 << 10


class Momentary(str):
    """A reason that may not hold the next time: a driver has refused a call, which it may take later."""

    __slots__ = ()


async def registered(memory: Any, block: DeviceBlock) -> tuple[Any, int]:
    """Register the extent around an object with a card, unless it is. It is deregistered before it is unmapped.

    Args:
        memory: the `zcactor.transport.verbs.device.gpu_memory.RegisteredGpuMemory` of the card.
        block: the object, one of this process.

    Returns:
        The extent's `zcactor.transport.verbs.driver.base.MemoryRegion`, and the object's offset in it.

    Raises:
        DeviceError, OSError: the driver of the GPU refuses, or that of the card.
    """
    arena = block.gpu.arena
    address, nbytes = arena.extent_around(block.address)
    arena.add_card(memory)
    return await memory.get(address, nbytes, partial(_exported, block, address, nbytes)), block.address - address


def _exported(block: DeviceBlock, address: int, nbytes: int) -> int:
    """A descriptor of an extent, which `block` keeps in use meanwhile."""
    return block.gpu.driver.dma_buf(block.gpu.index, address, nbytes)


async def prove(tasks: Tasks, memory: Any, gpu: GpuMemory, stream: int) -> str:
    """Move random bytes from a GPU to the host by the card, and from the host to the GPU, and compare them.

    Args:
        tasks: the tasks of this process.
        memory: the `zcactor.transport.verbs.device.gpu_memory.RegisteredGpuMemory` of the card.
        gpu: the GPU.
        stream: the stream for its own copies.

    Returns:
        The reason why the card does not reach the GPU; empty where the bytes came out right. It is a `Momentary` where
        that could not be tried.

    Raises:
        OutOfMemory: the GPU has no room for 64 KiB.
    """
    if not gpu.driver.exports_to_cards:
        return "the GPU's driver exports no memory to network cards (dma-buf)"
    try:
        return await _moved(tasks, memory, gpu, stream)
    except OutOfMemory:
        raise
    except (ZcactorError, OSError, ValueError) as error:  # the last one for a request that no device can do
        return Momentary(error)


async def _moved(tasks: Tasks, memory: Any, gpu: GpuMemory, stream: int) -> str:
    from zcactor.device.memory import DeviceBlock
    from zcactor.transport.verbs.driver.base import Read

    nbytes, name = _PROOF_NBYTES, memory.device.name
    out, back = os.urandom(nbytes), os.urandom(nbytes)
    block = DeviceBlock(gpu, nbytes)
    host = mmap.mmap(-1, nbytes)
    anchor = ctypes.c_char.from_buffer(host)
    address, kept = ctypes.addressof(anchor), (block, anchor)
    with ExitStack() as stack:
        ours = memory.device.register(address, nbytes, remote_read=True)
        stack.callback(ours.close)
        region, at = await registered(memory, block)
        place = region.address + at
        await until_done(block.work.writes())
        host[:] = out
        await copied(tasks, gpu, stream, block.address, address, nbytes, kept)
        host[:] = bytes(nbytes)
        reason = await memory.read_itself(Read(1, address, nbytes, ours.lkey, place, region.rkey))
        if reason or host[:] != out:
            return f"{name} does not read memory of the GPU: {reason or 'it delivered other bytes'}"
        host[:] = back
        reason = await memory.read_itself(Read(2, place, nbytes, region.lkey, address, ours.rkey))
        if reason:
            return f"{name} does not write to memory of the GPU: {reason}"
        gpu.driver.flush(gpu.index)
        host[:] = bytes(nbytes)
        await copied(tasks, gpu, stream, address, block.address, nbytes, kept)
        if host[:] != back:
            return f"{name} does not write to memory of the GPU: other bytes came there"
    return ""
