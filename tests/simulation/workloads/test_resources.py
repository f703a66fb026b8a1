"""The workload of resources: without faults, with a ledger that loses amounts, and with one that grants anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from zcactor.control.scheduler import Amounts, Ledger
from zcactor.simulation.run import Run
from zcactor.simulation.schedule import draw

SCHEDULE = replace(draw(3, 3, 20.0, ("resources",), ("resources",)), faults=())


@pytest.mark.slow
def test_requests_wait_for_others() -> None:
    run = Run(SCHEDULE)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert set(run.record.outcomes) == {"ok"}
    assert run.record.outcomes["ok"] > 5
    assert {"a request waited", "a spawn given up"} <= set(run.record.sometimes)


@pytest.mark.slow
def test_what_is_not_given_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Ledger.release

    def forgetful(self: Ledger, node: str, request: Mapping[str, float], gpus: Sequence[int]) -> None:
        if request.get("CPU") != 24:
            release(self, node, request, gpus)

    monkeypatch.setattr(Ledger, "release", forgetful)
    run = Run(SCHEDULE)
    assert not run.play()
    assert run.record.broken[0].invariant in {"I9", "I10"}


@pytest.mark.slow
def test_more_than_there_is_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def generous(self: Amounts, request: Mapping[str, float]) -> bool:
        return True

    monkeypatch.setattr(Amounts, "now", generous)
    run = Run(replace(SCHEDULE, duration=4.0))
    assert not run.play()
