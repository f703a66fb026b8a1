"""Heads that are killed at a point: before and after each kind of decision, and when they have read the log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.failpoints import POINTS
from simulation.run import Run
from simulation.schedule import TAKE_OVER, Fault, draw

SCHEDULE = draw(9, 3, 12.0, (TAKE_OVER,), (TAKE_OVER,))
WITH_PROGRAMS = draw(9, 3, 12.0, (TAKE_OVER, "drivers"), (TAKE_OVER, "drivers"))
"""Programs come as well, so that the head decides about them."""


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(POINTS)), ids=POINTS)
def test_each_point(number: int) -> None:
    faults = (
        Fault(0.5, "failpoint", ("h0",), 0.5, number), Fault(1.0, "agent", ("h1",)),
        *(Fault(2.0, "kill", (host,), number=worker) for host in ("h0", "h1", "h2") for worker in range(2)),
        Fault(5.0, "restart", ("h0",), 0.5), Fault(5.1, "agent", ("h2",)),
    )  # fmt: skip
    run = Run(replace(WITH_PROGRAMS if POINTS[number].endswith("driver") else SCHEDULE, faults=faults))
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert f"head killed {POINTS[number]}" in run.record.sometimes
    assert run.record.take_overs
