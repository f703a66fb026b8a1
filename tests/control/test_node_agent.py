"""The agent of a further node: the head's orders, and its reports to the head."""

from __future__ import annotations

import asyncio
import gc
import threading
from functools import partial
from typing import Any

import pytest

from tests.callers import asked_by
from tests.control.agents import DRIVER, HEAD, FakePool, FakeProcess, FakeSession
from zcactor.api.handle import ActorHold
from zcactor.control import node_agent
from zcactor.control.node_agent import NodeAgent
from zcactor.errors import AuthenticationError, ConnectionLost, InsufficientResources, ObjectLost
from zcactor.ids import ProcessId
from zcactor.marshal.packed import Packed
from zcactor.objects.locations import LostPart
from zcactor.objectstore.ref import RegionKind
from zcactor.objectstore.table import LeaseTable
from zcactor.peers.losses import silence_before
from zcactor.process import head_outage
from zcactor.process.cluster import HeadService, MembershipService, WorkerService
from zcactor.process.epochs import Deposed
from zcactor.rpc.parts import Part
from zcactor.rpc.services import method_number

WORKER, OTHER = ProcessId(b"w" * 16), ProcessId(b"o" * 16)


class Bench:
    """A node agent with a fake pool, and a head that records the reports."""

    def __init__(self, answer: Any = None) -> None:
        self.process = FakeProcess(answer)
        self.pool = FakePool(lambda record: self.member.worker_ended(record))
        self.member = NodeAgent(self.process, self.pool, self.process.news.known)  # type: ignore[arg-type]

    @property
    def told(self) -> list[tuple[Any, ...]]:
        return [what[1:] for what in self.process.asked]

    def lose(self, peer: bytes) -> None:
        session = FakeSession(peer)
        session.closed = ConnectionLost("cut")
        self.member.session_lost(session)  # type: ignore[arg-type]


async def test_a_worker_from_start_to_end() -> None:
    bench = Bench()
    await bench.member.start_worker(1, WORKER, "Shard", {"A": "1"}, DRIVER, False)
    assert (bench.pool.by_process[WORKER].label, bench.pool.by_process[WORKER].driver) == ("Shard", DRIVER)
    await bench.member.worker_ready(WORKER, 7, "w@host:1")
    await bench.member.worker_ready(WORKER, 7, "w@host:1")
    assert bench.told == [("worker_started", 1, WORKER, 7, "w@host:1")]
    bench.member.output("stdout", bench.pool.by_process[WORKER], ["a line"])
    await bench.process.settle()
    assert bench.told[1:] == [("worker_said", 1, DRIVER, "stdout", "(Shard pid=0) a line\n")]
    await bench.member.kill_worker(1, WORKER, "for a reason")
    await bench.member.kill_worker(1, OTHER, None)
    await bench.process.settle()
    assert bench.told[2:] == [("worker_ended", 1, WORKER, "for a reason")]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), ValueError("the environment is too large")])
async def test_a_worker_that_cannot_be_started(error: Exception) -> None:
    bench = Bench()
    bench.pool.refuse = error
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    await bench.process.settle()
    ((method, epoch, worker, cause),) = bench.told
    assert (method, epoch, worker) == ("worker_ended", 1, WORKER)
    assert "no process could be started for Shard" in cause
    assert str(error) in cause


async def test_the_end_of_a_node() -> None:
    bench = Bench()
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    await bench.member.end(1, 0.0, False)
    await bench.member.start_worker(1, OTHER, "Shard", {}, DRIVER, False)
    async with asyncio.timeout(20):
        await bench.member.finished
    assert ("worker_ended", 1, WORKER, "the node was shut down") in bench.told
    assert ("worker_ended", 1, OTHER, "its node is shutting down") in bench.told
    assert not bench.pool.by_process


async def test_without_its_head_a_node_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def gone(*_: Any) -> None:
        raise ConnectionLost("the head is gone")

    bench = Bench(gone)
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    bench.lose(OTHER)  # the peer is not the head
    await bench.process.settle()
    assert not bench.member.finished.done()
    bench.process.sessions.used[HEAD] = FakeSession(HEAD)
    bench.lose(HEAD)  # the head has another connection
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
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    await bench.member.end(1, 0.0, False)
    async with asyncio.timeout(20):
        await bench.member.finished


async def test_a_worker_that_cannot_be_reached_is_killed() -> None:
    bench = Bench()
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    bench.process.tasks.closing = True
    bench.lose(WORKER)  # the agent itself is ending: every session is lost
    assert WORKER in bench.pool.by_process
    bench.process.tasks.closing = False
    bench.lose(WORKER)
    assert not bench.pool.by_process


async def test_a_node_without_its_zygote_ends() -> None:
    bench = Bench()
    bench.member.zygote_lost()
    async with asyncio.timeout(20):
        await bench.member.finished


class Asking(FakeSession):
    """The session of a worker, with leases."""

    def __init__(self, peer: bytes) -> None:
        super().__init__(peer)
        self.lock = threading.Lock()
        self.leases = LeaseTable()


async def test_what_workers_ask_the_head() -> None:
    async def answer(_: bytes, method: str, *args: Any) -> Any:
        return method.upper()

    bench, session = Bench(answer), FakeSession(WORKER)

    async def relay(method: Any, *args: Any) -> Any:
        return await asked_by(session, bench.member.relay(method_number(method), [*args]))

    assert await relay(HeadService.locate, b"a" * 16, False) == "LOCATE"
    assert await relay(MembershipService.find, OTHER) == "FIND"
    assert await relay(HeadService.reserve, {}, "Shard", b"", None, b"") == "RESERVE"
    assert await relay(HeadService.waits, "Shard", OTHER) == "WAITS"
    assert bench.told == [
        ("locate", b"a" * 16, False), ("find", OTHER), ("reserve", {}, "Shard", b"", None, WORKER),
        ("waits", "Shard", WORKER),
    ]  # fmt: skip
    for method in (
        MembershipService.leave_node,
        HeadService.shutdown,
        MembershipService.join_driver,
        WorkerService.stop,
    ):
        with pytest.raises(ValueError, match=f"a worker cannot ask the head for method number {method_number(method)}"):
            await relay(method)
    assert len(bench.told) == 4


async def test_workers_of_a_node_share_its_lease_on_an_actor() -> None:
    released: list[int] = []
    known = {7: 2, 8: 1}

    async def hold(object_id: int) -> Any:
        asked.append(object_id)
        await asyncio.sleep(0)
        return partial(released.append, object_id) if object_id in known else None

    async def lost(object_id: int) -> Any:
        raise ConnectionLost("the head is gone")

    asked: list[int] = []
    bench, first, second = Bench(), Asking(WORKER), Asking(OTHER)
    bench.process.hold_actor = hold  # type: ignore[attr-defined]
    both = await asyncio.gather(*(asked_by(session, bench.member.hold_actor(7)) for session in (first, second)))
    assert both[0] == both[1] != 7
    assert (asked, released) == ([7, 7], [7]), "they asked at the same time, and one lease is enough"
    assert await asked_by(first, bench.member.hold_actor(7)) == both[0]
    assert await asked_by(first, bench.member.hold_actor(9)) == 0, "there is no such actor"
    assert asked == [7, 7, 9]
    first.leases.release(both[0], 2)
    assert released == [7]
    second.leases.release(both[0], 1)
    assert released == [7, 7]
    assert await asked_by(first, bench.member.hold_actor(7)) != both[0], "it is leased anew"
    await bench.process.settle()
    first.leases.end()
    assert released == [7, 7, 7]
    bench.process.hold_actor = lost  # type: ignore[attr-defined]
    assert await asked_by(first, bench.member.hold_actor(7)) == 0


async def test_a_lease_that_comes_after_its_workers_end_is_given_back() -> None:
    released: list[int] = []
    answered = asyncio.Event()

    async def hold(object_id: int) -> Any:
        await answered.wait()
        return partial(released.append, object_id)

    bench, session = Bench(), Asking(WORKER)
    bench.process.hold_actor = hold  # type: ignore[attr-defined]
    asking = asyncio.ensure_future(asked_by(session, bench.member.hold_actor(7)))
    await bench.process.settle()
    asking.cancel()
    await asyncio.wait([asking])
    answered.set()
    await bench.process.settle()
    gc.collect()
    assert (released, session.leases.total) == ([7], 0)


async def test_workers_are_told_what_has_become_of_an_actor() -> None:
    async def gone(*_: Any) -> None:
        raise ConnectionLost("it has ended")

    bench = Bench(gone)
    for worker in (WORKER, OTHER, b"n" * 16):
        await bench.member.start_worker(1, ProcessId(worker), "Shard", {}, DRIVER, False)
    bench.process.sessions.used |= {worker: FakeSession(worker) for worker in (WORKER, OTHER)}
    bench.process.sessions.used[OTHER].closed = ConnectionLost("cut")
    change = (b"a" * 16, "restarting", b"p" * 16, 2, "its node was lost", 1)
    bench.member.actor_changed(*change)
    await bench.process.settle()
    assert bench.process.asked == [(WORKER, "actor_changed", *change)]


async def test_orders_of_an_earlier_head_are_refused() -> None:
    bench = Bench()
    await bench.member.start_worker(7, WORKER, "Shard", {}, DRIVER, False)
    for order in (
        bench.member.start_worker(6, OTHER, "Shard", {}, DRIVER, False), bench.member.kill_worker(6, WORKER, "no"),
        bench.member.end(6, 0.0, False), bench.member.run_over(6, 0, ""),
    ):  # fmt: skip
        with pytest.raises(Deposed) as caught:
            await order
        assert (caught.value.epoch, caught.value.known) == (6, 7)
    assert list(bench.pool.by_process) == [WORKER] and not bench.member.finished.done()
    await bench.member.kill_worker(8, WORKER, "yes")
    assert not bench.pool.by_process
    with pytest.raises(Deposed, match="epoch 7 is over: the log is at epoch 8"):
        await bench.member.start_worker(7, WORKER, "Shard", {}, DRIVER, False)


async def test_a_report_is_made_again_where_the_head_is_a_later_one() -> None:
    async def answer(_: bytes, method: str, epoch: int, *args: Any) -> None:
        if epoch < 5:
            raise Deposed(epoch, 5)

    bench = Bench(answer)
    await bench.member.start_worker(3, WORKER, "Shard", {}, DRIVER, False)
    await bench.member.worker_ready(WORKER, 7, "w@host:1")
    assert bench.told == [("worker_started", 3, WORKER, 7, "w@host:1"), ("worker_started", 5, WORKER, 7, "w@host:1")]
    with pytest.raises(Deposed):
        await bench.member.kill_worker(4, WORKER, None)


async def test_reports_at_the_same_time_all_arrive() -> None:
    """The first refusal tells all of them which head there is, and that may be followed by another one."""
    together = asyncio.Barrier(2)

    async def answer(_: bytes, method: str, epoch: int, *args: Any) -> None:
        if method != "worker_ended":
            return
        if epoch == 3:
            await together.wait()
            raise Deposed(epoch, 5)
        if epoch == 5:
            raise Deposed(epoch, 6)

    bench = Bench(answer)
    for worker in (WORKER, OTHER):
        await bench.member.start_worker(3, worker, "Shard", {}, DRIVER, False)
        await bench.member.kill_worker(3, worker, "for a reason")
    await bench.process.settle()
    assert sorted(what for what in bench.told if what[1] == 6) == [
        ("worker_ended", 6, worker, "for a reason") for worker in (OTHER, WORKER)
    ]


async def test_a_report_to_an_earlier_head_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: bytes, method: str, epoch: int, *args: Any) -> None:
        raise Deposed(2, epoch)

    bench = Bench(answer)
    await bench.member.start_worker(3, WORKER, "Shard", {}, DRIVER, False)
    with pytest.raises(Deposed):
        await bench.member.worker_ready(WORKER, 7, "w@host:1")
    assert len(bench.told) == 1


# ---------------------------------------------------------------- a head that is away


class Away(Bench):
    """A node whose head has a log, and is away until it is back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(self._told)
        monkeypatch.setattr(head_outage, "_FIRST_PAUSE", 0.0)
        self.patience = 20.0
        self.returning: Any = ConnectionLost("refused")
        self.tried = asyncio.Event()

    async def _told(self, peer: bytes, method: str, *args: Any) -> Any:
        if method == "join_node":
            return self.patience, "/state/log.db"
        if method == "return_node":
            self.tried.set()
            if isinstance(self.returning, Exception):
                raise self.returning
            self.process.sessions.used[HEAD] = FakeSession(HEAD)
            return self.returning
        return 9 if method == "lease" else None

    async def join_and_lose(self) -> None:
        await self.member.join({"host": "n"}, {"CPU": 1.0})
        await self.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
        await self.member.worker_ready(WORKER, 7, "w@host:1")  # before the zygote
        await self.member.start_worker(1, OTHER, "Late", {}, DRIVER, True)
        self.pool.by_process[OTHER].pid = 8
        self.lose(HEAD)


async def test_a_node_returns_to_a_head_that_is_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Away(monkeypatch)
    released: list[int] = []
    kept, gone = (node_agent._ActorHold(own, partial(released.append, own)) for own in (1, 2))
    bench.member._holds.update({51: kept, 52: gone})
    monkeypatch.setattr(FakeSession, "release", lambda _, each: released.append(100 + each), raising=False)
    await bench.join_and_lose()
    seeking = bench.member._seeking
    assert bench.process.outage.going_on, "from this moment on, requests wait"
    async with asyncio.timeout(20):
        await bench.tried.wait()
        bench.returning = [51]
        assert seeking is not None
        await bench.process.outage.end()
        await seeking
    workers = [(WORKER, 7, "w@host:1", "Shard", DRIVER, False), (OTHER, 0, "", "Late", DRIVER, True)]
    assert bench.told[-1] == ("return_node", {"host": "n"}, {"CPU": 1.0}, workers, [51, 52])
    assert WORKER in bench.pool.by_process
    assert not bench.member.finished.done()
    assert "looking for it for 20 s" in caplog.text
    assert "is back" in caplog.text
    bench.member._holds.clear()
    del kept, gone
    gc.collect()
    assert sorted(released) == [2, 151], "the lease at the new head goes back there"


@pytest.mark.parametrize("returning", [None, AuthenticationError("another token")])
async def test_a_node_that_its_head_does_not_take_back_ends(monkeypatch: pytest.MonkeyPatch, returning: Any) -> None:
    bench = Away(monkeypatch)
    bench.returning = returning
    await bench.join_and_lose()
    async with asyncio.timeout(20):
        await bench.member.finished
    assert not bench.pool.by_process


async def test_patience_begins_with_the_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that no packet comes through ends after five seconds, in which the head may have lost the node."""
    bench = Away(monkeypatch)
    session = FakeSession(HEAD)
    session.closed = ConnectionLost("silent")
    session.closed.__cause__ = TimeoutError(110, "timed out")
    bench.patience = silence_before(session.closed)
    await bench.member.join({"host": "n"}, {"CPU": 1.0})
    bench.member.session_lost(session)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await bench.member.finished
    assert not bench.tried.is_set()


async def test_patience_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    bench = Away(monkeypatch)
    bench.patience = 0.01
    await bench.join_and_lose()
    async with asyncio.timeout(20):
        await bench.member.finished
    assert "has not come back in 0.01 s; this node ends" in caplog.text


async def test_a_node_that_is_ending_does_not_look_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Away(monkeypatch)
    await bench.member.join({"host": "n"}, {"CPU": 1.0})
    await bench.member.end(1, 0.0, False)
    bench.lose(HEAD)
    assert bench.member._seeking is None
    async with asyncio.timeout(20):
        await bench.member.finished


@pytest.mark.parametrize("epoch", [1, 2])
async def test_a_node_goes_on_as_long_as_its_head_says(
    epoch: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(node_agent, "boot_clock", lambda: now[0])
    monkeypatch.setattr(node_agent, "_LOOK", 0.0)
    bench = Bench()
    bench.process.outage.joined(6.0, "etcd://host:1")
    await bench.member.serves(2)
    bench.member._heard(2, 100.0, 0.0)
    now[0] = 105.9
    bench.member._heard(epoch, 104.0, 1.0)  # which prolongs it where it is the word of the head that is served
    now[0] = 108.9 if epoch == 2 else 105.9
    for _ in range(10):
        await asyncio.sleep(0)
    assert not bench.member.finished.done()
    now[0] = 109.0 if epoch == 2 else 106.0
    async with asyncio.timeout(60.0):
        await bench.member.finished
    assert "no head has said in time" in caplog.text


async def test_a_node_that_leaves_has_its_actors_move_before() -> None:
    moving, moved = asyncio.Event(), asyncio.Event()

    async def answer(_: bytes, method: str, *args: Any) -> Any:
        if method == "drain":
            moving.set()
            await moved.wait()
            return {"left": ["Shard: it has max_restarts=0"]}
        return 0.0, ""

    bench = Bench(answer)
    await bench.member.join({}, {})
    leaving = asyncio.create_task(bench.member.leave(5.0))
    await moving.wait()
    assert bench.told[1:] == [("drain", HEAD.hex(), 5.0, False)]
    assert not bench.member.finished.done()
    moved.set()
    async with asyncio.timeout(20):
        await leaving
        await bench.member.finished


@pytest.mark.parametrize("error", [InsufficientResources("no room"), ValueError("it is the last node")])
async def test_a_node_whose_actors_cannot_move_ends(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: bytes, method: str, *args: Any) -> Any:
        if method == "drain":
            raise error
        return 0.0, ""

    bench = Bench(answer)
    await bench.member.join({}, {})
    async with asyncio.timeout(20):
        await bench.member.leave(5.0)
        await bench.member.finished
    assert f"the actors of this node stay until it ends: {error}" in caplog.text


@pytest.mark.parametrize("away", [True, False])
async def test_a_node_without_a_head_leaves_at_once(away: bool) -> None:
    bench = Bench()
    if away:
        bench.process._answer = _joined
        await bench.member.join({}, {})
        bench.process.outage.begin()
    async with asyncio.timeout(20):
        await bench.member.leave(5.0)
        await bench.member.finished
    assert "drain" not in [method for method, *_ in bench.told]


async def _joined(*_: Any) -> tuple[float, str]:
    return 0.0, ""


async def test_a_node_that_is_told_to_leave_twice_ends_at_once() -> None:
    moving = asyncio.Event()

    async def answer(_: bytes, method: str, *args: Any) -> Any:
        if method == "drain":
            moving.set()
            await asyncio.Event().wait()
        return 0.0, ""

    bench = Bench(answer)
    await bench.member.join({}, {})
    await bench.member.start_worker(1, WORKER, "Shard", {}, DRIVER, False)
    leaving = asyncio.create_task(bench.member.leave(1000.0))
    await moving.wait()
    await bench.member.leave(1000.0)
    async with asyncio.timeout(20):
        await bench.member.finished
    assert not bench.pool.by_process
    leaving.cancel()


async def test_a_head_that_does_not_answer_in_time_keeps_no_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: bytes, method: str, *args: Any) -> Any:
        if method == "drain":
            await asyncio.Event().wait()
        return 0.0, ""

    monkeypatch.setattr(node_agent, "_LAST_MOVES", 0.0)
    bench = Bench(answer)
    await bench.member.join({}, {})
    async with asyncio.timeout(20):
        await bench.member.leave(0.0)
        await bench.member.finished
    assert "stay until it ends: the head does not answer" in caplog.text


async def test_recipes_are_held_at_the_word_of_the_latest_head() -> None:
    bench = Bench()
    recipe = Packed(b"class and arguments", [], 0)
    assert await bench.member.hold_recipe(2, 7, recipe)
    assert await bench.member.hold_recipe(2, 8, recipe)
    for order in (bench.member.drop_recipe(1, 7), bench.member.keep_recipes(1, []), bench.member.recipe(1, 7)):
        with pytest.raises(Deposed):
            await order
    assert await bench.member.recipe(2, 7) is recipe
    await bench.member.drop_recipe(2, 7)
    assert await bench.member.recipe(2, 7) is None
    await bench.member.keep_recipes(3, [7])
    assert await bench.member.recipe(3, 8) is None


async def test_a_recipe_whose_array_did_not_arrive_is_not_held() -> None:
    bench = Bench()
    lost = Part(RegionKind.ARRAY, LostPart("its owner has ended"), 0, 8)
    with pytest.raises(ObjectLost, match="its owner has ended"):
        await bench.member.hold_recipe(1, 7, Packed(b"", [lost], 0))
    assert await bench.member.recipe(1, 7) is None


async def test_a_node_that_returns_leases_the_actors_in_its_recipes_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: bytes, method: str, *args: Any) -> Any:
        return [21] if method == "return_node" else (0.0, "")

    released, anew = list[int](), list[int]()
    monkeypatch.setattr(FakeSession, "release", lambda _, object_id: anew.append(object_id), raising=False)
    bench = Bench(answer)
    await bench.member.join({}, {})
    bench.process.news.known.check(1)
    kept, gone = (ActorHold(HEAD, number, released.append) for number in (21, 22))
    parts = [Part(RegionKind.ACTOR, hold, 0, 0) for hold in (kept, gone)]
    await bench.member.hold_recipe(1, 7, Packed(b"", parts, 0))
    assert await bench.member._return()
    assert bench.told[-1][-1] == [21, 22]
    assert (released, anew) == ([], [])
    await bench.member.drop_recipe(1, 7)
    del kept, gone, parts
    gc.collect()
    assert (released, anew) == ([22], [21]), "the lease of before has ended with the head"
