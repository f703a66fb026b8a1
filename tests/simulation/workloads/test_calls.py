"""The workload of calls, without faults, and with bytes that have changed, which it sees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulation import record as records
from simulation.record import Record
from simulation.run import Run
from simulation.schedule import draw
from simulation.trace import Trace
from simulation.workloads.calls import _KINDS, PATTERN, _check
from simulation.world import World


@pytest.mark.slow
def test_every_kind_of_call_ends_well_without_faults() -> None:
    schedule = draw(1, 3, 10.0, ("calls",), ("calls",))
    run = Run(replace(schedule, faults=(), settings={**schedule.settings, "max_pending_calls": 131072}))
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert {operation.kind for operation in run.record.operations.values()} == {*_KINDS, "inner", "handed on"}
    assert set(run.record.outcomes) == {"ok", "CancelledError", "DeadlineExceeded"}
    assert run.record.outcomes["ok"] > 100


def test_changed_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(World(1, Trace()))
    monkeypatch.setattr(records, "current", record, raising=False)
    array = np.full(100, 260 % PATTERN)
    _check(260, array)
    assert not record.broken
    array[50] += 1
    _check(260, array)
    assert [broken.invariant for broken in record.broken] == ["I5"]
