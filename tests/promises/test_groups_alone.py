"""Groups in runtimes with settings of their own: ranks with unequal limits, and ranks that wait for long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.collectives.ranks import EAGER, Rank, everywhere

PATIENCE = 20
"""Seconds after which a rank that waits for ever is given up."""


@zc.actor
class Waiter:
    """A member that waits for others."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned = asyncio.Event()

    async def sum(self, group: zc.Group, count: int = 10) -> float:
        """An operation of the group."""
        return float((await group.allreduce(np.ones(count)))[0])

    async def waits(self, group: zc.Group) -> list[str]:
        """Call an operation. Returns the warnings of this process until it ends."""
        handler = logging.Handler(logging.WARNING)

        def emit(record: logging.LogRecord) -> None:
            self.said.append(record.getMessage())
            self.warned.set()

        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("zcactor").addHandler(handler)
        await group.allreduce(np.ones(50_000))
        return self.said

    async def is_warned(self) -> None:
        """Wait for a warning of `waits`."""
        await asyncio.wait_for(self.warned.wait(), PATIENCE)


async def test_ranks_with_unequal_eager_limits() -> None:
    """Two ranks send each other more in a frame than the third takes."""
    async with zc.init(num_cpus=4, log_to_driver=False):
        limits: tuple[dict[str, str], ...] = (
            {"ZCACTOR_EAGER_LIMIT": "1048576"},
            {"ZCACTOR_EAGER_LIMIT": "1048576"},
            {},
        )
        actors: list[Any] = [await Rank.options(env=env).spawn() for env in limits]
        group = await zc.group(actors)
        for nbytes in (EAGER, EAGER + 1, 24_000, 1 << 20, (1 << 20) + 8):
            for plan in ("auto", "shared", "naive"):
                x = np.ones(nbytes // 8)
                for result in await everywhere(actors, "call", group, "allreduce", x, plan=plan):
                    assert np.array_equal(result, 3 * x), (nbytes, plan)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_rank_that_waits_says_for_whom(shared: bool) -> None:
    async with zc.init(num_cpus=4, log_to_driver=False, config=zc.Config(warn_after=0.1)):
        cls: Any = Waiter.options(process="shared") if shared else Waiter
        actors: list[Any] = [await cls.spawn() for _ in range(2)]
        group = await zc.group(actors)
        await everywhere(actors, "sum", group)
        waiting = actors[0].waits(group)
        await actors[0].is_warned()
        assert await actors[1].sum(group, 50_000) == 2
        (said,) = [text for text in await waiting if "of a group of 2" in text]
        assert said.startswith("rank 0, Waiter(") and "operation 1, allreduce(float64, (50000,), 'sum')" in said
        assert "rank 1, Waiter(" in said
        assert "has called 1 operations, waits in none, and runs no method" in said
