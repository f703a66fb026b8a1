"""The workload of promises, without faults, and with a resolver that gives wrong values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.execution import arguments

SCHEDULE = replace(draw(1, 3, 8.0, ("promises",), ("promises",)), faults=())


@pytest.mark.slow
def test_chains_give_what_they_should() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) == {"ok"}
    assert run.record.outcomes["ok"] > 30


@pytest.mark.slow
def test_a_promise_that_is_resolved_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = arguments._resolved

    def wrong(value: Any) -> Any:
        found = resolved(value)
        return found if found is value or not isinstance(found, int) else found + 1

    monkeypatch.setattr(arguments, "_resolved", wrong)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} == {"I3"}
