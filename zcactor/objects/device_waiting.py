"""Waits for work of a GPU on the loop: for moments, and for copies."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from zcactor.errors import DeviceError
from zcactor.exception_pickling import bare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from zcactor.device.events import Moment
    from zcactor.device.memory import GpuMemory
    from zcactor.process.tasks import Tasks

__all__ = ["copied", "until_done"]

_FIRST_PAUSE: Final = 0.0002
_LAST_PAUSE: Final = 0.005
"""Seconds between looks at work of a GPU that the loop waits for. A look is one at a number in memory."""


async def until_done(moments: Iterable[Moment]) -> None:
    """Wait for work of a GPU, while the loop goes on.

    Raises:
        DeviceError, ObjectLost: see `zcactor.device.work.looks`.
    """
    from zcactor.device.work import looks

    for pause in looks(moments, _FIRST_PAUSE, _LAST_PAUSE):
        await asyncio.sleep(pause)


async def copied(
    tasks: Tasks, gpu: GpuMemory, stream: int, destination: int, source: int, nbytes: int, kept: object,
    pinned: bool = True,
) -> None:  # fmt: skip
    """Copy bytes by a GPU. Memory that is `kept` stays until that is done, also where this is cancelled.

    Args:
        tasks: the tasks of this process.
        gpu: the GPU.
        stream: the stream of the GPU.
        destination: the address to copy to.
        source: the address to copy from.
        nbytes: bytes.
        kept: the owners of both.
        pinned: whether all memory of the host in it is locked in place. CUDA returns from a copy of other memory when
            that is done, so a thread makes it.

    Raises:
        DeviceError: the driver refuses.
    """
    copy = partial(gpu.driver.copy, gpu.index, destination, source, 1, nbytes, (nbytes, nbytes), stream)
    if pinned:
        copy()
    failure = await asyncio.shield(tasks.begin(_outcome(gpu, stream, None if pinned else copy, kept)))
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # a traceback with this frame, and with what is kept, would keep itself


async def _outcome(gpu: GpuMemory, stream: int, copy: Callable[[], None] | None, kept: object) -> DeviceError | None:
    """Make a copy in a thread, if one is left to make, and wait for all work of a stream, the last of which uses memory
    of `kept`. Returns the error of the driver, if any."""
    failure = None
    try:
        if copy is not None:
            await asyncio.to_thread(copy)
        await until_done([gpu.events.record(stream)])
    except DeviceError as error:
        failure = bare(error, None)
    pause = _FIRST_PAUSE
    while failure is not None and not failure.fatal and not gpu.events.is_idle(stream):
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)
    del kept
    return failure
