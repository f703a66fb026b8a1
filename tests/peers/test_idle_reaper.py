"""Idle connections are closed by agreement of both ends."""

from __future__ import annotations

import asyncio
import math
import os
from typing import Any

import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, _call, _settled
from tests.assembly.test_process_verbs import MIB, Pair
from zcactor.peers.idle_reaper import IdleReaper
from zcactor.rpc.call import Call
from zcactor.rpc.services import Services


def age(idle_reaper: IdleReaper) -> None:
    """Make all records of activity old."""
    idle_reaper._seen = {session: (sent, -math.inf) for session, (sent, _) in idle_reaper._seen.items()}


def look(idle_reaper: IdleReaper | None, times: int = 2) -> None:
    """Look as a timer does, each time after the whole timeout; the first look only records the activity."""
    assert idle_reaper is not None
    for _ in range(times):
        age(idle_reaper)
        idle_reaper.look()


@pytest.mark.slow
async def test_a_connection_that_nobody_uses_is_closed_and_opened_again() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        array = caller.store.empty(MIB)
        array[...] = 1
        place = actor.location
        assert (await _call(actor, "total", array))[0] == MIB
        owner.hosts.by_index[max(owner.hosts.by_index)].instance.kept = None
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        for process in (caller, owner):  # one end proposes, and the other has seen no frame sent either
            look(process.idle_reaper)
        await _settled(lambda: (len(list(caller.sessions.all())), len(list(owner.sessions.all()))), (0, 0))
        assert actor.session is None, "the handle does not keep it"
        assert actor.location == place
        assert (await _call(actor, "total", array))[0] == MIB
        assert [s.connection.kind for s in caller.sessions.all()] == ["verbs"]


async def test_a_connection_that_is_lost_just_when_both_agree(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        (session,) = caller.sessions.all()

        async def agreed(*_: object) -> bool:
            session.connection.abort()
            return True

        monkeypatch.setattr(caller.requests, "ask", agreed)
        await caller.idle_reaper._propose(session)  # before the loop reports the end
        await _settled(lambda: list(caller.sessions.all()), [])
        assert not caplog.records


async def test_a_peer_that_needs_the_connection_keeps_it() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        (session,) = owner.sessions.all()
        look(owner.idle_reaper)
        await _settled(lambda: owner.sessions.used.get(caller.process) is session and not session.pending, True)
        assert caller.sessions.used and session.closed is None
        await _call(actor, "total", caller.store.empty(MIB))


async def test_both_at_once_lose_nothing() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        for _ in range(3):
            look(caller.idle_reaper)
            look(owner.idle_reaper)
            await asyncio.sleep(0)
            assert (await _call(actor, "total", caller.store.empty(MIB)))[2] is True


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_that_propose_at_once_one_closes(first: int) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        ends = [next(iter(process.sessions.all())) for process in (caller, owner)]
        for process in (caller, owner)[:: -1 if first else 1]:
            look(process.idle_reaper)
        await _settled(lambda: (len(list(caller.sessions.all())), len(list(owner.sessions.all()))), (0, 0))
        assert not caller.sessions.used
        assert not owner.sessions.used
        smaller = min(ends, key=lambda end: end.process)
        assert [end.parted for end in ends] == [True, True]
        assert [end.goodbye for end in ends] == [end is not smaller for end in ends], "the other end hears it"
        assert (await _call(actor, "total", caller.store.empty(MIB)))[2] is True


async def test_of_two_that_propose_at_once_neither_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end that had agreed, and then refuses because of a new call, uses the connection again."""
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        larger = max(caller, owner, key=lambda process: process.process)
        (session,), idle_reaper = larger.sessions.all(), larger.idle_reaper
        assert idle_reaper is not None
        idle_reaper._seen[session] = session.sent - 1, -math.inf  # as if the proposal had been sent

        call = Call(larger.process, larger.loop, larger.thread)

        async def refused(*_: object) -> bool:
            assert idle_reaper.close_if_idle(session), "the peer, whose id is smaller, may close it"
            session.pending.update(dict.fromkeys((1_000, 1_001), call))
            assert not idle_reaper.close_if_idle(session)
            session.pending.clear()
            return False

        monkeypatch.setattr(larger.requests, "ask", refused)
        await idle_reaper._propose(session)
        assert larger.sessions.used == {session.peer_process: session}
        assert not larger.sessions.is_leaving(session)


@pytest.mark.slow
async def test_a_call_that_is_sent_while_the_peer_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        (old,) = caller.sessions.all()
        results: list[Any] = []
        agree = IdleReaper.close_if_idle

        def slowly(self: IdleReaper, session: Any) -> bool:
            results.append(asyncio.ensure_future(_call(actor, "total", caller.store.empty(MIB))))
            return agree(self, session)

        monkeypatch.setattr(IdleReaper, "close_if_idle", slowly)
        look(owner.idle_reaper, 1)
        assert owner.idle_reaper is not None
        age(owner.idle_reaper)
        look(caller.idle_reaper)
        await _settled(lambda: len(results) > 0, True)
        assert (await results[0])[2] is True
        await _settled(lambda: [old in process.sessions.all() for process in (caller, owner)], [False, False])
        assert (await _call(actor, "total", caller.store.empty(MIB)))[2] is True


async def test_a_peer_that_has_just_sent_something_refuses() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        (session,) = owner.sessions.all()
        look(caller.idle_reaper)
        (ours,) = caller.sessions.all()
        await _settled(lambda: (caller.sessions.used.get(owner.process) is ours, len(ours.pending)), (True, 0))
        assert session.closed is None, "the owner has not looked yet, and knows nothing of it"


async def test_a_connection_that_was_opened_a_moment_ago_stays() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        ours = await caller.connections.connect(owner.process)
        look(caller.idle_reaper, 1)  # one look, with no frame sent: its opener is about to send
        theirs = await owner.connections.connect(caller.process)
        assert await owner.requests.ask(theirs, IdleReaper.part) is False
        age(caller.idle_reaper)
        assert await owner.requests.ask(theirs, IdleReaper.part) is True
        assert caller.sessions.is_leaving(ours)


async def test_what_the_peer_closes_by_agreement_is_not_proposed() -> None:
    """The peer would refuse that and close it all the same, and this end would use it again in between."""
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        ours = await caller.connections.connect(owner.process)
        theirs = await owner.connections.connect(caller.process)
        look(caller.idle_reaper, 1)
        idle_reaper = caller.idle_reaper
        assert idle_reaper is not None
        age(idle_reaper)
        assert await owner.requests.ask(theirs, IdleReaper.part) is True
        sent = ours.sent
        look(idle_reaper)  # the peer takes its time
        await idle_reaper._propose(ours)  # this began just before the agreement
        await _settled(lambda: bool(ours.pending), False)
        assert ours.sent == sent
        assert caller.sessions.is_leaving(ours)
        assert await owner.requests.ask(theirs, IdleReaper.part) is True, "it is still agreed"


async def test_a_connection_with_a_lease_that_was_granted_meanwhile_is_not_proposed() -> None:
    """The peer has no call under way and would agree, and could not give the lease back then."""
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        ours = await caller.connections.connect(owner.process)
        idle_reaper = caller.idle_reaper
        assert idle_reaper is not None
        look(idle_reaper, 1)
        age(idle_reaper)
        proposing = idle_reaper._propose(ours)  # as by a look
        ours.leases.grant(7, object())
        sent = ours.sent
        await proposing
        assert ours.sent == sent and not caller.sessions.is_leaving(ours)
        ours.leases.release(7, 1)


async def test_nothing_is_sent_by_what_is_being_closed() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        session = await caller.connections.connect(owner.process)
        await caller.requests.ask(session, Services.ping)
        closing = asyncio.ensure_future(session.aclose(zc.ConnectionLost("nobody used it", maybe_executed=False)))
        await asyncio.sleep(0)
        with pytest.raises(zc.ConnectionLost, match="nobody used it"):
            await caller.requests.ask(session, Services.ping)
        await closing
        assert await caller.requests.ask(await caller.connections.connect(owner.process), Services.ping)


@pytest.mark.parametrize(
    ("timeout", "pause"),
    [
        (0, 0.0),
        (6, 3.0),
    ],
)
async def test_how_often_it_looks(timeout: float, pause: float) -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, _, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        config = zc.Config(idle_timeout=timeout)
        idle_reaper = IdleReaper(
            caller.sessions, caller.tasks, caller.requests, caller.simultaneous_opens, config, keeps=False
        )
        assert idle_reaper._pause == pause
        assert (idle_reaper._alarm is None) == (pause == 0)
        (session,) = caller.sessions.all()
        assert session.connection.idle_timeout(config) == timeout
        assert not idle_reaper.close_if_idle(session), "it has not looked yet"
        idle_reaper.close()


async def test_agents_keep_their_connections() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        await _call(actor, "total", caller.store.empty(MIB))
        await _settled(lambda: [s.leases.total for s in caller.sessions.all()], [0])
        (session,) = caller.sessions.all()
        assert caller.idle_reaper.is_idle(session)
        for name in ("node", "head"):
            setattr(caller.sessions, name, owner.process)
            assert not caller.idle_reaper.is_idle(session), f"it leads to the {name}'s agent"
            setattr(caller.sessions, name, b"")
        caller.sessions.head = caller.process
        assert not caller.idle_reaper.is_idle(session), "this is the head"
        caller.sessions.head = b""


@zc.actor
class Peer:
    """An actor to call."""

    def name(self) -> int:
        return os.getpid()


@zc.actor
class Caller:
    """An actor that calls others, and counts its descriptors."""

    async def call(self, peers: list[Any]) -> list[int]:
        self.peers = peers
        return list(await asyncio.gather(*[peer.name() for peer in peers]))

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"transports": "tcp"}], ids=["local", "tcp"])
async def test_a_process_that_has_called_others_keeps_no_descriptors(settings: dict[str, Any]) -> None:
    async with asyncio.timeout(2 * PATIENCE), zc.init(config=zc.Config(idle_timeout=0.1, **settings)):
        caller: Any = await zc.spawn(Caller)
        peers: list[Any] = await asyncio.gather(*[zc.spawn(Peer) for _ in range(8)])
        pids = [await peer.name() for peer in peers]
        before = await caller.descriptors()
        for _ in range(2):
            assert await caller.call(peers) == pids
            while await caller.descriptors() > before + 2:
                pass
        await zc.kill(peers[0])
        with pytest.raises(zc.ActorDied):
            await caller.call(peers)
