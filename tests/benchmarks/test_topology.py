"""The rows of the benchmark of topologies, in its smallest run; no time is checked."""

from __future__ import annotations

import pytest

from benchmarks import topology
from benchmarks.budget_rows import TOPOLOGIES
from benchmarks.harness import Scale

ASKED = {row.measurement for row in TOPOLOGIES}
"""The measurements that the page of all budgets asks for."""


@pytest.mark.slow
def test_orders_are_good_and_unjudged_predictions_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(topology, "interpreter", lambda: None)
    monkeypatch.setattr(topology, "FOLLOWED", 1)  # each takes a second
    rows = list(topology.measure(Scale(1, 0.01)))
    assert {row.name for row in rows} == {name for name in ASKED if not name.endswith("SimGrid")}
    assert [row.unit for row in rows] == ["s"] * 4 + ["ms"] * 3
    assert all(row.verdict == "pass" for row in rows[4:])
    assert "SimGrid is not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_predictions_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "_orders", lambda scale: iter(()))
    monkeypatch.setattr(topology, "interpreter", lambda: "python3")
    monkeypatch.setattr(topology, "judged", lambda network, nbytes, plan: network.predict(nbytes, plan=plan) * 1.25)
    rows = list(topology.measure(Scale(1, 0.01)))
    assert {row.name for row in rows} == {name for name in ASKED if name.endswith("SimGrid")}
    assert {round(row.value, 6) for row in rows} == {20.0}
    assert {row.verdict for row in rows} == {"FAIL"}
