"""The smallest run of the shuffle's benchmark: it measures all three rows, and copies nothing; no time is checked."""

from __future__ import annotations

import pytest

from benchmarks import shuffle
from benchmarks.harness import Scale


@pytest.mark.slow
def test_rows_of_a_small_shuffle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "SIZES", (16,))
    exchange, copied, peak = shuffle.measure(Scale(1, 1.0))
    assert exchange.name == "16 MiB, exchange"
    assert exchange.floor is not None and exchange.value > 0 and exchange.floor > 0
    assert (copied.value, copied.verdict) == (0, "pass")
    assert peak.value > 0


@pytest.mark.slow
def test_sizes_without_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "available_memory", lambda: 1 << 20)
    assert list(shuffle.measure(Scale(1, 1.0))) == []
