"""Whole runs: some seeds, and every schedule that has failed before. `tools/seeds.py` plays 150 seeds in full, and a
thousand nodes."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulation.run import Run
from simulation.schedule import Fault, Schedule, draw
from simulation.workloads import WORKLOADS
from zcactor.marshal.arrays import dtype_code, dtype_from_code, known_codes, known_dtypes

CASES = sorted(Path(__file__).with_name("cases").glob("*.toml"))


def play(schedule: Schedule) -> Run:
    run = Run(schedule)
    run.play()
    assert not run.record.broken, [broken.plain() for broken in run.record.broken]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1001, 1002])
def test_seeds(seed: int) -> None:
    run = play(draw(seed, 6, 10.0, (), list(WORKLOADS)))
    assert run.record.outcomes["ok"] > 5
    assert run.line("c")["digest"] == run.trace.digest


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path) -> None:
    play(Schedule.read(path, list(WORKLOADS)))


@pytest.mark.slow
def test_a_single_node() -> None:
    play(draw(5, 1, 5.0, (), list(WORKLOADS)))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_nodes() -> None:
    run = play(draw(42, 60, 3.0, (), list(WORKLOADS)))
    assert run.cluster.joined >= 60


@pytest.mark.slow
@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_a_cluster_that_loses_its_head(workload: str) -> None:
    whole = draw(1, 4, 8.0, (workload,), list(WORKLOADS))
    run = play(replace(whole, faults=(Fault(3.0, "head", ("h0",)), Fault(3.5, "off", ("h1",), 1.0))))
    assert run.record.sometimes["the head's host is gone"] == 1
    assert {loop.name[0] for loop in run.world.loops.values()} == {"d", "f"}, "the driver, and the faults"


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_actors_held_arrays_when_their_processes_ended() -> None:
    run = play(replace(draw(1, 3, 3.0, ("drivers",), list(WORKLOADS)), faults=(Fault(2.0, "head", ("h0",)),)))
    world = weakref.ref(run.world)
    del run
    gc.collect()
    assert world() is None


def test_a_run_knows_no_dtype_of_an_earlier_one() -> None:
    """The native wire writes arrays of the dtypes that are known, and Python the others: with other bytes."""
    dtype = np.dtype("M8[ns]")
    dtype_from_code(dtype_code(dtype))
    play(replace(draw(7, 1, 0.1, ("calls",), list(WORKLOADS)), faults=()))
    assert dtype not in known_codes
    assert dtype.str not in known_dtypes


@pytest.mark.slow
def test_a_program_without_another_host_keeps_its_head() -> None:
    run = play(
        replace(
            draw(1, 2, 3.0, ("calls",), ["calls"]),
            faults=(Fault(1.0, "head", ("h0",)), Fault(1.5, "off", ("h1",), 1.0)),
        )
    )
    assert "the head's host is gone" not in run.record.sometimes
