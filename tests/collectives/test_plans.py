"""The reduction that a plan means."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from zcactor.collectives.cost import MOST_IN_TURN_NBYTES, Line
from zcactor.collectives.direct import Direct
from zcactor.collectives.hierarchy import Hierarchy
from zcactor.collectives.in_turn import InTurn
from zcactor.collectives.passes import Halving, Ring
from zcactor.collectives.plans import pieces_by, result_by
from zcactor.collectives.reductions import Eager, Private, Shared

SMALL, LARGE = np.zeros(100), np.zeros(1 << 20)


def member(hosts: list[int], *, everywhere: bool = False) -> Any:
    hierarchy = Hierarchy(hosts, everywhere=everywhere)
    return SimpleNamespace(hierarchy=hierarchy, size=hierarchy.size, eager_nbytes=16384, line=Line(5e-5, 1e9))


@pytest.mark.parametrize("hosts", [[0, 0], [0, 1]])
def test_small_arrays_and_empty_ones_travel_in_frames(hosts: list[int]) -> None:
    assert result_by("auto", member(hosts), SMALL, "sum") is Eager is pieces_by(member(hosts), SMALL, [0, 50, 100])
    assert result_by("eager", member(hosts), LARGE, "sum") is Eager
    assert result_by("direct", member(hosts), np.zeros(0), "sum") is Eager


def test_on_one_host_the_result_is_shared() -> None:
    one = member([0, 0])
    assert result_by("auto", one, np.zeros(MOST_IN_TURN_NBYTES // 8), "sum") is InTurn
    assert result_by("auto", one, np.zeros(MOST_IN_TURN_NBYTES // 8), "max") is Shared
    assert result_by("shared", one, np.zeros(MOST_IN_TURN_NBYTES // 8), "sum") is Shared
    assert result_by("auto", one, LARGE, "sum") is Shared is result_by("direct", one, SMALL, "sum")
    assert result_by("naive", one, LARGE, "sum") is Private is pieces_by(one, LARGE, [0, 1, 2])


def facts(made: Any) -> Any:
    assert isinstance(made, partial) and made.func is Direct
    return made.keywords


def test_between_hosts_parts_are_exchanged() -> None:
    two = member([0, 1])
    half = 1 << 19
    direct = {"bounds": [(0, half), (half, 1 << 20)], "share": True, "whole": False}
    assert facts(result_by("auto", two, LARGE, "sum")) == direct == facts(result_by("shared", two, LARGE, "sum"))
    assert facts(result_by("naive", two, SMALL, "sum")) == {"bounds": [(0, 100)] * 2, "share": False, "whole": True}
    assert result_by("ring", two, LARGE, "sum") is Ring and result_by("halving", two, LARGE, "sum") is Halving
    rows = np.zeros((1 << 19, 2))
    assert facts(pieces_by(two, rows, [0, 10, 1 << 19])) == {
        "bounds": [(0, 20), (20, 1 << 20)], "share": False, "whole": False,
    }  # fmt: skip
    assert facts(result_by("direct", member([0, 0, 1], everywhere=True), LARGE, "sum"))["whole"]
