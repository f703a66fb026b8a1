"""Array results at full rate, with threads that take turns as often as the interpreter lets them."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import zcactor as zc
from benchmarks.harness import Measurement, Scale, exactly
from zcactor.process import context

__all__ = ["switching"]

INTERVAL: Final = 1e-6
SECONDS: Final = 60.0
UNDER_WAY: Final = 64
FLOATS: Final = 1024

Array = npt.NDArray[np.float64]


@zc.actor
class Maker:
    """An actor that returns arrays from its thread, while its loop sends others."""

    def set_interval(self, seconds: float) -> None:
        """Set the switch interval of its process."""
        sys.setswitchinterval(seconds)

    def make(self, number: int) -> Array:
        """Make a new array."""
        array = zc.empty(FLOATS)
        array[:] = number
        return array


async def switching(scale: Scale) -> list[Measurement]:
    """Count the connections that were lost in a minute, and the wrong bytes."""
    lost = wrong = results = 0
    interval = sys.getswitchinterval()
    async with zc.init():
        maker: Any = await zc.spawn(Maker)
        await maker.set_interval(INTERVAL)
        sys.setswitchinterval(INTERVAL)
        sessions = set(map(id, context.current().sessions.all()))
        try:
            end = time.monotonic() + SECONDS * min(1.0, scale.share)
            while time.monotonic() < end:
                found = await asyncio.gather(
                    *[maker.make(number) for number in range(UNDER_WAY)], return_exceptions=True
                )
                for number, array in enumerate(found):
                    if isinstance(array, BaseException):
                        lost += 1
                    else:
                        results += 1
                        wrong += int(array[0] != number or array[-1] != number)
                del found, array
        finally:
            sys.setswitchinterval(interval)
        lost += len(sessions - set(map(id, context.current().sessions.all())))
    name = f"array results for {SECONDS:.0f} s with a switch interval of 1 us"
    return [
        Measurement("switching", f"{name}: connections lost and calls failed", lost, "", budget=exactly(0)),
        Measurement("switching", f"{name}: wrong arrays", wrong, "", budget=exactly(0)),
        Measurement("switching", f"{name}: results", results, ""),
    ]
