"""A start of a head and a run are measured; `tests.engines.test_benchmark` looks at all rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import engines, heads, placed_nodes
from benchmarks.budget_rows import ENGINES
from benchmarks.harness import Measurement, Scale, Unmeasured, exactly


@pytest.mark.slow
def test_starts_are_measured() -> None:
    found = list(engines._starts(Scale(1, 1.0)))
    assert {each.name for each in found} < {row.measurement for row in ENGINES}
    assert all(each.value > 0 and each.floor and each.floor > 0 for each in found)


def test_each_row_has_its_name_without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing engine gives lines with the reason, and no figure."""
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    for module in (heads, placed_nodes):
        monkeypatch.setattr(module, "no_etcd", lambda: "no etcd")
    monkeypatch.setattr(engines, "no_slurm", lambda: "no Slurm")
    lines = [line for part in ("mpi", "slurm", "deaths") for line in engines.measure(Scale(1, 0.01), [part])]
    assert all(isinstance(line, Unmeasured) for line in lines)
    assert {line.name for line in lines} < {row.measurement for row in ENGINES}
    assert len(lines) == 9


def test_what_is_missing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(_: Scale) -> Iterator[Measurement | Unmeasured]:
        yield Measurement("engines", "lost", 0, "", budget=exactly(0))
        yield Unmeasured("engines", "a run", "no Slurm")

    monkeypatch.setattr(engines, "PARTS", {"one": measure})
    path = tmp_path / "figures"
    assert engines.main(["--json", str(path), "--strict"]) == 0
    assert "a run: not measured: no Slurm\n1 of 1 budgets hold" in capsys.readouterr().out
    assert json.loads(path.read_text().splitlines()[1]) == {"item": "engines", "name": "a run", "reason": "no Slurm"}


def test_a_part_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        engines.main(["nothing"])
    assert "there is no part 'nothing'; parts: starts, " in capsys.readouterr().err
