"""The search for a smaller schedule that still breaks an invariant (Zeller's delta debugging)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.simulation.schedule import Fault, Schedule

__all__ = ["RUNS", "shrink"]

RUNS: Final = 200
"""Runs that a search may take."""


class _Search:
    """A search: it counts the runs, and remembers the smallest schedule so far."""

    def __init__(self, schedule: Schedule, breaks: Callable[[Schedule], bool], runs: int) -> None:
        self.best = schedule
        self._breaks = breaks
        self._left = runs

    def take(self, smaller: Schedule) -> bool:
        """Whether `smaller` breaks the invariant as well; then the search goes on with it."""
        if self._left <= 0 or smaller == self.best:
            return False
        self._left -= 1
        if self._breaks(smaller):
            self.best = smaller
            return True
        return False


def shrink(schedule: Schedule, breaks: Callable[[Schedule], bool], runs: int = RUNS) -> Schedule:
    """The smallest schedule found that still breaks: fewer faults, then fewer nodes, then a shorter time.

    Args:
        schedule: a schedule that breaks an invariant.
        breaks: plays a schedule and tells whether it breaks in the same way.
        runs: how often `breaks` may be called.
    """
    search = _Search(schedule, breaks, runs)
    if not search.take(replace(schedule, faults=())):
        _drop_faults(search)
    _drop_nodes(search)
    while search.best.duration > 0.5 and search.take(_shorter(search.best)):
        pass
    _drop_faults(search)
    return search.best


def _drop_faults(search: _Search) -> None:
    parts = 2
    while len(search.best.faults) >= 1:
        faults = search.best.faults
        size = -(-len(faults) // parts)
        for at in range(0, len(faults), size):
            rest: tuple[Fault, ...] = faults[:at] + faults[at + size :]
            if search.take(replace(search.best, faults=rest)):
                parts = max(parts - 1, 2)
                break
        else:
            if size <= 1:
                return
            parts = min(2 * parts, len(faults))


def _drop_nodes(search: _Search) -> None:
    needed = 1 + max((int(host[1:]) for fault in search.best.faults for host in fault.who), default=0)
    for nodes in sorted({needed, 2, 3, (needed + search.best.nodes) // 2}):
        if needed <= nodes < search.best.nodes and search.take(replace(search.best, nodes=nodes)):
            return


def _shorter(schedule: Schedule) -> Schedule:
    """The same schedule in half of the time, but late enough for its last fault."""
    last = max((fault.at for fault in schedule.faults), default=0.0)
    return replace(schedule, duration=round(max(schedule.duration / 2, last), 3))
