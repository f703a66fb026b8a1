"""The workload of restart loops, without faults, and with an actor that is made again too often."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from simulation.workloads.restarts import Phoenix

SCHEDULE = replace(draw(6, 3, 20.0, ("restarts",), ("restarts",)), faults=())


@pytest.mark.slow
def test_actors_live_as_often_as_they_may() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.outcomes["ok"] and run.record.outcomes["ActorDied"]
    assert run.record.sometimes["a process ended in a constructor"]
    assert max(run.record.lives(f"x{number}") for number in range(1, 20)) == 4


@pytest.mark.slow
def test_an_actor_that_lives_too_often_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = Phoenix.options

    def lasting(**given: Any) -> Any:
        return options(**{**given, "max_restarts": given["max_restarts"] + 1})

    monkeypatch.setattr(Phoenix, "options", lasting)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} == {"I4"}
