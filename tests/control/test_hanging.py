"""An actor that does not respond is killed, and no other actor is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import FakePool, FakeProcess, FakeSession
from zcactor.control.head import watch
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId

WORKER = ProcessId(b"w" * 16)


def bench(answer: Any) -> tuple[Any, Any]:
    """An actor, and a process whose pings go to `answer`."""
    process: Any = FakeProcess(answer)

    async def connect(process: bytes) -> FakeSession:
        return FakeSession(process)

    process.connections = SimpleNamespace(connect=connect)
    worker = FakePool().start("Shop", {}, ProcessId(b""), shared=False, process=WORKER)
    actor = SimpleNamespace(state="alive", restarts=0, worker=worker, label="Shop(a)", moving=None)
    return actor, process


async def test_a_process_without_an_answer_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    actor, process = bench(never)
    await watch(actor, process, 0.0, 0.01)
    assert actor.worker.ended.result() == "its process did not respond for 0.01 s and was killed (on_hang='kill')"
    assert "Shop(a) has not responded for 0.01 s and is killed" in caplog.text


@pytest.mark.parametrize("change", [{"state": "dead"}, {"restarts": 1}, {"worker": None}])
async def test_it_is_watched_through_one_life(change: dict[str, Any]) -> None:
    pings: list[Any] = []

    async def answers(*what: Any) -> None:
        pings.append(what)
        if len(pings) == 3:
            vars(actor).update(change)

    actor, process = bench(answers)
    worker = actor.worker
    await watch(actor, process, 0.0, 10.0)
    assert pings == [(WORKER, "ping")] * 3 and not worker.ended.done()


async def test_the_end_of_a_process_is_told_by_others() -> None:
    async def lost(*_: Any) -> None:
        raise ConnectionLost("gone")

    actor, process = bench(lost)
    await watch(actor, process, 0.0, 10.0)
    assert not actor.worker.ended.done()
