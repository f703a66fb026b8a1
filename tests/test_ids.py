"""The source of ids: the system, or a generator inside a block."""

from __future__ import annotations

import random
import secrets

import pytest

from zcactor import ids


def test_sizes() -> None:
    assert [len(ids.token(n)) for n in (1, 8, 16, 32)] == [1, 8, 16, 32]
    assert len(ids.token()) == len(ids.new_process()) == len(ids.new_actor()) == 16
    assert all(0 <= ids.bits(32) < 1 << 32 for _ in range(100))
    assert ids.token() != ids.token()


def test_a_generator_decides_inside_its_block_alone() -> None:
    def draw() -> tuple[bytes, int]:
        with ids.drawn_from(random.Random(7)):
            return ids.token(), ids.bits(62)

    assert draw() == draw()
    with pytest.raises(ZeroDivisionError), ids.drawn_from(random.Random(7)):
        raise ZeroDivisionError
    assert isinstance(ids._source, secrets.SystemRandom)


def test_the_ids_of_a_spawn() -> None:
    made = [ids.for_spawn() for _ in range(100)]
    assert all(len(each.request) == len(each.actor) == 16 and 0 < each.object_id <= 1 << 62 for each in made)
    assert len(set(made)) == 100
