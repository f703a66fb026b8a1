"""Membership of a cluster, at a stand-in for the head that records the calls to its actors."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import DRIVER, HEAD, FakePool, FakeProcess, FakeSession
from tests.control.gated_log import NAME, GatedLog
from zcactor.control import membership
from zcactor.control.failover import Decisions, Failover
from zcactor.control.head_log import Candidate, Change
from zcactor.control.membership import Membership
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_table import NodeRecord, NodeTable, facts_of
from zcactor.control.recipes import Recipes
from zcactor.control.recorder import HeadRecorder
from zcactor.errors import AuthenticationError, ConnectionLost, HeadUnavailable
from zcactor.ids import ProcessId
from zcactor.options import ActorSpec
from zcactor.process.epochs import Deposed
from zcactor.rpc.services import current_call
from zcactor.workers.worker_table import WorkerRecord

SPEC = ActorSpec("default")
NODE, WORKER = ProcessId(b"n" * 16), ProcessId(b"w" * 16)
FACTS = facts_of("n@host:1", ("local", "tcp"), "machine n")


class Head:
    """A stand-in for the `Head`, with the membership."""

    def __init__(self, answer: Any = None, hang_after: float = 20.0, log: MemoryLog | None = None) -> None:
        self.process = FakeProcess(answer)
        self.driver = b""
        self.closing = False
        self.log = log or MemoryLog()
        self.recorder = HeadRecorder(self.process.loop, self.log, Candidate("h@host:1", "h", 1))
        self.done: list[tuple[Any, ...]] = []
        self.stopping: list[asyncio.Task[None]] = []
        own = NodeRecord(HEAD, FakePool(), facts_of("h@host:1", ("local",), "machine h"))
        self.nodes = NodeTable(own, {"CPU": 1})
        self.recipes = Recipes(self.process, self.recorder, self.nodes)  # type: ignore[arg-type]
        self.members = Membership(self, self.nodes, self, 0.01, hang_after)  # type: ignore[arg-type]

    async def worker_ready(self, *args: Any) -> None:
        self.done.append(("ready", *args))

    def worker_ended(self, record: WorkerRecord) -> None:
        self.done.append(("ended", record.process, record.ended.result()))

    def show(self, *args: Any) -> None:
        self.done.append(("show", *args))

    async def show_all(self, *args: Any) -> None:
        self.done.append(("show all", *args))

    def stop_owned(self, driver: bytes, _grace: float) -> list[asyncio.Task[None]]:
        self.done.append(("stop", driver))
        return self.stopping

    def end_owned(self, driver: bytes) -> None:
        self.done.append(("end", driver))

    async def by(self, session: FakeSession, call: Coroutine[Any, Any, Any]) -> Any:
        """Run `call` as a call of the peer of `session`."""
        token = current_call.set(SimpleNamespace(session=session))
        try:
            return await call
        finally:
            current_call.reset(token)

    async def join(self) -> tuple[FakeSession, NodeRecord]:
        """Let a node join."""
        session = FakeSession(NODE)
        await self.by(session, self.members.join_node(FACTS, {"CPU": 2}))
        return session, self.nodes.by_id[NODE.hex()]

    async def end(self) -> None:
        """Cancel the tasks that the test leaves running."""
        for task in self.process.begun:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_a_node_whose_last_connection_is_a_later_one() -> None:
    """A node that has lost the head, which has not noticed, says goodbye by another connection."""
    head = Head()
    _, node = await head.join()
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    later = FakeSession(NODE)
    later.closed = ConnectionLost("the process closed the connection")
    head.members.session_lost(later)  # type: ignore[arg-type]
    assert record.ended.done()
    assert NODE.hex() not in head.nodes.by_id
    await head.end()


async def test_a_node_that_joins_and_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    head = Head()
    session, node = await head.join()
    assert head.nodes.ledger.total() == {"CPU": 3}
    assert await head.members.find(NODE) == "n@host:1"
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    await head.process.settle()
    assert (NODE, "start_worker", 1, record.process, "Shard", {}, DRIVER, False) in head.process.asked
    await head.by(session, head.members.worker_started(1, record.process, 7, "w@host:2"))
    await head.by(session, head.members.worker_said(1, DRIVER, "stdout", "one\ntwo\n"))
    assert head.done == [("ready", record.process, 7, "w@host:2"), ("show", DRIVER, "stdout", "", ["one", "two"])]
    other = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    await head.by(session, head.members.worker_ended(1, other.process, "killed by signal 9"))
    assert head.done[2:] == [("ended", other.process, "killed by signal 9")]
    session.closed = ConnectionLost("cut")
    head.members.session_lost(session)  # type: ignore[arg-type]
    ((_, process, cause),) = head.done[3:]
    assert process == record.process
    assert f"its node {node.id[:8]} (" in cause and "was lost: the connection to it ended (cut" in cause
    assert list(head.nodes.by_id) == [HEAD.hex()]
    assert "is lost" in caplog.text
    head.members.session_lost(session)  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost, match="not known"):
        await head.members.find(NODE)
    await head.end()


@pytest.mark.parametrize("how", ["leaves", "stays", "the cluster ends"])
async def test_a_node_that_accepts_no_connection(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if how != "leaves":
        monkeypatch.setattr("zcactor.control.membership._LEAVING", 0.01)
    head, asked = Head(), []

    async def identify(place: str) -> None:
        asked.append(place)
        raise ConnectionLost("the peer closed the connection during the handshake")

    head.members.identify = identify
    session, _ = await head.join()
    (task,) = [task for task in head.process.begun if "_connect_back" in repr(task)]
    await head.process.settle()
    head.closing = how == "the cluster ends"
    if how == "leaves":
        await head.by(session, head.members.leave_node(1))
    await task
    assert asked == ["host:1"]
    assert ("cannot be reached from the head's host: the peer closed" in caplog.text) == (how == "stays")
    await head.end()


async def test_how_long_a_node_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    session, node = await head.join()
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    await head.process.settle()
    await head.by(session, head.members.worker_started(1, record.process, 7, "w@host:2"))
    head.nodes.addresses[record.process] = "w@host:2"
    now = head.process.loop.time()
    node.heard = now - 100.0
    for process, address in ((NODE, "n@host:1"), (record.process, "w@host:2")):
        silence, told = await head.members.silence(ProcessId(process))
        assert told == address
        assert 100.0 <= silence < 200.0
    assert (await head.members.silence(HEAD))[0] == 0.0
    assert (await head.members.silence(ProcessId(b"?" * 16))) == (-1.0, "")
    head.members._fenced[node] = None
    assert (await head.members.silence(record.process)) == (-1.0, "w@host:2")
    await head.end()


async def test_actors_of_a_node_that_may_still_run_are_not_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    over = asyncio.Event()

    async def sleep(seconds: float) -> None:
        if seconds < 1:  # the sleep between two pings
            await asyncio.Event().wait()
        waited.append(seconds)
        await over.wait()

    head = Head()
    session, node = await head.join()
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    monkeypatch.setattr(membership, "asyncio", SimpleNamespace(sleep=sleep, timeout=asyncio.timeout))
    session.closed = ConnectionLost("broke: Connection timed out")
    session.closed.__cause__ = TimeoutError(110, "Connection timed out")
    head.members.session_lost(session)  # type: ignore[arg-type]
    head.members.session_lost(session)  # type: ignore[arg-type]
    await head.process.settle()
    assert waited == [membership.FENCE]
    assert NODE.hex() not in head.nodes.by_id, "nothing is placed on it"
    assert head.done == []
    over.set()
    await head.process.settle()
    ((_, process, cause),) = head.done
    assert (process, "Connection timed out" in cause) == (record.process, True)
    await head.end()


async def test_a_node_that_hangs_is_given_up_later_than_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    head = Head(silent, hang_after=0.01)
    session, node = await head.join()
    closed = session.aclose

    async def aclose() -> None:
        await closed()
        head.members.session_lost(session)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "aclose", aclose)
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    async with asyncio.timeout(20):
        while session.closed is None:
            await asyncio.sleep(0)
    await head.process.settle()
    assert NODE.hex() not in head.nodes.by_id
    assert not record.ended.done(), "its actors may still run"
    await head.end()


async def test_a_node_that_does_not_respond_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "FENCE", 0.0)

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    head = Head(silent, hang_after=0.05)
    session, _ = await head.join()
    async with asyncio.timeout(20):
        while NODE.hex() in head.nodes.by_id:
            await asyncio.sleep(0)
        while session.closed is None:
            await asyncio.sleep(0)
    await head.end()


async def test_only_nodes_may_tell_of_workers() -> None:
    head = Head()
    for call in (head.members.worker_ended(0, WORKER, "x"), head.members.worker_ended(0, WORKER, "y")):
        with pytest.raises(AuthenticationError, match="the agent of no node"):
            await head.by(FakeSession(NODE), call)
    await head.end()


async def test_an_embedded_node_takes_nobody() -> None:
    head = Head()
    head.driver = DRIVER
    with pytest.raises(ConnectionLost, match="embedded in a program"):
        await head.join()
    head.driver, head.closing = b"", True
    with pytest.raises(ConnectionLost, match="shutting down"):
        await head.by(FakeSession(DRIVER), head.members.join_driver("d@host:3", "machine d"))


async def test_a_program_that_joins_and_leaves() -> None:
    head = Head()
    session = FakeSession(DRIVER)
    await head.by(session, head.members.join_driver("d@host:3", "machine d"))
    assert await head.members.find(DRIVER) == "d@host:3"
    assert head.nodes.drivers[DRIVER].machine == "machine d"
    await head.by(session, head.members.leave_driver(0.01))
    assert head.done == [("stop", DRIVER), ("end", DRIVER), ("show all",)]
    head.members.session_lost(session)  # type: ignore[arg-type]
    assert head.done[3:] == [("end", DRIVER)]
    assert not head.nodes.drivers
    with pytest.raises(ConnectionLost):
        await head.members.find(DRIVER)


async def test_programs_are_asked_to_connect_to_who_cannot_reach_them() -> None:
    asked = []

    async def answer(*what: Any) -> bool:
        asked.append(what)
        return True

    head = Head(answer)
    session = FakeSession(DRIVER)
    assert not await head.members.call_back(DRIVER, WORKER), "it has not joined"
    await head.by(session, head.members.join_driver("d@host:3", "machine d"))
    assert not await head.members.call_back(DRIVER, WORKER), "it has no connection"
    head.process.sessions.used[DRIVER] = session
    assert await head.members.call_back(DRIVER, WORKER)
    assert asked == [(DRIVER, "connect_to", WORKER)]
    head.process.sessions.used[NODE] = FakeSession(NODE)
    assert not await head.members.call_back(NODE, WORKER), "it is no program"
    assert len(asked) == 1


async def test_leaving_waits_for_what_is_being_stopped() -> None:
    head = Head()
    stopped = asyncio.Event()

    async def stop() -> None:
        await stopped.wait()

    head.stopping = [asyncio.ensure_future(stop())]
    leaving = asyncio.ensure_future(head.by(FakeSession(DRIVER), head.members.leave_driver(20)))
    await head.process.settle()
    assert head.done == [("stop", DRIVER)]
    stopped.set()
    async with asyncio.timeout(20):
        await leaving
    assert head.done[1:] == [("end", DRIVER), ("show all",)]


async def test_the_end_waits_for_the_other_nodes(caplog: pytest.LogCaptureFixture) -> None:
    head = Head()
    await head.members.end(0.0)
    session, _ = await head.join()
    head.closing = True
    ending = asyncio.ensure_future(head.members.end(20.0))
    await head.process.settle()
    assert (NODE, "end", 1, 20.0, False) in head.process.asked
    assert not ending.done()
    head.members.session_lost(session)  # type: ignore[arg-type]
    async with asyncio.timeout(20):
        await ending
    assert "is lost" not in caplog.text
    await head.end()


async def test_a_report_with_another_epoch_is_refused() -> None:
    head = Head()
    session, _ = await head.join()
    with pytest.raises(Deposed) as caught:
        await head.by(session, head.members.worker_ended(0, WORKER, "x"))
    assert (caught.value.epoch, caught.value.known) == (0, 1)
    is_deposed = head.recorder.is_deposed
    assert not is_deposed, "the node does not know this head yet"
    with pytest.raises(Deposed) as caught:
        await head.by(session, head.members.leave_node(2))
    assert (caught.value.epoch, caught.value.known) == (1, 2)
    assert NODE.hex() in head.nodes.by_id and head.recorder.is_deposed
    with pytest.raises(Deposed):
        await head.join()
    await head.end()


async def test_a_head_that_is_deposed_gives_no_order(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: bytes, method: str, *args: Any) -> None:
        if method == "start_worker":
            raise Deposed(args[0], 9)

    head = Head(answer)
    _, node = await head.join()
    for _ in range(2):
        head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
        await head.process.settle()
    assert [what[1] for what in head.process.asked].count("start_worker") == 1
    assert "this head decides no more: the term with epoch 1 is over: the log is at epoch 9" in caplog.text
    await head.end()


# ---------------------------------------------------------------- returns to a head that was started again


async def returning(monkeypatch: pytest.MonkeyPatch, members: tuple[ProcessId, ...] = (NODE,)) -> Any:
    """A head that takes a cluster over; its grants lease actors 51 and 52."""
    head = Head()
    head.grants = SimpleNamespace(lease=lambda _, held: [each for each in held if each in (51, 52)])  # type: ignore[attr-defined]
    head.members.patience, head.members.log = 6.0, "/state/log.db"
    nothing: Any = lambda *_: None  # noqa: E731
    decisions = Decisions(*[nothing] * 9)
    head.members.taking_over = Failover(
        head.process.loop, decisions, head.nodes, {}, dict.fromkeys(members, FACTS), [DRIVER]
    )
    return head


async def test_a_node_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    head = await returning(monkeypatch)
    session = FakeSession(NODE)
    workers = [[WORKER, 7, "w@host:2", "Shard", DRIVER, False]]
    finding = asyncio.create_task(head.members.find(WORKER))
    assert await head.members.silence(WORKER) == (0.0, ""), "nobody gives it up meanwhile"
    assert not finding.done()
    assert await head.by(session, head.members.return_node(FACTS, {"CPU": 2}, workers, [51, 53])) == [51]
    assert head.nodes.worker(WORKER) is not None
    assert await head.by(session, head.members.return_node(FACTS, {"CPU": 2}, workers, [])) is None, "once"
    assert await head.by(FakeSession(DRIVER), head.members.return_driver("d@host:3", "m", [52])) == [52]
    assert DRIVER in head.nodes.drivers
    async with asyncio.timeout(20):
        await head.members.taking_over.finish(20.0)
        await head.members.taken_over()
        assert await finding == "w@host:2"
    assert await head.members.silence(ProcessId(b"?" * 16)) == (-1.0, "")
    await head.end()


async def test_a_program_returns_while_the_log_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has it already."""
    head = await returning(monkeypatch)

    async def silent(*_: object) -> None:
        await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as patch:
        patch.setattr(head.log, "record", silent)
        async with asyncio.timeout(20):
            assert await head.by(FakeSession(DRIVER), head.members.return_driver("d@host:3", "m", [52])) == [52]
    assert DRIVER in head.nodes.drivers
    await head.end()


@pytest.mark.parametrize("refused", [True, False])
async def test_a_program_joins_while_the_log_is_silent(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """The program may look at the cluster, and is recorded before all that it asks for."""
    log = GatedLog()
    head = Head(log=log)
    log.refuses, log.holds = (lambda _: refused), (lambda _: not refused)
    monkeypatch.setattr(membership, "_JOINING", 0.01)
    async with asyncio.timeout(20):
        await head.by(FakeSession(DRIVER), head.members.join_driver("d@host:3", "m"))
    assert DRIVER in head.nodes.drivers
    assert log.begun and not log.taken
    log.refuses = lambda _: False
    log.gate.set()
    async with asyncio.timeout(20):
        await head.recorder.record(Change("name", "shop", b"1"))
    assert DRIVER.hex() in log.entries.drivers and log.taken[0][0].kind == "driver"
    await head.end()


async def test_a_node_to_which_the_log_does_not_answer_is_refused() -> None:
    """The log may take it later, and then that it is gone."""
    log = GatedLog()
    head = Head(log=log)
    log.holds = lambda _: True
    head.process.config = dataclasses.replace(head.process.config, head_timeout=0.01)
    head.members.log = NAME
    async with asyncio.timeout(20):
        with pytest.raises(HeadUnavailable, match="has not answered for 0.0 s; nothing was done so far"):
            await head.by(FakeSession(NODE), head.members.join_node(FACTS, {"CPU": 2}))
        assert not head.members._remote
        log.gate.set()
        await head.recorder.settled()
    assert [[change.value is None for change in batch] for batch in log.taken] == [[False], [True]]
    assert not log.entries.members
    await head.end()


async def test_a_node_that_this_head_does_not_know_is_not_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    head = await returning(monkeypatch, members=())
    assert await head.by(FakeSession(NODE), head.members.return_node(FACTS, {"CPU": 2}, [], [])) is None
    head.members.taking_over = None
    assert await head.by(FakeSession(NODE), head.members.return_node(FACTS, {"CPU": 2}, [], [])) is None
    assert await head.by(FakeSession(DRIVER), head.members.return_driver("d@host:3", "m", [51])) == [51]
    await head.members.taken_over()
    await head.end()


async def test_joining_tells_how_long_nodes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head()
    assert await head.by(FakeSession(NODE), head.members.join_node(FACTS, {"CPU": 2})) == (0.0, "")
    assert head.members.fence == membership.FENCE
    head.members.patience, head.members.log = 30.0, "/state/log.db"
    assert head.members.fence == 32.0
    assert await head.by(FakeSession(DRIVER), head.members.join_driver("d@host:3", "m")) == (30.0, "/state/log.db")
    await head.end()


@pytest.mark.parametrize("cause", [ConnectionRefusedError(111, "refused"), TimeoutError(), None])
async def test_a_patient_node_that_has_closed_its_connection(
    monkeypatch: pytest.MonkeyPatch, cause: Exception | None
) -> None:
    """A node whose process lives may be looking for this head."""
    head = Head()
    head.members.patience = 6.0
    reached = FakeSession(NODE)

    async def connect(_: bytes) -> FakeSession:
        if cause is None:
            return reached
        raise ConnectionLost("it cannot be reached") from cause

    head.process.connections = SimpleNamespace(connect=connect)  # type: ignore[attr-defined]
    monkeypatch.setattr(membership, "FENCE", 0.0)
    monkeypatch.setattr(membership, "_BEYOND", -6.0)
    session, node = await head.join()
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    session.closed = ConnectionLost("reset")
    session.closed.__cause__ = ConnectionResetError(104, "reset")
    head.members.session_lost(session)  # type: ignore[arg-type]
    assert not record.ended.done()
    async with asyncio.timeout(20):
        assert "was lost: the connection to it ended (reset" in await record.ended
    assert ((NODE, "end", 1, 0.0, False) in head.process.asked) == (cause is None), "it ends at this head's word"
    await head.end()


@pytest.mark.parametrize("left", ["a worker", ""])
async def test_a_patient_node_that_has_left_in_order(monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """The head waits for the fence only where a worker of the node may live on."""
    head = Head()
    head.members.patience = 6.0
    reached = FakeSession(NODE)

    async def connect(_: bytes) -> FakeSession:
        return reached

    head.process.connections = SimpleNamespace(connect=connect)  # type: ignore[attr-defined]
    monkeypatch.setattr(membership, "FENCE", 0.0)
    monkeypatch.setattr(membership, "_BEYOND", -6.0)
    session, node = await head.join()
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    await head.by(session, head.members.leave_node(head.recorder.epoch))
    if not left:
        await head.by(session, head.members.worker_ended(head.recorder.epoch, record.process, "it ended"))
    session.closed = ConnectionLost("the process closed the connection")
    head.members.session_lost(session)  # type: ignore[arg-type]
    assert node.gone.is_set() == (not left)
    async with asyncio.timeout(20):
        await node.gone.wait()
        await record.ended
    assert ((NODE, "end", 1, 0.0, False) in head.process.asked) == bool(left), (
        "a node that lives ends at this head's word"
    )
    await head.end()


async def test_a_head_that_others_can_follow_asks_whether_nodes_serve_it() -> None:
    head = Head()
    noted: list[tuple[Any, ...]] = []
    lasts = asyncio.Event()

    async def until_it_lasts() -> bool:
        await lasts.wait()
        return True

    leader_lease: Any = SimpleNamespace(
        joining=lambda node: noted.append(("joining", node)), joined=lambda node: noted.append(("joined", node)),
        left=lambda node: noted.append(("left", node)), serves=lambda node, at: noted.append(("serves", node, at)),
        now=lambda: 7.0, lasts=until_it_lasts,
    )  # fmt: skip
    head.members.leader_lease = leader_lease
    told: list[None] = []
    head.members.tell_heads = lambda: told.append(None)
    _, node = await head.join()
    assert noted == [("joining", node.id), ("joined", node.id)]
    assert told == [None]
    while len(noted) < 3:
        await asyncio.sleep(0.001)
    assert noted[2] == ("serves", node.id, 7.0), "nodes are asked without a term, too"
    record = head.nodes.worker_for(node, "Shard", SPEC, DRIVER)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not any(what[1] == "start_worker" for what in head.process.asked), "orders wait for a term"
    lasts.set()
    while not any(what[1] == "start_worker" for what in head.process.asked):
        await asyncio.sleep(0.001)
    record.kill()
    noted.clear()
    head.members.forget("member", node.process)
    while ("left", node.id) not in noted:
        await asyncio.sleep(0.001)
    assert ("joining", node.id) in noted
    await head.end()


async def test_the_result_of_a_drain_comes_after_the_lines_on_its_progress() -> None:
    head: Any = Head()

    async def drain(name: str, timeout: float | None, again: bool, caller: bytes) -> dict[str, Any]:
        head.show(caller, "stdout", "", [f"{name} leaves"])
        return {"node": name, "timeout": timeout, "again": again}

    head.draining = SimpleNamespace(drain=drain)
    found = await head.by(FakeSession(DRIVER), head.members.drain("n", 2.0, True))
    assert found == {"node": "n", "timeout": 2.0, "again": True}
    assert head.done == [("show", DRIVER, "stdout", "", ["n leaves"]), ("show all", DRIVER)]
    for name, timeout in ((["n"], None), ("n", "2")):
        wrong: Any = head.members.drain(name, timeout, True)
        with pytest.raises(TypeError, match=r"the name of a node must be a str|drain: timeout is '2'"):
            await head.by(FakeSession(DRIVER), wrong)
    await head.end()
