"""The measures of starting nodes run; their durations are not checked here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cluster
from benchmarks.harness import Scale


@pytest.mark.slow
def test_nodes_are_started_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "QUICK", Scale(1, 0.05))
    path = tmp_path / "figures"
    assert cluster.main(["--quick", "--markdown", "--json", str(path)]) == 0
    figures = [json.loads(line) for line in path.read_text().splitlines()]
    assert [figure["unit"] for figure in figures] == ["s", "s", "s", "MiB"]
    assert all(figure["value"] > 0 for figure in figures)
    assert "3 nodes on one machine" in capsys.readouterr().out
