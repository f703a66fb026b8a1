"""The requests and keys of one object."""

from __future__ import annotations

import pytest

from zcactor.transport.verbs.peer.pull import key_at, pieces_of


@pytest.mark.parametrize(("nbytes", "count"), [(1, 1), (63, 1), (64, 1), (65, 2), (512, 8), (513, 9), (2**40, 2**34)])
def test_pieces(nbytes: int, count: int) -> None:
    assert pieces_of(nbytes, 64) == count


def test_the_key_of_a_byte() -> None:
    assert key_at([(10, 7)], 3) == (10, 7)
    keys = [(10, 7), (20, 8), (30, 9)]
    assert [key_at(keys, at)[1] for at in (0, 9, 10, 19, 20, 29)] == [7, 7, 8, 8, 9, 9]
