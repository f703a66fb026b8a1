"""Address space: a host's memory bounds neither the number of actors nor that of their peers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zcactor as zc

TIB = 1 << 40


@zc.actor
class Rank:
    def make(self, count: int) -> Any:
        return np.full(count, 3.0)

    def total(self, *arrays: Any) -> float:
        return float(sum(array.sum() for array in arrays))

    async def reduce(self, group: zc.Group, count: int) -> float:
        return float((await group.allreduce(np.ones(count)))[-1])


@pytest.mark.slow
async def test_actors_on_a_host_with_12_tib_of_memory() -> None:
    """The store of each has 30 % of it. Forty such arenas in one address space would take more than it has."""
    async with zc.init(store_capacity=12 * TIB * 3 // 10, num_cpus=64, log_to_driver=False):
        actors: list[Any] = [await Rank.spawn() for _ in range(40)]
        arrays = await zc.get([actor.make(20_000) for actor in actors])
        assert sum(float(array[-1]) for array in arrays) == 120.0
        assert await actors[0].total(*arrays) == 40 * 60_000.0
        group = await zc.group(actors)
        assert await zc.get([actor.reduce(group, 20_000) for actor in actors]) == [40.0] * 40
