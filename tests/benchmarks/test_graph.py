"""The benchmark of graphs: its figures, and the rows that ask for them."""

from __future__ import annotations

import pytest

from benchmarks import graph
from benchmarks.budget_rows import TABLES
from benchmarks.harness import Scale


@pytest.mark.slow
def test_the_smallest_run_measures_what_the_rows_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "FAN_NBYTES", 1 << 20)
    monkeypatch.setattr(graph, "IDLE_S", 0.01)
    found = {each.name: each for each in graph.measure(Scale(1, 0.01))}
    asked = {row.measurement: row for _, rows in TABLES for row in rows if row.item == "graph"}
    assert asked.keys() == {name for name, each in found.items() if each.budget is not None}
    for name, row in asked.items():
        assert found[name].budget == row.budget
    assert found["hop, int, one core"].floor > 0  # type: ignore[operator]
    assert found["fan-out, copied by zcactor"].value == 0
