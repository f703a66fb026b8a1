"""The workload of handles: without faults, with actors that never end, and with actors that end while held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.run import Run
from simulation.schedule import draw
from simulation.workloads import handles
from zcactor.control.actor_record import ActorRecord
from zcactor.control.head import Head

SCHEDULE = replace(draw(1, 3, 10.0, ("handles",), ("handles",)), faults=())


@pytest.mark.slow
def test_actors_live_as_long_as_their_handles() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.outcomes["ok"] > 100
    assert {operation.kind for operation in run.record.operations.values()} == {
        "take", "give", "drop", "call", "who", "through a kept handle",
    }  # fmt: skip
    assert run.record.sometimes["a handle held by the third process that had it"]


@pytest.mark.slow
def test_an_actor_that_nothing_holds_and_that_lives_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "_unheld", lambda *_: None)
    run = Run(SCHEDULE)
    assert not run.play()
    assert "I10" in {broken.invariant for broken in run.record.broken}


@pytest.mark.slow
def test_an_actor_that_is_held_and_has_ended_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = Head._alive

    def and_ends(self: Head, actor: ActorRecord) -> None:
        alive(self, actor)
        if actor.name is None:
            self.process.loop.call_later(0.01, self._begin_stop, actor, handles.DROPPED)

    monkeypatch.setattr(Head, "_alive", and_ends)
    run = Run(SCHEDULE)
    assert not run.play()
    assert any("its handle is held" in broken.text for broken in run.record.broken)
