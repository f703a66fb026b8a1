"""Calls that an actor sends back, as it moves: each comes back to the caller as it was sent, and runs once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.control.movers import Tally
from zcactor.execution.actor_runner import send_back
from zcactor.process.cluster import WorkerService
from zcactor.process.context import current
from zcactor.rpc.incoming import Incoming

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=2) as node:
        yield node


async def spawn(name: str = "") -> Any:
    """An actor whose handle does not check calls."""
    return await Tally.spawn(name)


EPOCH = 1
"""The epoch of a head whose log lies in its memory."""


class Move:
    """An actor that is closed in its process, and whose calls wait until `settle` names its next place."""

    def __init__(self, actor: Any, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actor, self.place = actor, place
        self.settled = asyncio.Event()
        self.asked = asyncio.Event()
        locate = current().head.locate

        async def located(actor_id: bytes, **given: Any) -> Any:
            if actor_id != actor._remote.actor_id:
                return await locate(actor_id, **given)  # type: ignore[arg-type]
            self.asked.set()
            await self.settled.wait()
            return "alive", self.place, ""

        monkeypatch.setattr(current().head, "locate", located)

    async def close(self, patience: float = 20.0) -> bool:
        process, index = self.actor._remote.location
        session = await current().connections.connect(process)
        return await current().requests.ask(session, WorkerService.vacate, index, patience, EPOCH)


async def test_calls_run_at_the_next_place_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, there = await spawn("here"), await spawn("there")
    await asyncio.gather(actor.aadd(0), there.aadd(0))
    move = Move(actor, there._remote.location, monkeypatch)
    assert await move.close()
    moved = zc.ones(50_000)
    refs: list[Any] = [
        actor.add(1), actor.aadd(2, more="named"), actor.iadd(3), actor.total(np.ones(100_000)),
        actor.writes(zc.move(moved)), actor.total(there.make(10)), actor.aadd("x" * 1_000_000), actor.add(4),
    ]  # fmt: skip
    await move.asked.wait()
    refs += [actor.add(5), actor.add(6)]
    assert not any(ref.done() for ref in refs)
    move.settled.set()
    assert await asyncio.gather(*refs) == [1, [2, "named"], 3, 1e5, 1e5, 10.0, "x" * 1_000_000, 4, 5, 6]
    entries = [entry for entry in await there.all() if type(entry) is int]
    assert [entry for entry in entries if entry in (1, 4, 5, 6)] == [1, 4, 5, 6]
    assert sorted(entries) == [0, 1, 2, 3, 4, 5, 6]


async def test_an_actor_that_stays_runs_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = await spawn()
    held = actor.hold("long")
    await actor.began("long")
    move = Move(actor, actor._remote.location, monkeypatch)
    closing = asyncio.ensure_future(move.close(0.5))
    while not move.asked.is_set():  # as soon as its mailbox is closed, a call is sent back
        if closing.done():
            closing = asyncio.ensure_future(move.close(0.5))
        ref = actor.aadd("sent back")
        await asyncio.wait([asyncio.ensure_future(_outcome(ref)), asyncio.ensure_future(move.asked.wait())],
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    assert not await closing
    move.settled.set()
    await actor.open()
    assert await held == "long"
    assert await ref == "sent back"


async def _outcome(ref: Any) -> Any:
    return await ref


async def test_streams_deadlines_and_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, there = await spawn(), await spawn()
    await there.all()
    move = Move(actor, there._remote.location, monkeypatch)
    assert await move.close()
    stream = actor.items(50)
    late, cancelled, kept = actor.aadd.options(timeout=0.01)("late"), actor.aadd("cancelled"), actor.aadd("kept")
    await move.asked.wait()
    with pytest.raises(zc.DeadlineExceeded):
        await late
    assert cancelled.cancel()
    move.settled.set()
    assert [item async for item in stream] == list(range(50))
    assert await kept == "kept"
    assert await there.all() == ["kept"]


async def test_an_actor_that_dies_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = await spawn()
    move = Move(actor, (b"", 0), monkeypatch)
    assert await move.close()
    ref = actor.aadd(1)
    await move.asked.wait()
    actor._remote.die("it was killed")
    with pytest.raises(zc.ActorDied, match="it was killed") as died:
        await ref
    assert not died.value.maybe_executed


async def test_a_call_of_a_graph_has_no_process_to_go_back_to() -> None:
    caller: Any = object()
    refused: Any = None
    assert not send_back(Incoming(caller, 1, 2, 3, b""), refused, refused)
