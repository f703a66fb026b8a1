"""The measures of runs and heads run, and bear the names of their rows; the figures are not checked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.budgets import ENGINES
from benchmarks.harness import Scale

ROWS = {
    "starts": 2, "memory": 1, "restarts": 1, "spawns": 4, "deaths": 5, "calls": 6, "drains": 2, "ends": 2, "mpi": 1,
    "slurm": 3,
}  # fmt: skip
"""Rows of each part."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("part", engines.PARTS)
def test_rows_are_measured(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert engines.main([part, "--quick", "--json", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["name"] for line in lines}) == len(lines) == ROWS[part]
    rows = {row.measurement: row for row in ENGINES}
    for line in lines:
        budget = rows[line["name"]].budget
        if "reason" in line:
            assert "is not installed" in line["reason"] or "have to be root" in line["reason"]
            assert "value" not in line
            continue
        assert line["value"] > 0 or (budget.compare, budget.limit) == ("==", 0)
        assert line["budget"] == {"compare": budget.compare, "limit": budget.limit, "of": budget.of}


def test_each_row_is_of_a_part() -> None:
    assert set(ROWS) == set(engines.PARTS)
    assert sum(ROWS.values()) == len({row.measurement for row in ENGINES})
