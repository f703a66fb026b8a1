"""Counters start at zero and count nothing by themselves."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from zcactor.rpc.counters import Counters, new_counters

NAMES = tuple(get_type_hints(Counters))


def test_every_counter_starts_at_zero() -> None:
    counters = new_counters()
    assert {name: getattr(counters, name) for name in NAMES} == dict.fromkeys(NAMES, 0)
    counters.calls += 2
    assert counters.calls == 2
    assert new_counters().calls == 0


@pytest.mark.parametrize("name", NAMES)
def test_each_is_written_by_python_too(name: str) -> None:
    counters = new_counters()
    setattr(counters, name, getattr(counters, name) + 2)
    assert {each: getattr(counters, each) for each in NAMES} == {**dict.fromkeys(NAMES, 0), name: 2}


def test_there_are_no_others() -> None:
    assert {name for name in dir(new_counters()) if not name.startswith("_")} == set(NAMES)
    with pytest.raises(AttributeError):
        new_counters().call = 1  # type: ignore[attr-defined]
