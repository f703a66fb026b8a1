"""The smallest run of the benchmark of collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.baselines import LABELS, available
from benchmarks.harness import Measurement
from benchmarks.machine import cores

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_measure_has_a_figure_and_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    command = [
        sys.executable, "-m", "benchmarks", "collective", "--quick", "--runs", "1", "--share", "0.01",
        "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    _, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {each.name: each for each in map(Measurement.from_plain, lines)}
    beside = [name for name, missing in available().items() if not missing and LABELS[name] not in done.stderr]
    assert [name for name in found if "beside" in name] == [
        f"allreduce, {size}, 2 ranks, beside {LABELS[name]}"
        for size in ("16 KiB", "1 MiB", "64 MiB")
        for name in beside
    ] + ["allreduce, 1 KiB, 2 ranks awake, beside MPI by mpi4py"] * ("mpi" in beside)
    places = ["2 ranks", "2 ranks on one core"][len(cores()) < 2 :]
    small = [name for name in found if any(name.endswith(f" KiB, {place}") for place in places)]
    assert small == [
        f"{what}, {place}"
        for place in places
        for what in ("allreduce, 1 KiB", "allreduce, 16 KiB", "allgather by reference, 1 KiB", "broadcast, 1 KiB")
    ]
    assert len([each for each in found.values() if each.budget is not None]) == 4 + 7 * len(places) - 1 + len(beside)
    for name, missing in available().items():
        if missing:
            assert f"allreduce is not compared with {LABELS[name]}: {missing}\n" in done.stderr
    assert found["copied by them"].value == 0
    assert all(each.value > 0 for name, each in found.items() if name != "copied by them")
