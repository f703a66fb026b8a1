"""The end of a node's workers, with workers that leave, that do not answer, and that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.runtime.agents import DRIVER, FakePool, FakeProcess, FakeSession
from zcactor.errors import ConnectionLost
from zcactor.runtime import leaving
from zcactor.runtime.leaving import end_workers
from zcactor.runtime.pool import WorkerRecord

WILLING, DEAF, SLOW, GONE, STRANGE = b"w" * 16, b"d" * 16, b"s" * 16, b"g" * 16, b"n" * 16


async def test_workers_leave_in_order_or_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "RESPONSE", 0.05)
    for_ever = asyncio.Event()

    async def answer(peer: bytes, method: str, *args: Any) -> None:
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
        if name != STRANGE:  # which has not connected yet
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
