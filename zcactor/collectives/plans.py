"""The choice of the reduction that a plan means for a member."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

from zcactor.collectives.cost import fastest
from zcactor.collectives.direct import Direct
from zcactor.collectives.hierarchy import part_bounds
from zcactor.collectives.in_turn import InTurn, goes_in_turn
from zcactor.collectives.passes import Halving, Ring
from zcactor.collectives.reductions import Eager, Private, Reduction, Shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.collectives.kinds import Array, Plan
    from zcactor.collectives.member import Member

__all__ = ["pieces_by", "result_by"]


def result_by(plan: Plan, member: Member, array: Array, op: str) -> Callable[..., Reduction]:
    """The maker of an allreduce by `plan` and `op`, which have been checked."""
    hierarchy, nbytes = member.hierarchy, array.nbytes
    if plan == "ring" and nbytes:
        return Ring
    if plan == "halving" and nbytes:
        return Halving
    if plan == "eager" or not nbytes or (plan == "auto" and nbytes <= member.eager_nbytes):
        return Eager
    if hierarchy.one_host:
        if plan == "auto" and goes_in_turn(hierarchy.size, array, op):
            return InTurn
        return Private if plan == "naive" else Shared
    if plan == "auto":
        plan = fastest(nbytes, hierarchy, member.line)  # type: ignore[assignment]
    if plan == "naive":
        everything = [(0, array.size)] * member.size
        return partial(Direct, bounds=everything, share=False, whole=True)
    return partial(
        Direct,
        bounds=_pairs(part_bounds(array.size, array.itemsize, member.size)),
        share=True,
        whole=hierarchy.everywhere,
    )


def pieces_by(member: Member, array: Array, rows: Sequence[int]) -> Callable[..., Reduction]:
    """The maker of a reduce_scatter, whose pieces are cut at `rows`."""
    if array.nbytes <= member.eager_nbytes:
        return Eager
    if member.hierarchy.one_host:
        return Private
    inner = array.size // len(array) if len(array) else 0
    bounds = _pairs([row * inner for row in rows])
    return partial(Direct, bounds=bounds, share=False, whole=member.hierarchy.everywhere)


def _pairs(bounds: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(bounds))
