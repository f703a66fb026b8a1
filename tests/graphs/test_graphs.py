"""The graphs of processes in a simulated cluster: after kills and cuts all runs have ended, and no lease is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from simulation.programs import Result, SimulatedCluster

SEEDS = 12
SURVIVED = (
    zc.ActorDied, zc.ActorUnavailable, zc.ConnectionLost, zc.DeadlineExceeded, zc.ObjectLost, zc.OutOfMemory,
    zc.RemoteError,
)  # fmt: skip
"""The errors that a run may have where actors are killed, connections are cut and stores are full."""


class Steps:
    """An actor of the simulated cluster."""

    async def add(self, a: int, b: int = 1) -> int:
        """Add."""
        return a + b

    async def first(self, array: Any, number: int) -> int:
        """The array's first element, and a number."""
        return int(array[0]) + number

    async def array(self, number: int) -> Any:
        """An array that travels by reference."""
        return np.full(1 << 12, number)


async def program(cluster: SimulatedCluster) -> tuple[int, int]:
    """Run a graph again and again. Returns the numbers of runs that have ended well, and with an error."""
    actors = [await cluster.spawn(Steps, max_restarts=-1) for _ in range(4)]
    async with zc.graph(in_flight=3) as g:
        x = g.input()
        made, left = actors[0].array.bind(x), actors[1].add.bind(x, 10)
        g.output(actors[2].first.bind(made, left), actors[3].add.bind(left, x))
    for _ in range(50):
        try:
            run = await g.compile()
            break
        except SURVIVED:
            await asyncio.sleep(1)
    good = bad = 0
    dice = random.Random(5)
    for _ in range(12):
        references = [(number, run(number, timeout=60)) for number in range(dice.randrange(6))]
        for number, reference in references:
            if dice.random() < 0.1:
                reference.cancel()
            try:
                assert await reference == (2 * number + 10, 2 * number + 10)
                good += 1
            except (*SURVIVED, asyncio.CancelledError):
                bad += 1
        await asyncio.sleep(dice.random() * 4)
    await run.close()
    return good, bad


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_faults_of_a_cluster(seed: int, zc_simulation: Callable[..., Result]) -> None:
    result = zc_simulation(program, seed=seed, nodes=3)
    good, bad = result.value
    assert good > 0 and good + bad > 10
