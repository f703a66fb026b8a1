"""Arrays that an actor sends to itself, and arrays of its own that come back to it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import zcactor as zc

COUNT = 100_000


@zc.actor(max_concurrency=2)
class Mirror:
    """An actor with a handle to itself, and one to another."""

    def __init__(self) -> None:
        self._itself: Any = None
        self._other: Any = None
        self._kept: Any = None

    def meet(self, itself: Any, other: Any) -> None:
        """Take both handles."""
        self._itself, self._other = itself, other

    async def keep(self, array: Any) -> None:
        """Keep an array."""
        self._kept = array

    async def echo(self, array: Any) -> Any:
        """Return an array."""
        return array

    async def total(self, array: Any) -> float:
        """The sum of an array, which may be in a list."""
        return float(np.sum(array))

    async def run(self, rounds: int) -> list[float]:
        """Send an array that came from itself to itself and to the other actor, while others are made and dropped."""
        found = []
        for number in range(rounds):
            await self._itself.keep(np.full(COUNT, number + 1.0))
            for array in (self._kept, await self._itself.echo(self._kept), await self._other.echo(self._kept)):
                for handle in (self._itself, self._other):
                    found.append(await handle.total(array))
                    found.append(await handle.total([array]))
            others = [zc.full(COUNT, 7.0) for _ in range(8)]
            found.append(float(self._kept.sum()))
            del others
        return found


@pytest.mark.parametrize("process", ["own", "shared"])
async def test_an_array_that_an_actor_sends_to_itself_stays_as_it_was(process: Literal["own", "shared"]) -> None:
    async with zc.init(num_cpus=4, log_to_driver=False):
        first, second = [await Mirror.options(process=process).spawn() for _ in range(2)]
        mirror: Any = first
        await mirror.meet(first, second)
        found = await mirror.run(4)
        assert found == [COUNT * (number + 1.0) for number in range(4) for _ in range(13)]
        assert await mirror.echo(1) == 1, "no connection was dropped"
