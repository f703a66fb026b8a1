"""The one token that all holders of an actor share, and the message to holders that the actor's node was lost."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import FakeProcess, FakeSession
from tests.control.test_actor_table import record
from zcactor.control.actor_record import ActorRecord
from zcactor.control.actor_table import ActorTable
from zcactor.control.handle_grants import HandleGrants
from zcactor.control.head_log import Candidate
from zcactor.control.memory_log import MemoryLog
from zcactor.control.recorder import HeadRecorder
from zcactor.ids import ProcessId


def recorder() -> HeadRecorder:
    """A recorder that has nothing to record."""
    return HeadRecorder(asyncio.get_running_loop(), MemoryLog(), Candidate("h@host:1", "h", 1))


@pytest.mark.slow
async def test_one_token_for_all_and_its_end() -> None:
    process: Any = FakeProcess()
    unheld: list[Any] = []
    exports: dict[int, Any] = {}
    table = ActorTable[ActorRecord]()
    grants = HandleGrants(process, exports, {ProcessId(b"w"): "h@host:1"}, table, unheld.append, recorder())
    actor = record(7)
    table.add(actor)
    assert grants.revive(8) is None
    token = grants.token_of(actor)
    assert grants.revive(7) is token is exports[7] and (token.owner, token.object_id) == (process.process, 7)
    assert grants.place_of(ProcessId(b"w")) == "host:1" and grants.place_of(ProcessId(b"v")) == ""
    del token
    exports.clear()
    gc.collect()
    await process.settle()
    assert unheld == [actor]
    assert grants.revive(7) is exports[7], "it is held again"


async def test_holders_are_told_and_nobody_else() -> None:
    process: Any = FakeProcess()
    grants = HandleGrants(process, {}, {}, ActorTable(), lambda _: None, recorder())
    actor = record(7)
    sessions: list[Any] = [FakeSession(name * 16) for name in (b"a", b"b", b"c", b"a")]
    for session, held in zip(sessions, ({7: 1}, {}, {7: 1}, {7: 1}), strict=True):
        session.leases = SimpleNamespace(get=held.get)
    sessions[3].successor = sessions[0]  # twins share their leases
    await sessions[2].aclose()
    process.sessions.all = lambda: sessions
    actor.set_state("restarting", "its node was lost")
    grants.tell_holders(actor)
    await process.settle()
    assert process.asked == [(b"a" * 16, "actor_changed", actor.actor_id, "restarting", b"", 0, "its node was lost", 0)]
