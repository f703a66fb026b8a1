"""The workload of drained nodes, without faults, and with a runner that drops a call which it should send back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.execution import actor_runner

SCHEDULE = replace(draw(7, 4, 5.0, ("drains",), ("drains",)), faults=())


@pytest.mark.slow
def test_no_call_fails_and_each_runs_once() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.sometimes["a node was drained"]
    assert set(run.record.outcomes) <= {"ok", "MailboxFull"}


@pytest.mark.slow
def test_a_call_that_is_refused_by_an_actor_that_moves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> bool:
        return False

    monkeypatch.setattr(actor_runner, "send_back", refuse)
    run = Run(SCHEDULE)
    assert not run.play()
    assert "I3" in {broken.invariant for broken in run.record.broken}
