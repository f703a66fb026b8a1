"""The measures of runs and heads run, and bear the names of their rows; the figures are not checked here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import engines
from benchmarks.budget_rows import ENGINES
from benchmarks.harness import Scale
from tests.engines.slurm_cluster import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_all_rows_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUICK", Scale(1, 0.01))
    path = tmp_path / "figures"
    assert engines.main(["--quick", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(figure["value"] > 0 for figure in figures)
    rows = {row.measurement: row for row in ENGINES}
    absent = set[str]()
    if shutil.which("mpirun.openmpi") is None:
        absent |= {name for name in rows if "mpirun" in name}
    if missing() is not None:
        absent |= {name for name in rows if "Slurm" in name}
    assert {figure["name"] for figure in figures} == set(rows) - absent
    for figure in figures:
        budget = rows[figure["name"]].budget
        assert figure["budget"] == {"compare": budget.compare, "limit": budget.limit, "of": budget.of}
