"""Peers that owe an answer and are silent: pings, questions to the head, and giving up where their node is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from tests.assembly.test_process import PATIENCE, Pair, _call, _settled
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.process import Process
from zcactor.errors import ConnectionLost
from zcactor.ids import ActorId
from zcactor.peers import failure_detector
from zcactor.process.tasks import Tasks
from zcactor.rpc.session import Session


class Stopped:
    """A caller whose peer's host can be stopped, with the head's word about that host.

    Attributes:
        ago: seconds since the head has heard from the peer's node; -1 where the node is given up, None for a silent
            head.
        asked: the number of questions to the head.
    """

    def __init__(self, caller: Process, owner: Process, actor: RemoteActor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caller, self.owner, self.actor = caller, owner, actor
        self.ago: float | None = 100.0
        self.asked = 0
        self._kept: list[tuple[Any, bytes]] = []
        monkeypatch.setattr(caller.head, "silence_of", self._silence_of)

    async def _silence_of(self, process: bytes) -> tuple[float, str]:
        assert process == self.owner.process
        self.asked += 1
        if self.ago is None:
            raise ConnectionLost("the head is silent")
        return self.ago, "there"

    @property
    def session(self) -> Session:
        """The caller's session."""
        (session,) = self.caller.sessions.all()
        return session

    def stop(self) -> None:
        """Stop the peer's host: its kernel takes incoming bytes, and no process reads them."""
        for session in self.owner.sessions.all():
            connection = session.connection
            connection._deliver = lambda batch, c=connection: self._kept.append((c, bytes(batch)))

    def go_on(self) -> None:
        """Let the peer's host run again; it reads the bytes that have come meanwhile."""
        kept, self._kept = self._kept, []
        for connection, _ in kept:
            connection.__dict__.pop("_deliver", None)
        for connection, batch in kept:
            connection._deliver(batch)

    def frames(self) -> int:
        """Frames that the caller has sent."""
        return self.caller.counters.frames_sent


class Looks:
    """The tasks and the loop of a process as its failure detector sees them.

    A second passes with each look, in any time that this machine takes for it.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.start = tasks.start
        self.loop = self
        self.call_later = tasks.loop.call_later
        self._now = 0.0

    def time(self) -> float:
        self._now += 1.0
        return self._now


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stopped]:
    # Between two looks the loop has some turns; in many of these a peer that is not stopped answers.
    for name, seconds in {"PING_AFTER": 30.0, "ASK_AFTER": 100.0, "_WATCHING": 0.001, "_RESTING": 0.001}.items():
        monkeypatch.setattr(failure_detector, name, seconds)
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, actor):
        assert caller.failure_detector is not None
        monkeypatch.setattr(caller.failure_detector, "_tasks", Looks(caller.tasks))
        assert (await _call(actor, "total", np.ones(3)))[0] == 3.0
        yield Stopped(caller, owner, actor, monkeypatch)


async def test_calls_to_a_stopped_host_end_and_may_have_run(bench: Stopped) -> None:
    bench.stop()
    session = bench.session
    waiting = [asyncio.ensure_future(_call(bench.actor, "total", np.ones(3))) for _ in range(3)]
    for call in waiting:
        with pytest.raises(zc.ActorUnavailable, match="its host is silent: nothing has come from it for") as caught:
            await call
        assert caught.value.maybe_executed
    assert "nor to the head" in str(caught.value)
    assert bench.asked == 1
    assert session.closed is not None
    assert bench.actor.session is None


async def test_what_comes_late_is_dropped(bench: Stopped) -> None:
    bench.stop()
    array = bench.caller.store.empty(5000)
    array[...] = 2.0
    with pytest.raises(zc.ActorUnavailable):
        await _call(bench.actor, "total", array)
    bench.go_on()
    await _settled(lambda: [len(list(process.sessions.all())) for process in (bench.caller, bench.owner)], [0, 0])
    assert (await _call(bench.actor, "total", array))[0] == 10000.0
    bench.owner.hosts.by_index[max(bench.owner.hosts.by_index)].instance.kept = None
    await _settled(lambda: bench.session.leases.total, 0)


async def test_an_idempotent_call_is_sent_again(bench: Stopped) -> None:
    bench.stop()
    spec = bench.actor.interface.by_name["total"]
    again: ObjectRef[Any] = ObjectRef(bench.actor.call(spec, (np.ones(3),), {}, None, 2))
    assert (await again)[0] == 3.0


@pytest.mark.parametrize("ago", [0.5, None])
async def test_a_peer_whose_node_lives_is_waited_for(bench: Stopped, ago: float | None) -> None:
    bench.ago = ago
    bench.stop()
    waiting = asyncio.ensure_future(_call(bench.actor, "total", np.ones(3)))
    while bench.asked < 5:
        await asyncio.sleep(0)
    pings = [call for call in bench.session.pending.values() if call.target is None]
    assert len(pings) == 1, "one for each silence"
    assert not waiting.done()
    bench.go_on()
    assert (await waiting)[0] == 3.0
    await _settled(lambda: len(bench.session.pending), 0)


async def test_a_peer_that_answers_the_ping_is_not_asked_after(bench: Stopped) -> None:
    held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def total(array: Any) -> Any:
        return await held

    host = bench.owner.hosts.by_index[max(bench.owner.hosts.by_index)]
    host.instance.total = total
    host._plain = ()
    waiting = asyncio.ensure_future(_call(bench.actor, "total", np.ones(3)))
    before = bench.frames()
    while bench.frames() < before + 5:
        await asyncio.sleep(0)
    assert bench.asked == 0
    assert not waiting.done()
    held.set_result((7.0, False, False))
    assert (await waiting)[0] == 7.0


async def test_nothing_is_sent_while_nothing_is_owed(bench: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    await _settled(lambda: len(bench.session.pending) + bench.session.leases.total, 0)
    looks: list[None] = []
    assert bench.caller.failure_detector is not None
    look = bench.caller.failure_detector.look

    def counted() -> None:
        looks.append(None)
        look()

    monkeypatch.setattr(bench.caller.failure_detector, "look", counted)
    before = bench.frames()
    while len(looks) < 20:
        await asyncio.sleep(0)
    assert bench.frames() == before
    assert bench.asked == 0


async def test_a_process_that_knows_no_other_host_never_looks(bench: Stopped) -> None:
    caller = bench.caller
    alone = failure_detector.FailureDetector(caller.sessions, caller.tasks, caller.requests, caller.head)
    await caller.connections.connect(caller.process)
    alone.begun(caller.sessions.used[caller.process])
    assert alone._timer is None
    alone.close()


# ---- reported by the head


async def test_a_holder_is_told_that_the_node_was_lost(bench: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.caller.sessions.remotes[bench.actor.actor_id] = bench.actor
    bench.stop()
    place = bench.actor.location
    waiting = asyncio.ensure_future(_call(bench.actor, "total", np.ones(3)))
    while not bench.session.pending:
        await asyncio.sleep(0)
    located: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def locate(_: bytes) -> Any:
        return await located

    monkeypatch.setattr(bench.caller.head, "locate", locate)
    tell = bench.caller.news.actor_changed
    tell(bench.actor.actor_id, "restarting", *place, "its node was lost", 1)
    with pytest.raises(zc.ActorUnavailable, match="its node was lost") as caught:
        await waiting
    assert caught.value.maybe_executed
    later = asyncio.ensure_future(_call(bench.actor, "total", np.ones(4)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not list(bench.caller.sessions.all()), "it is known not to be there"
    located.set_result(("alive", place, ""))
    assert (await later)[0] == 4.0
    tell(bench.actor.actor_id, "alive", b"n" * 16, 5, "", 1)
    assert bench.actor.location == (b"n" * 16, 5)
    tell(ActorId(b"unknown"), "dead", b"", 0, "never mind", 1)


async def test_a_holder_is_told_that_the_actor_is_dead(bench: Stopped) -> None:
    bench.caller.sessions.remotes[bench.actor.actor_id] = bench.actor
    bench.stop()
    waiting = asyncio.ensure_future(_call(bench.actor, "total", np.ones(3)))
    while not bench.session.pending:
        await asyncio.sleep(0)
    bench.caller.news.actor_changed(bench.actor.actor_id, "dead", *bench.actor.location, "its node was lost", 1)
    for call in (waiting, _call(bench.actor, "total", np.ones(3))):
        with pytest.raises(zc.ActorDied, match="its node was lost"):
            await call
