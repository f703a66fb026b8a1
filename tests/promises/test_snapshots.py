"""A receiver has the bytes of the moment of the call, of each kind of object and after each kind of write."""

from __future__ import annotations

import random

import pytest

from tests.promises.snapshots import WORLDS, draw, find, shown

pytestmark = pytest.mark.slow

PROGRAMS = 100
"""Programs in each world: 300 in all."""


@pytest.mark.parametrize("name", WORLDS)
async def test_random_programs_see_what_was_passed(name: str, rounds: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    found = await find(name, seed, range(PROGRAMS * rounds))
    assert not found, "\n".join(found)


async def test_programs_are_drawn_by_their_seed_alone() -> None:
    assert draw("1/2") == draw("1/2") != draw("1/3")
    assert " 0 'make'" in shown(draw("1/2"))
