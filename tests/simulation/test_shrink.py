"""Making schedules small, with a stand-in for the runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulation.command import shrink
from simulation.schedule import Fault, Schedule, draw

FAULTS = tuple(Fault(float(number), "kill", (f"h{number % 6}",), 0.0, number) for number in range(20))
WHOLE = replace(draw(1, 6, 32.0, ("calls",), ("calls",)), faults=FAULTS)


@pytest.mark.parametrize("needed", [(), (7,), (3, 15), (0, 9, 19)])
def test_what_is_needed_stays(needed: tuple[int, ...]) -> None:
    runs = 0

    def breaks(schedule: Schedule) -> bool:
        nonlocal runs
        runs += 1
        return set(needed) <= {fault.number for fault in schedule.faults}

    small = shrink(WHOLE, breaks)
    assert tuple(fault.number for fault in small.faults) == needed
    assert runs <= 200
    hosts = [int(fault.who[0][1:]) for fault in small.faults]
    assert small.nodes == 1 + max(hosts, default=0)
    assert small.duration <= max([1.0, *(fault.at for fault in small.faults)])


def test_a_search_ends() -> None:
    asked: list[Schedule] = []

    def never(schedule: Schedule) -> bool:
        asked.append(schedule)
        return False

    assert shrink(WHOLE, never, runs=10) == WHOLE
    assert len(asked) == 10
