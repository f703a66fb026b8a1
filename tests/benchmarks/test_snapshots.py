"""The rows of the benchmark of snapshots, in its smallest run; no time is checked."""

from __future__ import annotations

import pytest

from benchmarks import snapshots
from benchmarks.harness import Scale


@pytest.mark.slow
def test_pieces_and_sums(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(snapshots, "PIECES", {"1 MiB": 1 << 20})
    monkeypatch.setattr(snapshots, "available_memory", lambda: 0)
    rows = list(snapshots.measure(Scale(1, 0.01)))
    assert [row.name.partition(":")[0] for row in rows] == [
        "piece of an open array, 1 MiB", "allreduce of a piece, 16 MiB on two ranks",
    ]  # fmt: skip
    assert all(row.floor for row in rows)
    assert "forks left out" in capsys.readouterr().err
