"""The faults of `zc_loopback`: wrong ones are refused, and the others strike at their time."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zcactor.testing.faults import FAULTS, LinkFaults, check_faults


@pytest.mark.parametrize("name", ["drop", "Delay", ""])
def test_unknown_faults(name: str) -> None:
    with pytest.raises(TypeError, match=f"unknown fault {name!r}; valid ones: {', '.join(FAULTS)}"):
        check_faults({"delay": (0, 1), name: 1})


@pytest.mark.parametrize(
    "faults", [{"delay": 1}, {"delay": (1,)}, {"stall": "12"}, {"stall": (True, 1)}, {"break_after": 2.0}]
)
def test_wrong_types(faults: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"zc_loopback: {next(iter(faults))} is .*, not "):
        check_faults(faults)


@pytest.mark.parametrize(
    "faults",
    [{"delay": (2, 1)}, {"delay": (-1, 1)}, {"stall": (0, math.inf)}, {"stall": (math.nan, 1)}, {"break_after": -1}],
)
def test_wrong_numbers(faults: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"zc_loopback: {next(iter(faults))} is "):
        check_faults(faults)


def test_no_fault_before_the_beginning() -> None:
    faults = LinkFaults(lambda: 5.0, 0, {"delay": (1, 1), "stall": (0, 9)})
    assert faults.arrival() == 5.0


def test_the_same_seed_draws_the_same_delays() -> None:
    def delays(seed: int) -> list[float]:
        faults = LinkFaults(lambda: 0.0, seed, {"delay": (0.5, 2)})
        faults.begin()
        return [faults.arrival() for _ in range(50)]

    assert delays(1) == delays(1) != delays(2)
    assert all(0.5 <= each <= 2 for each in delays(1))


def test_nothing_arrives_in_a_stall() -> None:
    now = 100.0
    faults = LinkFaults(lambda: now, 0, {"stall": (1, 3)})
    faults.begin()
    found = []
    for now in (100.0, 100.9, 101.0, 103.9, 104.0, 200.0):  # noqa: B007  # the clock
        faults.begin()  # idempotent
        found.append(faults.arrival())
    assert found == [100.0, 100.9, 104.0, 104.0, 104.0, 200.0]
