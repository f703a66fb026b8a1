"""The workload of moves, without faults, and with memory that is used again before its new owner has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.marshal.move import retire

SCHEDULE = replace(draw(1, 3, 10.0, ("moves",), ("moves",)), faults=())


@pytest.mark.slow
def test_arrays_go_from_hand_to_hand() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) == {"ok"}
    assert {operation.kind for operation in run.record.operations.values()} == {"move", "move on"}


@pytest.mark.slow
def test_memory_that_is_used_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(array: Any) -> None:
        array[...] = 7777
        retire(array)

    monkeypatch.setattr("zcactor.marshal.marshaller.retire", spoil)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} == {"I5"}
