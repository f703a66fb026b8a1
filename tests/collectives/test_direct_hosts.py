"""The direct exchange of several ranks on several hosts, in simulated clusters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import zcactor as zc
from simulation.programs import Result, SimulatedCluster
from tests.collectives.ranks import Rank, everywhere
from tests.collectives.test_folding import bits, drawn, written_by_terms
from zcactor.collectives.hierarchy import Hierarchy

Simulate = Callable[..., Result]


async def placed(cluster: SimulatedCluster, hosts: Sequence[int], **options: Any) -> tuple[zc.Group, list[Any]]:
    """A group of actors on the nodes of those numbers."""
    nodes = sorted([node.node_id for node in await zc.nodes()])
    actors = [await cluster.spawn(Rank, node=nodes[host]) for host in hosts]
    return await zc.group(actors, **options), actors


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 2, 1, 1, 0)])
@pytest.mark.parametrize("reproducible", ["placement", "everywhere"])
def test_each_host_is_added_first_unless_the_order_is_that_of_the_ranks(
    zc_simulation: Simulate, hosts: tuple[int, ...], reproducible: Any
) -> None:
    size, rng = len(hosts), np.random.default_rng(9)
    terms = Hierarchy(hosts, everywhere=reproducible == "everywhere").terms
    assert len(terms) == (1 if reproducible == "everywhere" else len({*hosts}))

    async def program(cluster: SimulatedCluster) -> None:
        group, actors = await placed(cluster, hosts, reproducible=reproducible)
        for dtype, op in ((np.float32, "sum"), (ml_dtypes.bfloat16, "mean"), (np.float16, "prod"), (np.int16, "min")):
            for count in (3, 9_000):
                inputs = [drawn(rng, dtype, count * 2).reshape(count, 2) for _ in hosts]
                wanted = written_by_terms(op, inputs, terms)
                for plan in ("auto", "eager", "naive", "direct", "shared"):
                    found = await zc.get(
                        [a.reduce(group, x, op, plan=plan) for a, x in zip(actors, inputs, strict=True)]
                    )
                    assert all(bits(result) == bits(wanted) for result, *_ in found), (dtype, count, plan)
                    assert not any(during or not after for _, _, during, after in found)
                pieces = await zc.get(
                    [a.call(group, "reduce_scatter", x, op) for a, x in zip(actors, inputs, strict=True)]
                )
                assert bits(np.concatenate(pieces)) == bits(wanted), (dtype, count)
        lengths = [9_000 * rank % 13_000 for rank in range(size)]  # some travel in frames
        inputs = [np.full(length, rank, np.int64) for rank, length in enumerate(lengths)]
        whole = await zc.get([a.call(group, "allgather", x) for a, x in zip(actors, inputs, strict=True)])
        assert all(np.array_equal(result, np.concatenate(inputs)) for result in whole)
        inputs = [drawn(rng, np.int16, 9_000) for _ in hosts]
        wanted = written_by_terms("min", inputs, terms)
        again = await group.reform()
        found = await zc.get([a.reduce(again, x, "min") for a, x in zip(actors, inputs, strict=True)])
        assert all(bits(result) == bits(wanted) for result, *_ in found)
        for plan in ("ring", "halving"):
            summed = await everywhere(actors, "call", again, "allreduce", np.arange(9_000), plan=plan)
            assert all(np.array_equal(result, np.arange(9_000) * size) for result in summed)

    zc_simulation(program, seed=1, nodes=len({*hosts}), faults=())


@pytest.mark.slow
@pytest.mark.parametrize(("reproducible", "inputs"), [("placement", 2), ("everywhere", 4)])
def test_a_rank_takes_its_part_of_each_host_or_of_each_rank(
    zc_simulation: Simulate, reproducible: Any, inputs: int
) -> None:
    async def program(cluster: SimulatedCluster) -> None:
        group, actors = await placed(cluster, (0, 0, 1, 1, 2, 2), reproducible=reproducible)
        x = zc.ones(3 << 14)
        await everywhere(actors, "keep", "x", x)  # it is there
        found = await everywhere(actors, "taken", group, "allreduce", x, plan="direct")
        finished = 2  # one of each other host
        wanted = x.nbytes * (inputs + finished) / 6
        assert [received for received, _ in found] == pytest.approx([wanted] * 6, rel=0.01)
        assert (await group.explain(x.nbytes)).volume["direct"] == pytest.approx(wanted, rel=0.01)

    zc_simulation(program, seed=2, nodes=3, faults=())


@pytest.mark.slow
def test_ranks_of_sixty_four_are_killed(zc_simulation: Simulate) -> None:
    seed = 10  # each tenth takes the native wire, which has the speed for 4,032 publications an operation
    rng = random.Random(seed)

    async def program(cluster: SimulatedCluster) -> None:
        group, actors = await placed(cluster, [rank % 4 for rank in range(64)])
        for elements, plan in ((9_000, "direct"), (100, "auto")):
            victim = rng.randrange(len(actors))
            calls = [actor.many(group, 1_000_000, elements, plan) for actor in actors]
            await asyncio.sleep(rng.random() * 0.01)  # of the simulated clock: in the first operations
            await zc.kill(actors.pop(victim))
            with pytest.raises(zc.ActorDied):
                await calls.pop(victim)
            done = await zc.get(calls)
            assert max(done) - min(done) <= 1
            group = await group.without(victim)
            found = await everywhere(actors, "call", group, "allreduce", np.arange(float(elements)), plan=plan)
            assert all(np.array_equal(result, np.arange(float(elements)) * len(actors)) for result in found)

    zc_simulation(program, seed=seed, nodes=4, faults=())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed_breaks_the_group_on_all_hosts(zc_simulation: Simulate, seed: int) -> None:
    rng = random.Random(seed)

    async def program(cluster: SimulatedCluster) -> None:
        group, actors = await placed(cluster, (0, 0, 1, 1, 2))
        for plan in ("direct", "naive"):
            victim = rng.randrange(len(actors))
            calls = [actor.many(group, 1_000_000, 9_000, plan) for actor in actors]
            await asyncio.sleep(rng.random() * 0.02)
            await zc.kill(actors.pop(victim))
            with pytest.raises(zc.ActorDied):
                await calls.pop(victim)
            done = await zc.get(calls)
            assert max(done) - min(done) <= 1
            group = await zc.group(actors)
            found = await everywhere(actors, "call", group, "allreduce", np.arange(9_000), plan=plan)
            assert all(np.array_equal(result, np.arange(9_000) * len(actors)) for result in found)

    zc_simulation(program, seed=seed, nodes=3, faults=())
