"""A start of a head and a run are measured; `tests.engines.test_benchmark` looks at all rows."""

from __future__ import annotations

import pytest

from benchmarks import engines
from benchmarks.budget_rows import ENGINES
from benchmarks.harness import Scale


@pytest.mark.slow
def test_starts_are_measured() -> None:
    found = list(engines._starts(Scale(1, 1.0)))
    assert {each.name for each in found} < {row.measurement for row in ENGINES}
    assert all(each.value > 0 and each.floor and each.floor > 0 for each in found)
