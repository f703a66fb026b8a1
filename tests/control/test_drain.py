"""The end of a node's workers, with workers that leave, that do not answer, and that are gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import DRIVER, FakePool, FakeProcess, FakeSession
from zcactor.control import drain
from zcactor.control.drain import discard, discard_others, end_workers
from zcactor.control.head_log import Candidate
from zcactor.control.memory_log import MemoryLog
from zcactor.control.recorder import HeadRecorder
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId
from zcactor.workers.worker_table import WorkerRecord

WILLING, DEAF, SLOW, GONE, STRANGE = (ProcessId(letter * 16) for letter in (b"w", b"d", b"s", b"g", b"n"))


async def test_workers_leave_in_order_or_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "RESPONSE", 0.05)
    for_ever = asyncio.Event()

    async def answer(peer: ProcessId, method: str, *args: Any) -> None:
        if peer == GONE:
            raise ConnectionLost("it is gone")
        if peer == DEAF or (peer == SLOW and method == "leave"):
            await for_ever.wait()
        if peer == WILLING and method == "leave":
            pool.end(pool.by_process[peer], "left")

    process = FakeProcess(answer)
    ended: list[WorkerRecord] = []
    pool = FakePool(ended.append)
    for name in (WILLING, DEAF, SLOW, GONE, STRANGE):
        pool.start("Shard", {}, DRIVER, shared=False, process=name)
        if name != STRANGE:  # this worker has not connected yet
            process.sessions.used[name] = FakeSession(name)
    process.sessions.used[GONE].closed = None
    records = dict(pool.by_process)
    await end_workers(process.sessions, process, pool, 0.05, "the node was shut down")  # type: ignore[arg-type]
    assert not pool.by_process
    assert records[WILLING].ended.result() == "left"
    assert {record.ended.result() for name, record in records.items() if name != WILLING} == {"the node was shut down"}
    assert [method for peer, method, *_ in process.asked if peer == WILLING] == ["ping", "leave"]
    assert [method for peer, method, *_ in process.asked if peer == DEAF] == ["ping"]
    assert not any(peer == STRANGE for peer, *_ in process.asked)
    assert pool.drained == 1


async def test_without_grace_nobody_is_asked() -> None:
    process, pool = FakeProcess(), FakePool()
    pool.start("Shard", {}, DRIVER, shared=False, process=WILLING)
    process.sessions.used[WILLING] = FakeSession(WILLING)
    await end_workers(process.sessions, process, pool, 0.0, "killed")  # type: ignore[arg-type]
    assert (process.asked, pool.by_process, pool.drained) == ([], {}, 1)


async def test_an_actor_of_a_process_that_is_not_reached_is_discarded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third attempt succeeds. With the end of the process no further attempt is made."""
    monkeypatch.setattr(drain, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(drain, "_LAST_PAUSE", 0.0)

    async def answer(peer: bytes, *_: Any) -> None:
        if len(process.asked) < 3:
            raise ConnectionLost("its host refuses connections")

    async def connect(peer: bytes) -> FakeSession:
        return FakeSession(peer)

    process: Any = FakeProcess(answer)
    process.connections = SimpleNamespace(connect=connect)
    pool = FakePool()
    pool.start("Shard", {}, DRIVER, shared=True, process=WILLING)
    worker = pool.by_process[WILLING]
    recorder = HeadRecorder(process.loop, MemoryLog(), Candidate("h@host:1", "h", 1))
    await discard(process, recorder, worker, 5)
    assert process.asked == [(WILLING, "discard", 5, 0)] * 3
    process.asked.clear()
    await discard_others(process, recorder, worker, (4, 5))
    assert process.asked == [(WILLING, "discard_others", [4, 5], 0)] * 3
    process.asked.clear()

    async def end(*_: Any) -> None:
        pool.end(worker, "it was killed")
        raise ConnectionLost("it has ended")

    process._answer = end
    await discard(process, recorder, worker, 6)
    await discard(process, recorder, worker, 7)
    assert process.asked == [(WILLING, "discard", 6, 0)]
