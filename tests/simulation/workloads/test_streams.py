"""The workload of streams, without faults, and with a session that numbers items wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.rpc.session import Session

SCHEDULE = replace(draw(1, 3, 10.0, ("streams",), ("streams",)), faults=())


@pytest.mark.slow
def test_streams_end_well_without_faults() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) <= {"ok", "left"}
    assert run.record.outcomes["ok"] > 10
    kinds = {operation.kind for operation in run.record.operations.values()}
    assert kinds == {"stream", "stream of arrays"}


@pytest.mark.slow
def test_items_out_of_turn_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Session.send_item

    def swapped(self: Session, incoming: Any, index: int, *rest: Any) -> None:
        send(self, incoming, index ^ 1 if index in (0, 1) else index, *rest)

    monkeypatch.setattr(Session, "send_item", swapped)
    run = Run(SCHEDULE)
    assert not run.play()
    assert {broken.invariant for broken in run.record.broken} & {"I5", "I6", "I11"}
