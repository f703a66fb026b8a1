"""The benchmark of arrays on the fake GPU: its figures, and that it says that the GPU is fake."""

from __future__ import annotations

import pytest

from benchmarks import ITEMS, gpu
from benchmarks.harness import Scale


@pytest.mark.slow
def test_the_smallest_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = {each.name: each for each in gpu.measure(Scale(1, 0.01))}
    assert "the fake one" in capsys.readouterr().out and "fake" in ITEMS["gpu"][1]
    assert len(found) == 6 and all(each.budget is not None for each in found.values())
    copied = found["all of these: copied"]
    assert copied.value == 0
    queued = next(each for name, each in found.items() if "queued" in name)
    assert queued.value < gpu.QUEUED * 1000  # nobody waited for the work
