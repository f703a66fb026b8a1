"""The standing of a head, with a clock of the test's own."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from zcactor.control import standing as module
from zcactor.control.reign import GRACE, ReignState
from zcactor.control.standing import Standing

PATIENCE = 6.0


class Now:
    """A clock, and a term that ends when the test says so."""

    epoch = 3

    def __init__(self) -> None:
        self.at = 100.0
        self.until = math.inf
        self.looked = asyncio.Event()

    def valid_until(self) -> float:
        """The end of the term."""
        self.looked.set()
        return self.until

    def standing(self, *members: str) -> Standing:
        """The standing of a head that begins now."""
        return Standing(self, members, PATIENCE, lambda: self.at)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK", 0.0)


async def is_pending(waiting: asyncio.Task[Any], now: Now) -> bool:
    """Whether a task goes on, after a few looks of it."""
    for _ in range(3):
        now.looked.clear()
        await now.looked.wait()
    return not waiting.done()


async def test_a_new_cluster_is_led_at_once() -> None:
    standing = Now().standing()
    await standing.settled()
    assert standing.state is ReignState.LEADING
    assert standing.age() == 0.0


async def test_all_members_serve() -> None:
    now = Now()
    standing = now.standing("a", "b")
    assert standing.state.value == "taking over"
    for member in ("a", "b"):
        standing.serves(member, standing.now())
    await standing.settled()
    assert standing.state is ReignState.LEADING


async def test_less_than_half_of_the_members_serve() -> None:
    now = Now()
    standing = now.standing("a", "b", "c")
    standing.serves("a", 100.0)
    waiting = asyncio.create_task(standing.settled())
    now.at += 1000.0
    assert await is_pending(waiting, now)
    standing.ended("b")
    now.at += PATIENCE + GRACE + 0.1
    await waiting
    assert standing.state is ReignState.LEADING


async def test_silent_members_are_given_time() -> None:
    now = Now()
    standing = now.standing("a", "b")
    standing.serves("a", 100.0)
    waiting = asyncio.create_task(standing.settled())
    now.at += PATIENCE
    assert await is_pending(waiting, now)
    now.at += GRACE
    await waiting


async def test_members_that_have_ended_are_not_waited_for() -> None:
    standing = Now().standing("a", "b")
    standing.ended("a")
    standing.ended("b")
    await standing.settled()


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_term_that_is_not_renewed_for_a_while(renewed: bool) -> None:
    now = Now()
    standing = now.standing("a", "b", "c")
    for member in ("a", "b", "c"):
        standing.serves(member, 100.0)
    await standing.settled()
    assert await standing.lasts()
    now.at, now.until = 105.0, 104.0
    assert not standing.in_term
    assert standing.state is ReignState.ADRIFT
    assert standing.age() == 5.0, "more than half have answered then"
    waiting = asyncio.create_task(standing.lasts())
    assert await is_pending(waiting, now)
    if renewed:
        now.until = 110.0
    else:
        standing.depose()
        standing.depose()
    assert await waiting is renewed
    assert (standing.age() is None) is not renewed


async def test_members_that_join_and_leave() -> None:
    now = Now()
    standing = now.standing()
    await standing.settled()
    standing.joining("a")
    standing.joined("a")
    standing.joining("b")
    standing.joined("b")
    standing.serves("a", 100.0)
    now.at, now.until = 105.0, 104.0
    assert standing.age() is None, "half of the members are not more than half"
    standing.joining("b")
    assert standing.age() is None, "nobody knows yet whether it is on record"
    standing.left("b")
    assert standing.age() == 5.0


def test_a_head_that_was_deposed_hears_of_no_member() -> None:
    standing = Now().standing("a")
    standing.depose()
    standing.serves("a", 100.0)
    standing.ended("a")
    assert standing.state is ReignState.FOLLOWING
    assert standing.age() is None


async def test_an_operator_has_a_head_act_without_half_of_its_members() -> None:
    now, lacks = Now(), list[float]()
    standing = now.standing("a", "b", "c")
    standing.serves("a", 100.0)
    waiting = asyncio.create_task(standing.settled(lambda: lacks.append(now.at)))
    now.at += 1000.0
    assert await is_pending(waiting, now)
    assert lacks == [1100.0], "that is said once"
    assert standing.lacks_half()
    assert standing.silent == {"b", "c"}
    standing.force()
    assert not standing.lacks_half()
    now.at += PATIENCE
    assert await is_pending(waiting, now), "those that are silent get their time to end"
    now.at += GRACE
    await waiting
    assert standing.state is ReignState.LEADING


async def test_a_term_that_is_over_is_not_waited_for() -> None:
    now = Now()
    standing = now.standing("a", "b")
    now.until = -math.inf
    assert not await standing.settled()
    assert not await standing.lasts()
    assert standing.state is ReignState.FOLLOWING
    assert standing.age() is None
