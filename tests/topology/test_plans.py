"""`zcactor.topology.plans`: each plan adds up what it should, in the volume of the table."""

from __future__ import annotations

import pytest

from zcactor.topology import plans


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("plan", ["ring", "direct"])
def test_least_volume(plan: str, ranks: int) -> None:
    assert plans.volume(plan, ranks) == pytest.approx(2 * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_volume_of_naive(ranks: int) -> None:
    assert plans.volume("naive", ranks) == ranks - 1


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_halving_of_a_power_of_two(ranks: int) -> None:
    found = plans.steps("halving", ranks)
    assert len(found) == 2 * (ranks.bit_length() - 1)
    assert [step.part for step in found] == [step.part for step in reversed(found)]
    assert plans.volume("halving", ranks) == pytest.approx(2 * (ranks - 1) / ranks)


@pytest.mark.parametrize("ranks", range(2, 20))
def test_halving_brings_everything_to_all(ranks: int) -> None:
    known = [{rank} for rank in range(ranks)]
    found = plans.steps("halving", ranks)
    for step in found[: (len(found) + 1) // 2]:  # the halving, with what the surplus ranks give before
        given = [set(each) for each in known]
        for giver, taker in step.flows:
            known[taker] |= given[giver]
    core = {giver for giver, _ in found[len(found) // 2].flows}
    assert all(known[rank] == set(range(ranks)) for rank in core)
    served = core | {taker for _, taker in found[-1].flows}
    assert served == set(range(ranks))


def test_a_ring_passes_each_part_on() -> None:
    (step,) = plans.steps("ring", 4)
    assert (step.flows, step.part, step.times) == (((0, 1), (1, 2), (2, 3), (3, 0)), 0.25, 6)


@pytest.mark.parametrize("plan", plans.PLANS)
def test_one_rank_does_nothing(plan: str) -> None:
    assert plans.steps(plan, 1) == []


def test_another_plan() -> None:
    with pytest.raises(ValueError, match="plan must be one of ring, halving, direct, naive, not 'eager'"):
        plans.steps("eager", 4)
