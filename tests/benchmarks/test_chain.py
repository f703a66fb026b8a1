"""The benchmark of chained calls: its figures, and the rows that ask for them."""

from __future__ import annotations

import pytest

from benchmarks import chain
from benchmarks.budget_rows import TABLES
from benchmarks.harness import Scale


@pytest.mark.slow
def test_the_smallest_run_measures_what_the_rows_ask_for() -> None:
    found = list(chain.measure(Scale(1, 0.002)))
    asked = {row.measurement for _, rows in TABLES for row in rows if row.item == "chain"}
    assert {each.name for each in found if each.budget is not None} == asked
    for each in found:
        assert each.floor is not None and each.floor > 0 and each.value > 0
        assert each.budget is None or each.budget.limit in chain.LIMITS.values()
    assert len(found) == 2 * len(asked), "each chain has a graph beside it"
