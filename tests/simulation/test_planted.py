"""Defects that are planted here alone: each is found, plays again alike, and shrinks to a few faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zcactor.rpc.leasing import Releasing
from zcactor.runtime.connections import Connections
from zcactor.runtime.mailbox import Lane, Mailbox
from zcactor.simulation.run import Run
from zcactor.simulation.schedule import Schedule, draw
from zcactor.simulation.shrink import shrink

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SEEDS = 40


def drop_a_release(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """P1: one of 50 releases is dropped. Returns what begins to count anew."""
    count = 0
    release = Releasing.release

    def dropping(self: Any, object_id: int) -> None:
        nonlocal count
        count += 1
        if count % 50:
            release(self, object_id)

    def anew() -> None:
        nonlocal count
        count = 0

    patch.setattr(Releasing, "release", dropping)
    return anew


def start_the_second_first(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """P2: a lane that holds two calls starts the second first."""
    pump = Mailbox._pump

    def swapping(self: Mailbox, lane: Lane) -> None:
        if not lane.pumping and len(lane.held) > 1:
            first = lane.held.popleft()
            lane.held.insert(1, first)
        pump(self, lane)

    patch.setattr(Mailbox, "_pump", swapping)
    return lambda: None


def forget_a_call(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """P3: the loss of a connection forgets one of its calls."""
    lost = Connections.session_lost

    def forgetting(self: Connections, session: Any, cause: Exception | None, calls: list[Any]) -> None:
        lost(self, session, cause, [call for call in calls if call.target is None] + _but_one(calls))

    patch.setattr(Connections, "session_lost", forgetting)
    return lambda: None


def _but_one(calls: list[Any]) -> list[Any]:
    return [call for call in calls if call.target is not None][1:]


@pytest.mark.parametrize(
    ("plant", "invariant"), [(drop_a_release, "I8"), (start_the_second_first, "I6"), (forget_a_call, "I1")]
)
def test_it_is_found(plant: Callable[[pytest.MonkeyPatch], Callable[[], None]], invariant: str,
                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    anew = plant(monkeypatch)

    def play(schedule: Schedule) -> Run:
        anew()
        run = Run(schedule)
        run.play()
        return run

    def breaks(schedule: Schedule) -> bool:
        return any(broken.invariant == invariant for broken in play(schedule).record.broken)

    schedules = (draw(seed, 4, 8.0, ("calls",), ("calls",)) for seed in range(1, SEEDS + 1))
    found = next((schedule for schedule in schedules if breaks(schedule)), None)
    assert found is not None
    first, second = play(found), play(found)
    assert first.trace.digest == second.trace.digest
    assert [broken.plain() for broken in first.record.broken] == [broken.plain() for broken in second.record.broken]
    small = shrink(found, breaks, runs=25)
    assert len(small.faults) <= 4
    assert small.seed == found.seed
    assert breaks(small)
