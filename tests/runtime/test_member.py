"""The agent of a further node: what it does at the head's word, and what it tells."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.runtime.agents import DRIVER, HEAD, FakePool, FakeProcess, FakeSession
from zcactor.errors import AuthenticationError, ConnectionLost
from zcactor.runtime.member import NodeMember, member_interface

WORKER, OTHER = b"w" * 16, b"o" * 16


class Bench:
    """A member with a fake pool, whose head notes what it is told."""

    def __init__(self, answer: Any = None) -> None:
        self.process = FakeProcess(answer)
        self.pool = FakePool(lambda record: self.member.worker_ended(record))
        self.member = NodeMember(self.process, self.pool)  # type: ignore[arg-type]

    @property
    def told(self) -> list[tuple[Any, ...]]:
        return [what[1:] for what in self.process.asked]

    def lose(self, peer: bytes) -> None:
        session = FakeSession(peer)
        session.closed = ConnectionLost("cut")
        self.member.session_lost(session)  # type: ignore[arg-type]


async def test_a_worker_from_start_to_end() -> None:
    bench = Bench()
    await bench.member.start_worker(WORKER, "Shard", {"A": "1"}, DRIVER, False)
    assert (bench.pool.by_process[WORKER].label, bench.pool.by_process[WORKER].driver) == ("Shard", DRIVER)
    await bench.member.worker_ready(WORKER, 7, "w@host:1")
    await bench.member.worker_ready(WORKER, 7, "w@host:1")
    assert bench.told == [("worker_ready", WORKER, 7, "w@host:1")]
    bench.member.output("stdout", bench.pool.by_process[WORKER], ["a line"])
    await bench.process.settle()
    assert bench.told[1:] == [("worker_said", DRIVER, "stdout", "(Shard pid=0) a line\n")]
    await bench.member.kill_worker(WORKER, "for a reason")
    await bench.member.kill_worker(OTHER, None)
    await bench.process.settle()
    assert bench.told[2:] == [("worker_ended", WORKER, "for a reason")]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("the environment is too large")])
async def test_a_worker_that_cannot_be_started(error: Exception) -> None:
    bench = Bench()
    bench.pool.refuse = error
    await bench.member.start_worker(WORKER, "Shard", {}, DRIVER, False)
    await bench.process.settle()
    ((method, worker, cause),) = bench.told
    assert (method, worker) == ("worker_ended", WORKER)
    assert "no process could be started for Shard" in cause
    assert str(error) in cause


async def test_the_end_of_a_node() -> None:
    bench = Bench()
    await bench.member.start_worker(WORKER, "Shard", {}, DRIVER, False)
    await bench.member.end(0.0)
    await bench.member.start_worker(OTHER, "Shard", {}, DRIVER, False)
    async with asyncio.timeout(20):
        await bench.member.finished
    assert ("worker_ended", WORKER, "the node was shut down") in bench.told
    assert ("worker_ended", OTHER, "its node is shutting down") in bench.told
    assert not bench.pool.by_process


async def test_without_its_head_a_node_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def gone(*_: Any) -> None:
        raise ConnectionLost("the head is gone")

    bench = Bench(gone)
    await bench.member.start_worker(WORKER, "Shard", {}, DRIVER, False)
    bench.lose(OTHER)  # somebody else
    await bench.process.settle()
    assert not bench.member.finished.done()
    bench.process.sessions.used[HEAD] = FakeSession(HEAD)
    bench.lose(HEAD)  # one of two connections
    await bench.process.settle()
    assert not bench.member.finished.done()
    del bench.process.sessions.used[HEAD]
    bench.lose(HEAD)
    async with asyncio.timeout(20):
        await bench.member.finished
    assert not bench.pool.by_process
    assert "the cluster's head is lost (cut" in caplog.text


async def test_a_head_that_has_given_the_node_up_does_not_keep_it_from_ending() -> None:
    async def strange(*_: Any) -> None:
        raise AuthenticationError("this process is the agent of no node of this cluster")

    bench = Bench(strange)
    await bench.member.start_worker(WORKER, "Shard", {}, DRIVER, False)
    await bench.member.end(0.0)
    async with asyncio.timeout(20):
        await bench.member.finished


async def test_a_worker_that_cannot_be_reached_is_killed() -> None:
    bench = Bench()
    await bench.member.start_worker(WORKER, "Shard", {}, DRIVER, False)
    bench.process.tasks.closing = True
    bench.lose(WORKER)  # its own end: everything is lost
    assert WORKER in bench.pool.by_process
    bench.process.tasks.closing = False
    bench.lose(WORKER)
    assert not bench.pool.by_process


async def test_a_node_without_its_zygote_ends() -> None:
    bench = Bench()
    bench.member.zygote_lost()
    async with asyncio.timeout(20):
        await bench.member.finished


def test_the_interface() -> None:
    assert {"start_worker", "kill_worker", "worker_ready", "end"} <= set(member_interface().by_name)
