"""An actor's record: states, restarts and the delay before them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from zcactor.control.actor_record import CRASH_LOOP, FIRST_PAUSE, PROVEN, ActorRecord, ActorState, HandleCount
from zcactor.ids import ProcessId
from zcactor.interface import Interface
from zcactor.marshal.packed import Packed
from zcactor.options import ActorSpec


class Empty:
    """The class of the actor."""


def record(**options: Any) -> ActorRecord:
    """A living actor."""
    made = ActorRecord(ActorSpec("n", **options), "Empty", Interface.of(Empty).wire(), ProcessId(b"o" * 16), 7)
    made.recipe = Packed(b"", (), 0)
    made.set_state("alive")
    return made


@pytest.mark.parametrize(("limit", "restarts", "may"), [(0, 0, False), (1, 0, True), (1, 1, False), (-1, 99, True)])
async def test_the_limit(limit: int, restarts: int, may: bool) -> None:
    actor = record(max_restarts=limit)
    actor.restarts = restarts
    assert actor.may_restart() is may


async def test_who_is_never_restarted() -> None:
    pending = record(max_restarts=-1)
    pending.state = "pending"
    dead = record(max_restarts=-1)
    dead.set_state("dead", "it was killed")
    stopping = record(max_restarts=-1)
    stopping.ending = asyncio.ensure_future(asyncio.sleep(0))
    without = record(max_restarts=-1)
    without.recipe = None
    assert not any(actor.may_restart() for actor in (pending, dead, stopping, without, record()))
    assert dead.cause == "it was killed"
    await stopping.ending


async def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_life() -> None:
    actor = record(max_restarts=-1)
    now = 100.0
    pauses = []
    for _ in range(12):
        actor.note_life(now)
        now += PROVEN - 1
        pauses.append(actor.note_death(now))
    assert pauses == pytest.approx([*(0.1 * 2**turn for turn in range(9)), 30.0, 30.0, 30.0])
    actor.note_life(now)
    assert actor.note_death(now + PROVEN) == FIRST_PAUSE
    assert actor.note_death(now + 10 * PROVEN) == 2 * FIRST_PAUSE, "it did not live in between"


async def test_a_constructor_that_kills_is_given_up() -> None:
    actor = record(max_restarts=-1)
    assert actor.note_death(0.0) == FIRST_PAUSE
    actor.set_state("restarting", "killed")
    assert [actor.note_death(1.0) is None for _ in range(CRASH_LOOP)] == [False, False, True]
    actor.set_state("alive")
    actor.set_state("restarting")
    assert actor.note_death(500.0) is not None, "one success starts the count again"


async def test_an_end_before_a_move_is_none_of_a_constructor() -> None:
    actor = record(max_restarts=-1)
    for _ in range(2 * CRASH_LOOP):
        actor.set_state("alive")
        actor.note_life(0.0)
        actor.set_state("restarting", "it moves to another node")
        assert actor.note_death(1.0) is not None
    actor.note_life(2.0)
    actor.leave_worker()
    assert [actor.note_death(3.0) is None for _ in range(CRASH_LOOP)] == [False, False, True]


async def test_waiting_for_a_state() -> None:
    actor = record()
    actor.state = "pending"
    waiting = asyncio.ensure_future(actor.settled())
    one_change = asyncio.ensure_future(actor.changed())
    await asyncio.sleep(0)
    actor.set_state("restarting")
    await one_change
    assert not waiting.done()
    actor.set_state("dead", "cause")
    await waiting
    assert actor.label.startswith("Empty(")
    assert record(name="it").label == "Empty(it)"
    assert record(lifetime="detached").detached
    assert not record().detached


async def test_the_dead_keep_little() -> None:
    actor = record(name="it", lifetime="detached")
    actor.set_state("dead", "a cause")
    actor.strip()
    assert (actor.label, actor.cause, actor.pid, actor.state) == ("Empty(it)", "a cause", 0, "dead")
    assert (actor.spec.env, actor.recipe, actor.interface, actor.worker) == ({}, None, None, None)
    assert not actor.may_restart()


def test_a_token_tells_when_it_is_gone() -> None:
    gone: list[int] = []
    token = HandleCount(ProcessId(b"o" * 16), 7, lambda: gone.append(1))
    assert gone == []
    del token
    assert gone == [1]


def test_a_state_that_cannot_follow_is_refused() -> None:
    actor = record()
    actor.set_state("dead", "it was killed")
    states: tuple[ActorState, ...] = ("pending", "alive", "restarting", "dead")
    for state in states:
        with pytest.raises(ValueError, match=f"is dead, and cannot be {state} next"):
            actor.set_state(state)
    assert (actor.state, actor.cause) == ("dead", "it was killed")
    actor = record()
    actor.set_state("alive")
    with pytest.raises(ValueError, match="is alive, and cannot be pending next"):
        actor.set_state("pending")
