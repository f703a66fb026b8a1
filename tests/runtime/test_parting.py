"""Idle connections are closed by agreement."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.runtime.test_process import PATIENCE, _call, _settled
from tests.runtime.test_process_verbs import MIB, Pair
from zcactor.runtime.parting import Parting


def look(parting: Parting | None, times: int = 2) -> None:
    """What a timer does; the first look only notes what it sees."""
    assert parting is not None
    for _ in range(times):
        parting.look()


async def test_a_connection_that_nobody_uses_is_closed_and_opened_again() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        array = caller.store.empty(MIB)
        array[...] = 1
        place = actor.location
        assert (await _call(actor, "total", array))[0] == MIB
        owner.hosts[max(owner.hosts)].instance.kept = None
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        look(caller.parting)
        await asyncio.sleep(0)
        assert caller.sessions.used, "a handle is held"
        actor.session = None
        caller.sessions._watchers.clear()
        look(caller.parting)
        await _settled(lambda: (len(list(caller.sessions.all())), len(list(owner.sessions.all()))), (0, 0))
        gc.collect()
        assert actor.location == place
        assert (await _call(actor, "total", array))[0] == MIB
        assert [s.connection.kind for s in caller.sessions.all()] == ["verbs"]


async def test_a_connection_that_is_lost_just_when_both_agree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        (session,) = caller.sessions.all()
        assert caller.parting is not None

        async def agreed(*_: object) -> bool:
            session.connection.abort()
            return True

        monkeypatch.setattr(caller.requests, "ask", agreed)
        await caller.parting._propose(session)  # before the loop reports the end
        await _settled(lambda: list(caller.sessions.all()), [])
        assert not caplog.records


async def test_a_peer_that_needs_the_connection_keeps_it() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        (session,) = owner.sessions.all()
        look(owner.parting)
        await _settled(lambda: owner.sessions.used.get(caller.process) is session and not session.pending, True)
        assert caller.sessions.used and session.closed is None
        await _call(actor, "total", caller.store.empty(MIB))


async def test_both_at_once_lose_nothing() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        actor.session = None
        caller.sessions._watchers.clear()
        for _ in range(3):
            look(caller.parting)
            look(owner.parting)
            await asyncio.sleep(0)
            assert (await _call(actor, "total", caller.store.empty(MIB)))[2] is True
            actor.session = None
            caller.sessions._watchers.clear()


async def test_without_a_timeout_nothing_looks() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        owner.parting = None  # as with a timeout of 0
        (session,) = caller.sessions.all()
        assert await caller.requests.ask(session, "part") is False
