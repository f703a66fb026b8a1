"""Shares of GPUs: never more than there are, fractions on one GPU, one filled before the next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor.control.scheduler import GpuShares


def test_whole_gpus_are_nobody_elses() -> None:
    shares = GpuShares(3)
    assert shares.take(2) == (0, 1)
    assert not shares.fits(2)
    assert shares.take(1) == (2,)
    assert list(shares.free) == [0, 0, 0]
    shares.give(2, (0, 1))
    assert shares.take(1) == (0,)


def test_one_is_full_before_the_next_is_begun() -> None:
    shares = GpuShares(3)
    assert [shares.take(0.4) for _ in range(5)] == [(0,), (0,), (1,), (1,), (2,)]
    assert shares.take(0.2) == (0,), "the fullest with room"
    assert not shares.fits(1)
    shares.give(0.4, (2,))
    assert shares.fits(1)


def test_ten_tenths_are_one() -> None:
    shares = GpuShares(1)
    assert [shares.take(0.1) for _ in range(10)] == [(0,)] * 10
    assert not shares.fits(0.01)
    for _ in range(10):
        shares.give(0.1, (0,))
    assert shares.free == (1.0,)
    assert shares.take(1) == (0,)


@pytest.mark.parametrize(
    ("total", "amount", "fits"), [(0, 0.5, False), (1.5, 1.5, True), (0.5, 0.6, False), (2, 3, False)]
)
def test_what_fits(total: float, amount: float, fits: bool) -> None:
    assert GpuShares(total).fits(amount) is fits


def test_equal_room_has_an_equal_key() -> None:
    one, other = GpuShares(2), GpuShares(2)
    one.take(0.5)
    taken = other.take(1)
    other.take(0.5)
    assert one.key != other.key
    other.give(1, taken)
    assert one.free != other.free
    assert one.key == other.key


AMOUNTS = st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.01, 0.99))


@settings(deadline=None)
@given(count=st.integers(1, 4), steps=st.lists(st.tuples(AMOUNTS, st.integers(0, 7)), max_size=40))
def test_any_steps(count: int, steps: list[tuple[float, int]]) -> None:
    shares = GpuShares(count)
    held: list[tuple[float, tuple[int, ...]]] = []
    for amount, which in steps:
        if which < len(held):
            shares.give(*held.pop(which))
        used = [sum(min(each, 1.0) for each, gpus in held if gpu in gpus) for gpu in range(count)]
        assert shares.free == pytest.approx([1.0 - share for share in used], abs=1e-6)
        assert all(share < 1.0 + 1e-6 for share in used)
        if shares.fits(amount):
            gpus = shares.take(amount)
            assert len(gpus) == max(1, int(amount))
            if amount < 1.0 and used[gpus[0]] == 0.0:
                assert all(share == 0.0 or share + amount > 1.0 for share in used)
            held.append((amount, gpus))
    for grant in held:
        shares.give(*grant)
    assert shares.free == (1.0,) * count
