"""The look-out for rare states."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from simulation.invariants import OF_HEAD, OF_PROCESSES, OF_PUSHES, OF_RUNS, STATES, States
from simulation.record import Record
from simulation.run import Run
from simulation.schedule import draw
from simulation.trace import Trace
from simulation.workloads import WORKLOADS
from simulation.world import World
from zcactor.objects import expectations, pushes


def test_there_are_a_dozen_at_the_least() -> None:
    groups = OF_HEAD, OF_PROCESSES, OF_RUNS, OF_PUSHES
    assert len(set(STATES)) == sum(map(len, groups)) >= 12


def test_the_states_of_pushes_are_those_that_the_package_notes() -> None:
    text = inspect.getsource(pushes) + inspect.getsource(expectations)
    noted = {state for call in re.findall(r"self\.noted\((.*)\)", text) for state in re.findall(r'"([^"]+)"', call)}
    assert noted - {"maker could not push", "owner could not push"} == set(OF_PUSHES), "two need a full store as well"


def test_states_of_the_head() -> None:
    record = Record(World(1, Trace()))
    states = States(record)
    node: Any = Mock(id="n")
    actor: Any = SimpleNamespace(
        displaced=True,
        state="restarting",
        node_id="n",
        ending=object(),
        withdraw=object(),
        restarts=2,
        _failed_starts=1,
    )
    lost: Any = SimpleNamespace(
        members=SimpleNamespace(_fenced={node: None}), _actors=SimpleNamespace(all=lambda: [actor])
    )
    states.of_head(lost)
    assert set(record.sometimes) == set(OF_HEAD)


@pytest.mark.slow
def test_a_run_meets_some() -> None:
    run = Run(draw(7, 6, 10.0, ("calls", "promises", "names", "handles"), list(WORKLOADS)))
    assert run.play()
    met = {state for state in STATES if state in run.record.sometimes}
    assert {"a call is held back", "bytes are on their way", "an object was pinned"} <= met, met
