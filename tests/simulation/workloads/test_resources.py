"""The workload of resources: without faults, with a ledger that loses amounts, and with one that grants anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from simulation.run import Run
from simulation.schedule import Schedule, draw
from simulation.workloads import resources
from zcactor.control.scheduler import Amounts, GpuShares, Ledger

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


def with_gpus(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose nodes have three GPUs each, for which the actors ask."""
    monkeypatch.setattr(resources, "GPUS", (0, 0.5, 0, 0.7, 1, 0, 0.3, 2))
    run = Run(schedule)
    run.cluster.resources["GPU"] = 3.0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 9])
def test_gpus_under_faults(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_gpus(draw(seed, 3, 20.0, ("resources",), ("resources",)), monkeypatch)
    assert run.play(), [broken.plain() for broken in run.record.broken]
    assert run.record.outcomes["ok"] > 5


@pytest.mark.slow
def test_gpus_that_are_granted_and_not_taken_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuShares, "_change", lambda *_: None)
    run = with_gpus(SCHEDULE, monkeypatch)
    assert not run.play()
    assert run.record.broken[0].invariant == "I9" and "of a GPU" in run.record.broken[0].text
