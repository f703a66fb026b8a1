"""Epochs that a process knows."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.process.epochs import Deposed, KnownEpoch


@given(st.lists(st.integers(0, 5)))
def test_the_highest_epoch_is_kept_and_lower_ones_are_refused(epochs: list[int]) -> None:
    known, highest = KnownEpoch(), 0
    for epoch in epochs:
        if epoch < highest:
            with pytest.raises(Deposed) as caught:
                known.check(epoch)
            assert (caught.value.epoch, caught.value.known) == (epoch, highest)
        else:
            known.check(epoch)
            highest = epoch
        assert known.epoch == highest


def test_the_refusal_travels() -> None:
    again = pickle.loads(pickle.dumps(Deposed(1, 3)))
    assert (again.epoch, again.known, str(again)) == (1, 3, "the term with epoch 1 is over: the log is at epoch 3")
