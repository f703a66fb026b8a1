"""Counters start at zero and count nothing by themselves."""

from __future__ import annotations

import pytest

from zcactor.native import hot

NAMES = (
    "calls", "frames_sent", "frames_received", "bytes_eager", "bytes_mapped", "bytes_read", "bytes_received",
    "bytes_authenticated", "bytes_lent", "pushes", "requests",
)  # fmt: skip


def test_every_counter_starts_at_zero() -> None:
    counters = hot.Counters()
    assert {name: getattr(counters, name) for name in NAMES} == dict.fromkeys(NAMES, 0)
    counters.calls += 2
    assert counters.calls == 2
    assert hot.Counters().calls == 0


@pytest.mark.parametrize("name", NAMES)
def test_each_is_written_by_python_too(name: str) -> None:
    counters = hot.Counters()
    setattr(counters, name, getattr(counters, name) + 2)
    assert {each: getattr(counters, each) for each in NAMES} == {**dict.fromkeys(NAMES, 0), name: 2}


def test_there_are_no_others() -> None:
    assert {name for name in dir(hot.Counters()) if not name.startswith("_")} == set(NAMES)
    with pytest.raises(AttributeError):
        hot.Counters().call = 1  # type: ignore[attr-defined]
