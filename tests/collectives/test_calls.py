"""The choice of an operation for a call, by where its array lies."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import zcactor as zc
from tests.collectives.ranks import Rank


@zc.actor
class Loaded(Rank):
    """A member that tells which modules it has."""

    async def modules(self, group: zc.Group) -> list[str]:
        """Call all collectives with arrays on the host. Returns the modules for GPUs that were imported."""
        x = np.ones(4, "f4")
        for operation, value in (("allreduce", x), ("reduce_scatter", x), ("allgather", x), ("broadcast", x)):
            await getattr(group, operation)(value)
        await group.allgather([1, 2], concat=False)
        await group.alltoall([3])
        names = ("zcactor.device.array", "zcactor.collectives.gpu", "zcactor.collectives.nccl", "cupy")
        return [name for name in sys.modules if name.startswith(names)]


async def test_arrays_on_the_host_import_nothing_for_gpus() -> None:
    async with zc.init(num_cpus=2, log_to_driver=False):
        actor: Any = await Loaded.spawn()
        assert await actor.modules(await zc.group([actor])) == []


async def test_the_rows_of_shards_may_be_of_numpy() -> None:
    async with zc.init(num_cpus=2, log_to_driver=False):
        actors: list[Any] = [await Rank.spawn() for _ in range(2)]
        group = await zc.group(actors)
        shards = [[1, 2], np.array([1, 2])]
        calls = [a.call(group, "reduce_scatter", np.ones(3), shards=s) for a, s in zip(actors, shards, strict=True)]
        assert [found.tolist() for found in await zc.get(calls)] == [[2.0], [2.0, 2.0]]
