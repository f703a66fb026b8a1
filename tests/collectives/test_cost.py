"""Predictions of the time of an allreduce."""

from __future__ import annotations

import pytest

from zcactor.collectives.cost import Line, fastest, plan_of
from zcactor.collectives.hierarchy import Hierarchy

MAPPED = Line(1e-5, float("inf"))
CABLE = Line(5e-5, 1e9)
N = 1 << 20


def test_the_plan_depends_on_size_and_mapping() -> None:
    one, four = Hierarchy([0] * 4), Hierarchy(range(4))
    assert plan_of(16384, one, MAPPED, 16384).plan == "eager"
    assert plan_of(16385, one, MAPPED, 16384).plan == "shared"
    assert plan_of(16385, four, CABLE, 16384).plan == "naive"
    assert plan_of(N, four, CABLE, 16384).plan == "direct"
    assert fastest(16385, four, CABLE) == "naive" and fastest(N, four, CABLE) == "direct"


def test_volumes_on_one_host() -> None:
    plan = plan_of(N, Hierarchy([0] * 4), MAPPED, 16384)
    assert plan.volume == {
        "eager": 3 * N, "naive": 3 * N, "shared": N * 3 // 4, "direct": 2 * N * 3 // 4, "parameter server": 4 * N,
    }  # fmt: skip
    assert plan.predicted_s["shared"] < plan.predicted_s["naive"]
    text = str(plan)
    assert "allreduce of 1,048,576 bytes over 4 ranks: shared" in text
    assert all(name in text for name in plan.volume)


def test_volumes_between_hosts() -> None:
    plan = plan_of(N, Hierarchy(range(4)), CABLE, 16384)
    assert plan.volume == {
        "eager": 3 * N, "naive": 3 * N, "direct": 2 * N * 3 // 4, "ring": 2 * N * 3 // 4, "halving": 2 * N * 3 // 4,
        "parameter server": 4 * N,
    }  # fmt: skip
    seconds = plan.predicted_s
    assert seconds["direct"] < seconds["halving"] < seconds["ring"]  # as many bytes in 2, 4 and 6 steps
    assert plan.predicted_s["direct"] < plan.predicted_s["naive"] < plan.predicted_s["parameter server"]
    assert list(plan.predicted_s) == list(plan.volume)


def test_surplus_ranks_make_halving_dearer() -> None:
    plan = plan_of(N, Hierarchy(range(6)), CABLE, 16384)
    assert plan.volume["halving"] == N * 5 // 2 and plan.volume["ring"] == round(2 * N * 5 / 6)


@pytest.mark.parametrize(("everywhere", "inputs"), [(False, 1), (True, 2)])
def test_volumes_between_hosts_of_two_ranks(everywhere: bool, inputs: int) -> None:
    """A rank takes its part of the other host's sum, or of both inputs, and then one finished part."""
    hierarchy = Hierarchy([0, 0, 1, 1], everywhere=everywhere)
    assert plan_of(N, hierarchy, CABLE, 16384).volume["direct"] == (inputs + 1) * N // 4
    assert plan_of(N, hierarchy, CABLE, 16384).volume["naive"] == 2 * N


def test_small_arrays_are_faster_in_frames() -> None:
    plan = plan_of(1000, Hierarchy([0, 0]), MAPPED, 16384)
    assert plan.predicted_s["eager"] < plan.predicted_s["shared"]
