"""Batches of changes, and the errors of logs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zcactor.control.head_log import KINDS, Candidate, Change, Deposed, LogInUse, applied, check_batch

CHANGES = st.lists(
    st.builds(Change, st.sampled_from(KINDS), st.sampled_from("abc"), st.none() | st.binary(max_size=3)), max_size=20
)


@given(CHANGES, CHANGES)
def test_batches_one_after_the_other(first: list[Change], second: list[Change]) -> None:
    check_batch([*first, *second])
    before = applied({}, first)
    kept = {kind: dict(entries) for kind, entries in before.items()}
    assert applied(before, second) == applied({}, [*first, *second])
    assert before == kept
    assert all(before.values())


def test_messages() -> None:
    assert str(Deposed(3, 5)) == "the term with epoch 3 is over: the log is at epoch 5"
    assert "in use by another head: stop that" in str(LogInUse("/state", None))
    assert "the head at a:1 on n1 (pid 7)" in str(LogInUse("/state", Candidate("a:1", "n1", 7)))
