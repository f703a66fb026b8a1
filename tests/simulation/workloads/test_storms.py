"""The workload of spawn storms, without faults, and with errors of constructors that get lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.execution.actor_runner import ActorRunner

SCHEDULE = replace(draw(4, 3, 15.0, ("storms",), ("storms",)), faults=())


@pytest.mark.slow
def test_all_of_a_storm_answer() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) == {"ok"}
    assert "a storm of spawns" in run.record.sometimes


@pytest.mark.slow
def test_a_constructor_whose_error_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    construct = ActorRunner.construct

    async def quiet(self: ActorRunner, make: Callable[[], Any]) -> None:
        with contextlib.suppress(ValueError):
            await construct(self, make)

    monkeypatch.setattr(ActorRunner, "construct", quiet)
    run = Run(SCHEDULE)
    assert not run.play()
    assert "I3" in {broken.invariant for broken in run.record.broken}
