"""The lease of a head, with a clock of the test's own."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from zcactor.control import leader_lease as module
from zcactor.control.leader_lease import LeaderLease
from zcactor.control.quorum import GRACE, LeaderState

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

    def leader_lease(self, *members: str) -> LeaderLease:
        """The lease of a head that begins now."""
        return LeaderLease(self, members, PATIENCE, lambda: self.at)


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
    leader_lease = Now().leader_lease()
    await leader_lease.settled()
    assert leader_lease.state is LeaderState.LEADING
    assert leader_lease.age() == 0.0


async def test_all_members_serve() -> None:
    now = Now()
    leader_lease = now.leader_lease("a", "b")
    assert leader_lease.state.value == "taking over"
    for member in ("a", "b"):
        leader_lease.serves(member, leader_lease.now())
    await leader_lease.settled()
    assert leader_lease.state is LeaderState.LEADING


async def test_less_than_half_of_the_members_serve() -> None:
    now = Now()
    leader_lease = now.leader_lease("a", "b", "c")
    leader_lease.serves("a", 100.0)
    waiting = asyncio.create_task(leader_lease.settled())
    now.at += 1000.0
    assert await is_pending(waiting, now)
    leader_lease.ended("b")
    now.at += PATIENCE + GRACE + 0.1
    await waiting
    assert leader_lease.state is LeaderState.LEADING


async def test_silent_members_are_given_time() -> None:
    now = Now()
    leader_lease = now.leader_lease("a", "b")
    leader_lease.serves("a", 100.0)
    waiting = asyncio.create_task(leader_lease.settled())
    now.at += PATIENCE
    assert await is_pending(waiting, now)
    now.at += GRACE
    await waiting


async def test_members_that_have_ended_are_not_waited_for() -> None:
    leader_lease = Now().leader_lease("a", "b")
    leader_lease.ended("a")
    leader_lease.ended("b")
    await leader_lease.settled()


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_term_that_is_not_renewed_for_a_while(renewed: bool) -> None:
    now = Now()
    leader_lease = now.leader_lease("a", "b", "c")
    for member in ("a", "b", "c"):
        leader_lease.serves(member, 100.0)
    await leader_lease.settled()
    assert await leader_lease.lasts()
    now.at, now.until = 105.0, 104.0
    assert not leader_lease.in_term
    assert leader_lease.state is LeaderState.ADRIFT
    assert leader_lease.age() == 5.0, "more than half have answered then"
    waiting = asyncio.create_task(leader_lease.lasts())
    assert await is_pending(waiting, now)
    if renewed:
        now.until = 110.0
    else:
        leader_lease.depose()
        leader_lease.depose()
    assert await waiting is renewed
    assert (leader_lease.age() is None) is not renewed


async def test_members_that_join_and_leave() -> None:
    now = Now()
    leader_lease = now.leader_lease()
    await leader_lease.settled()
    leader_lease.joining("a")
    leader_lease.joined("a")
    leader_lease.joining("b")
    leader_lease.joined("b")
    leader_lease.serves("a", 100.0)
    now.at, now.until = 105.0, 104.0
    assert leader_lease.age() is None, "half of the members are not more than half"
    leader_lease.joining("b")
    assert leader_lease.age() is None, "nobody knows yet whether it is on record"
    leader_lease.left("b")
    assert leader_lease.age() == 5.0


def test_a_head_that_was_deposed_hears_of_no_member() -> None:
    leader_lease = Now().leader_lease("a")
    leader_lease.depose()
    leader_lease.serves("a", 100.0)
    leader_lease.ended("a")
    assert leader_lease.state is LeaderState.FOLLOWING
    assert leader_lease.age() is None


async def test_an_operator_has_a_head_act_without_half_of_its_members() -> None:
    now, lacks = Now(), list[float]()
    leader_lease = now.leader_lease("a", "b", "c")
    leader_lease.serves("a", 100.0)
    waiting = asyncio.create_task(leader_lease.settled(lambda: lacks.append(now.at)))
    now.at += 1000.0
    assert await is_pending(waiting, now)
    assert lacks == [1100.0], "that is said once"
    assert leader_lease.lacks_half()
    assert leader_lease.silent == {"b", "c"}
    leader_lease.force()
    assert not leader_lease.lacks_half()
    now.at += PATIENCE
    assert await is_pending(waiting, now), "those that are silent get their time to end"
    now.at += GRACE
    await waiting
    assert leader_lease.state is LeaderState.LEADING


async def test_a_term_that_is_over_is_not_waited_for() -> None:
    now = Now()
    leader_lease = now.leader_lease("a", "b")
    now.until = -math.inf
    assert not await leader_lease.settled()
    assert not await leader_lease.lasts()
    assert leader_lease.state is LeaderState.FOLLOWING
    assert leader_lease.age() is None
