"""A process is told once that it can use a GPU no more."""

from __future__ import annotations

import asyncio

from zcactor.errors import DeviceError
from zcactor.process.broken import BrokenParts
from zcactor.testing import until


async def test_the_first_error_is_told() -> None:
    gpus = BrokenParts(asyncio.get_running_loop())
    errors = [DeviceError("done", 700, number, True) for number in range(3)]
    told: list[DeviceError] = []
    gpus.on_broken = told.append
    await asyncio.to_thread(gpus.note, errors[0])
    gpus.note(errors[1])
    await until(lambda: told, "the first is told")
    gpus.note(errors[2])
    looked: list[int] = []
    asyncio.get_running_loop().call_soon(looked.append, 1)
    await until(lambda: looked, "the loop has turned")
    assert told == [errors[0]]
