"""The flows of an allreduce, step by step, for each plan. Ranks are numbers here; bytes are parts of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["PLANS", "Exchange", "steps", "volume"]

PLANS: Final = ("ring", "halving", "direct", "naive")
"""The plans whose flows are known here."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The flows of one step of a plan, which is done `times` times in a row."""

    flows: tuple[tuple[int, int], ...]
    """Pairs of ranks, the giver first; empty for every rank to every other one."""
    part: float
    """The part of the whole in each flow."""
    times: int = 1


def steps(plan: str, ranks: int) -> list[Exchange]:
    """The steps of an allreduce among `ranks` ranks; none for a single one.

    Raises:
        ValueError: the plan is not one of `PLANS`.
    """
    if plan not in PLANS:
        raise ValueError(f"plan must be one of {', '.join(PLANS)}, not {plan!r}")
    if ranks <= 1:
        return []
    if plan == "ring":
        return [Exchange(tuple((rank, (rank + 1) % ranks) for rank in range(ranks)), 1 / ranks, 2 * (ranks - 1))]
    if plan == "direct":
        return [Exchange((), 1 / ranks, 2)]
    if plan == "naive":
        return [Exchange((), 1.0)]
    return _halving(ranks)


def _halving(ranks: int) -> list[Exchange]:
    """Recursive halving, then doubling. Of a number that is no power of two the surplus ranks pair up first: the odd
    ones of the first ranks give all they have to their neighbours, and get the result at the end."""
    core = 1 << (ranks.bit_length() - 1)
    surplus = ranks - core
    members = [2 * index if index < surplus else index + surplus for index in range(core)]
    exchanges = []
    distance = core // 2
    while distance:
        flows = tuple((members[index], members[index ^ distance]) for index in range(core))
        exchanges.append(Exchange(flows, distance / core))
        distance //= 2
    down, up = tuple((2 * i + 1, 2 * i) for i in range(surplus)), tuple((2 * i, 2 * i + 1) for i in range(surplus))
    before, after = ([Exchange(down, 1.0)], [Exchange(up, 1.0)]) if surplus else ([], [])
    return [*before, *exchanges, *reversed(exchanges), *after]


def volume(plan: str, ranks: int) -> float:
    """The volume that a rank takes from others at most, in parts of the whole.

    Raises:
        ValueError: the plan is not one of `PLANS`.
    """
    taken = [0.0] * max(1, ranks)
    for step in steps(plan, ranks):
        each = step.part * step.times
        for _, taker in step.flows:
            taken[taker] += each
        if not step.flows:
            taken = [so_far + (ranks - 1) * each for so_far in taken]
    return max(taken)
