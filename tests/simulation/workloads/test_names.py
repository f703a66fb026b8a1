"""The workload of names, without faults, and with a head that gives a name twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulation.run import Run
from simulation.schedule import draw
from zcactor.control.head import Head

SCHEDULE = replace(draw(1, 3, 15.0, ("names",), ("names",)), faults=())


@pytest.mark.slow
def test_a_name_has_one_actor() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.outcomes["ok"] > 10
    assert {"NameTaken", "NoSuchActor"} <= set(run.record.sometimes)


@pytest.mark.slow
def test_a_name_that_is_given_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Head.reserve

    async def forgetful(self: Head, options: dict[str, Any], *rest: Any) -> Any:
        self._actors._by_name.pop((options["namespace"], options["name"]), None)
        return await reserve(self, options, *rest)

    monkeypatch.setattr(Head, "reserve", forgetful)
    run = Run(SCHEDULE)
    assert not run.play()
    assert "I4" in {broken.invariant for broken in run.record.broken}
