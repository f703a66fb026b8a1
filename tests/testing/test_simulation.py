"""A program in a simulated cluster: the same seed gives the same run, and a failure says how to repeat it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import zcactor as zc
from simulation.programs import Result, SimulatedCluster
from simulation.schedule import Fault

Simulate = Callable[..., Result]


@zc.actor
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    @zc.method(idempotent=True, retries=20)
    async def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    async def length(self, array: Any) -> int:
        return len(array)


async def program(cluster: SimulatedCluster) -> Any:
    counters = [await cluster.spawn(Counter, number, max_restarts=-1) for number in range(3)]
    results = []
    for _ in range(10):
        results.append(await asyncio.gather(*(each.add(0) for each in counters)))
        await asyncio.sleep(1)
    assert cluster.now > 10
    return [await each.length(zc.zeros(1 << 14)) for each in counters], results[0]


@pytest.mark.slow
def test_without_faults(zc_simulation: Simulate) -> None:
    result = zc_simulation(program, seed=3, nodes=2, faults=())
    assert result.ok and not result.broken and not result.faults
    assert result.value == ([1 << 14] * 3, [0, 1, 2])
    assert result.virtual_s > 10 and result.events > 500
    assert len(result.digest) == 16


@pytest.mark.slow
async def test_the_same_seed_gives_the_same_run(zc_simulation: Simulate, zc_runtime: Any) -> None:
    """A runtime in this process and a running loop are not in the way."""
    first, again = (zc_simulation(program, seed=5, nodes=3) for _ in range(2))
    assert first == again
    assert first.faults
    assert zc_simulation(program, seed=6, nodes=3, faults=()).digest != first.digest
    real: Any = await Counter.spawn(1)
    assert await real.add(1) == 2


@pytest.mark.slow
def test_chosen_faults_settings_and_workloads(zc_simulation: Simulate) -> None:
    faults = [Fault(2.0, "kill", ("h1",)), {"at": 1.0, "kind": "slow", "who": ["h0", "h1"], "seconds": 2.0}]
    result = zc_simulation(program, seed=1, nodes=2, faults=faults, workloads=("calls",), recv_depth=8)
    assert [fault.kind for fault in result.faults] == ["slow", "kill"]


async def broken(cluster: SimulatedCluster) -> None:
    await cluster.spawn(Counter)
    raise LookupError("the program gives up")


@pytest.mark.slow
def test_errors_of_the_program(zc_simulation: Simulate) -> None:
    with pytest.raises(LookupError, match="gives up") as caught:
        zc_simulation(broken, seed=7, nodes=1, faults=())
    (note,) = caught.value.__notes__
    assert note.startswith("simulated with seed 7; repeat it by: python -m pytest '")
    assert "test_errors_of_the_program" in note


async def leaving(cluster: SimulatedCluster) -> Any:
    return zc.zeros(1 << 16)


@pytest.mark.slow
def test_broken_invariants(zc_simulation: Simulate) -> None:
    with pytest.raises(AssertionError, match="I8 at virtual second .*bytes in 1 block") as caught:
        zc_simulation(leaving, seed=8, nodes=1, faults=())
    assert "seed 8" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"nodes": 0}, ValueError, "nodes is 0"),
        ({"workloads": ("sleep",)}, ValueError, "unknown workload 'sleep'"),
        ({"faults": [{"at": 1, "kind": "rain", "who": ["h0"]}]}, ValueError, "unknown fault 'rain'"),
        ({"faults": ["kill"]}, TypeError, "a fault is a Fault or a mapping"),
        ({"recv_depht": 3}, TypeError, "recv_depht"),
    ],
)
def test_wrong_arguments(zc_simulation: Simulate, arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        zc_simulation(program, seed=1, **arguments)
