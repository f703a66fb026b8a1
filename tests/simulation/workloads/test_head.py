"""The workload of heads that are killed and started again, and with a log that forgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import TAKE_OVER, Fault, draw
from simulation.shared_log import SharedBook
from zcactor.control.head_log import Change

SCHEDULE = replace(
    draw(6, 3, 20.0, (TAKE_OVER,), (TAKE_OVER,)),
    faults=(
        Fault(3.0, "restart", ("h0",), 1.0), Fault(7.0, "silence", ("h0",), 2.0), Fault(9.5, "restart", ("h0",), 9.0),
    ),
)  # fmt: skip


@pytest.mark.slow
def test_heads_go_on_where_others_were_killed() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.take_overs == run.record.sometimes["a head took over"] == 2
    assert run.record.outcomes["ok"]
    assert run.record.lives("subject1") + run.record.lives("subject2") > 2
    again = Run(SCHEDULE)
    again.play()
    assert again.trace.digest == run.trace.digest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actor", "name"])
def test_a_log_that_forgets_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = SharedBook.change

    def forget(self: SharedBook, epoch: int, changes: Sequence[Change]) -> Any:
        return change(self, epoch, [each for each in changes if each.kind != kind or each.value is None])

    monkeypatch.setattr(SharedBook, "change", forget)
    run = Run(SCHEDULE)
    assert not run.play()
    assert "I4" in {broken.invariant for broken in run.record.broken}
