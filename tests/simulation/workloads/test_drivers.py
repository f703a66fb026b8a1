"""The workload of drivers, without faults, and with memory that ends with the driver that made it."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest

from simulation.cluster import Cluster
from simulation.loop import SimLoop
from simulation.run import Run
from simulation.schedule import draw

SCHEDULE = replace(draw(3, 3, 20.0, ("drivers",), ("drivers",)), faults=())


@pytest.mark.slow
def test_drivers_come_and_go() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.outcomes["ok"] > 20
    assert run.record.sometimes["driver left"] and run.record.sometimes["driver killed"]


@pytest.mark.slow
def test_an_array_that_ends_with_its_driver_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Cluster.kill

    def spoil(self: Cluster, loop: SimLoop, cause: str, *, silently: bool = False) -> None:
        if loop.name.startswith("visitor") and loop.process is not None and not loop.dead:
            arena = loop.process.store.arena
            ctypes.memset(arena.address, 0, arena.nbytes)
        kill(self, loop, cause, silently=silently)

    monkeypatch.setattr(Cluster, "kill", spoil)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} == {"I5"}
