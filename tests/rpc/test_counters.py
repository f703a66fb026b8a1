"""Counters start at zero and count nothing by themselves."""

from __future__ import annotations

import pytest

from zcactor.rpc.counters import Counters, new_counters


def test_every_counter_starts_at_zero() -> None:
    counters = Counters()
    assert {name: getattr(counters, name) for name in Counters.__slots__} == dict.fromkeys(Counters.__slots__, 0)
    counters.calls += 2
    assert counters.calls == 2
    assert Counters().calls == 0


def test_there_are_no_others() -> None:
    with pytest.raises(AttributeError):
        Counters().call = 1  # type: ignore[attr-defined]


def test_the_native_ones_have_the_same_counts() -> None:
    made = new_counters()
    for name in Counters.__slots__:
        setattr(made, name, getattr(made, name) + 2)
        assert getattr(made, name) == 2
    with pytest.raises(AttributeError):
        made.call = 1  # type: ignore[attr-defined]
