"""The lease table against a model: a dictionary of counts."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor.errors import ProtocolError
from zcactor.objectstore.table import LeaseTable


class Kept:
    """An object that a lease keeps alive."""


def test_a_lease_keeps_the_object_until_the_last_release() -> None:
    table = LeaseTable()
    kept = Kept()
    seen = weakref.ref(kept)
    table.grant(7, kept)
    table.grant(7, kept)
    assert table.get(7) is kept
    del kept
    table.release(7, 1)
    assert seen() is not None
    table.release(7, 1)
    gc.collect()
    assert seen() is None
    assert table.get(7) is None


def test_the_end_hands_over_what_was_kept() -> None:
    table = LeaseTable()
    kept = Kept()
    seen = weakref.ref(kept)
    table.grant(1, kept)
    del kept
    ended = table.end()
    assert list(ended) == [1] and ended[1] is seen()
    del ended
    assert table.end() == {}
    assert seen() is None
    assert (len(table), table.total) == (0, 0)


def test_grants_are_counted_for_ever() -> None:
    table = LeaseTable()
    for count in range(1, 4):
        table.grant(1, None)
        assert (table.granted, table.total) == (count, 1)
        table.release(1, 1)
        assert (table.granted, table.total) == (count, 0)


@pytest.mark.parametrize(("object_id", "count", "held"), [(1, 3, 2), (1, 0, 2), (1, -1, 2), (2, 1, 0)])
def test_releasing_what_is_not_held_is_the_peers_fault(object_id: int, count: int, held: int) -> None:
    table = LeaseTable()
    table.grant(1, None)
    table.grant(1, None)
    with pytest.raises(ProtocolError, match=f"released {count} leases on object 0x0*{object_id} and holds {held}"):
        table.release(object_id, count)
    assert (len(table), table.total) == (1, 2)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 4), st.just(1)),
        st.tuples(st.just("release"), st.integers(0, 4), st.integers(-1, 3)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.slow
@given(operations)
def test_counts_like_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    table = LeaseTable()
    model: Counter[int] = Counter()
    for what, object_id, count in steps:
        if what == "grant":
            table.grant(object_id, object_id)
            model[object_id] += 1
        elif what == "clear":
            assert table.end() == {key: key for key, count in model.items() if count}
            model.clear()
        elif 0 < count <= model[object_id]:
            table.release(object_id, count)
            model[object_id] -= count
        else:
            with pytest.raises(ProtocolError):
                table.release(object_id, count)
        held = {key for key, number in model.items() if number}
        assert len(table) == len(held)
        assert table.total == model.total()
        assert all(table.get(key) == (key if key in held else None) for key in range(5))
