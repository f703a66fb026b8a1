"""Whole runs: seeds that were drawn once, and every schedule that has failed before."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcactor.simulation.run import Run
from zcactor.simulation.schedule import Schedule, draw
from zcactor.simulation.workloads import WORKLOADS

CASES = sorted(Path(__file__).with_name("cases").glob("*.toml"))


def play(schedule: Schedule) -> Run:
    run = Run(schedule)
    run.play()
    assert not run.record.broken, [broken.plain() for broken in run.record.broken]
    return run


@pytest.mark.parametrize("seed", [1001, 1002, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1003, 1009))])
def test_seeds(seed: int) -> None:
    run = play(draw(seed, 6, 10.0, (), list(WORKLOADS)))
    assert run.record.outcomes["ok"] > 5
    assert run.line("c")["digest"] == run.trace.digest


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 24, 38, 100])
def test_seeds_in_full(seed: int) -> None:
    play(draw(seed, 6, 30.0, (), list(WORKLOADS)))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path) -> None:
    play(Schedule.read(path, list(WORKLOADS)))


def test_a_single_node() -> None:
    play(draw(5, 1, 5.0, (), list(WORKLOADS)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_nodes() -> None:
    run = play(draw(42, 200, 3.0, (), list(WORKLOADS)))
    assert run.cluster.joined >= 200
