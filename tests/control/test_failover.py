"""The failover of a cluster: reports of nodes and programs against the entries of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from tests.control.agents import DRIVER, HEAD, FakePool, turns
from tests.control.test_actor_table import WIRE
from zcactor.control import failover as module
from zcactor.control.actor_record import ActorRecord
from zcactor.control.failover import Decisions, Failover, ReportedWorker
from zcactor.control.node_table import NodeRecord, NodeTable, RemotePool, facts_of
from zcactor.ids import ProcessId
from zcactor.marshal.packed import Packed
from zcactor.options import ActorSpec
from zcactor.process.cluster import NodeService

PATIENCE = 20.0
NODE, OTHER = ProcessId(b"n" * 16), ProcessId(b"o" * 16)
W1, W2, W3 = ProcessId(b"1" * 16), ProcessId(b"2" * 16), ProcessId(b"3" * 16)
FACTS = facts_of("n@host:1", ("local",), "machine n")


def of_log(number: int, node: ProcessId, worker: bytes = W1, owner: ProcessId = DRIVER, **more: Any) -> ActorRecord:
    """An actor as the log has it."""
    actor = ActorRecord(ActorSpec("default", num_cpus=1, **more), "Shop", WIRE, owner, number)
    actor.node_id, actor.location = node.hex(), (worker, 2 + number)
    actor.recipe = Packed(b"", (), 0)
    actor.set_state("restarting", "not seen yet")
    return actor


class Taking:
    """A take-over of actors with their states in the log, which notes what it decides."""

    def __init__(
        self, actors: Mapping[ActorRecord, str], members: tuple[ProcessId, ...] = (NODE,),
        drivers: tuple[ProcessId, ...] = (DRIVER,),
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.done: list[tuple[Any, ...]] = []
        self.nodes = NodeTable(NodeRecord(HEAD, FakePool(), facts_of("h@host:1", (), "machine h")), {"CPU": 4.0})
        self.orders: list[tuple[Any, ...]] = []
        decisions = Decisions(
            self._resume, self._note("lost"), self._note("restart"), self._note("stop"), self._note("retire"),
            self._note("discard others"), self._note("end owned"), self._note("unheld"), self._note("forget"),
        )  # fmt: skip
        self.taking = Failover(loop, decisions, self.nodes, actors, dict.fromkeys(members, FACTS), drivers)

    def _resume(self, actor: ActorRecord) -> None:
        actor.set_state("alive")
        self.done.append(("resume", actor))

    def _note(self, what: str) -> Any:
        return lambda *args: self.done.append((what, *args))

    def comes(self, process: ProcessId, *workers: ReportedWorker) -> NodeRecord:
        """A node returns, with these workers."""
        pool = RemotePool(asyncio.get_running_loop(), lambda *order: self.orders.append(order), lambda _: None)
        node = NodeRecord(process, pool, FACTS)
        self.nodes.add(node, {"CPU": 4.0})
        self.taking.returned(node, workers)
        return node

    async def finish(self, fence: float = PATIENCE) -> list[tuple[Any, ...]]:
        """Finish, and return what was decided meanwhile."""
        self.done.clear()
        async with asyncio.timeout(2 * PATIENCE):
            await self.taking.finish(fence)
        assert self.taking.done.is_set()
        return self.done


def worker(process: ProcessId, pid: int = 7, *, shared: bool = False) -> ReportedWorker:
    return ReportedWorker(process, pid, "w@host:2" if pid else "", "Shop", DRIVER, shared)


async def test_an_actor_goes_on_where_its_node_has_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, waiting = of_log(1, NODE), of_log(2, NODE, W2)
    waiting.state = "pending"
    made = Taking({actor: "alive", waiting: "pending"})
    assert made.taking.expects(NODE)
    assert not made.taking.expects(OTHER)
    node = made.comes(NODE, worker(W1), worker(W2, 0))
    assert not made.taking.expects(NODE), "it returns once"
    assert made.done == [("resume", actor)]
    assert actor.node is node
    assert actor.cause == ""
    assert actor.worker is not None
    assert (actor.worker.process, actor.worker.pid, actor.index) == (W1, 7, 3)
    assert actor.worker.ready.done()
    assert made.nodes.ledger.free(node.id) == {"CPU": 2.0}
    assert made.nodes.addresses[W1] == "w@host:2"
    assert waiting.worker is not None
    assert (waiting.state, waiting.worker.ready.done()) == ("pending", False)
    made.taking.driver_returned(DRIVER)
    made.nodes.drivers[DRIVER] = None  # type: ignore[assignment]
    monkeypatch.setattr(module, "_LATE", 0.0)
    assert await made.finish() == [("unheld", actor)]
    await turns()
    assert made.done == [("unheld", actor), ("unheld", waiting)], "its spawner may have given it up"
    assert (made.taking.nodes, made.taking.actors) == (1, 2)


async def test_it_waits_for_all_that_may_return() -> None:
    made = Taking({of_log(1, NODE): "alive"})
    finishing = asyncio.create_task(made.taking.finish(PATIENCE))
    await turns()
    made.comes(NODE, worker(W1))
    await turns()
    assert not finishing.done()
    made.taking.driver_returned(DRIVER)
    await turns()
    assert finishing.done()
    await finishing


async def test_it_does_not_wait_for_a_node_that_has_ended() -> None:
    actor = of_log(1, NODE)
    made = Taking({actor: "alive"}, (NODE, OTHER), ())
    made.taking.ended(NODE)
    finishing = asyncio.create_task(made.taking.finish(PATIENCE))
    await turns()
    assert not finishing.done(), "another one may return"
    assert made.taking.expects(NODE), "and so may this one until then"
    made.comes(OTHER)
    await finishing
    assert ("lost", actor, "its node did not return to the cluster's new head") in made.done


async def test_it_waits_for_a_node_that_is_about_to_join_on_its_host() -> None:
    made = Taking({}, (), ())
    made.taking.await_beside("machine h")
    finishing = asyncio.create_task(made.taking.finish(PATIENCE))
    await turns()
    for machine in ("another machine", "machine h"):
        assert not finishing.done()
        made.taking.joined(NodeRecord(NODE, FakePool(), facts_of("n@host:1", (), machine)))
        await turns()
    assert finishing.done()
    await finishing


async def test_what_has_ended_meanwhile() -> None:
    lost, starting, stopping, placed = (of_log(number, NODE) for number in range(4))
    placed.state = "pending"
    placed.set_state("pending")
    made = Taking({lost: "alive", starting: "restarting", stopping: "stopping", placed: "pending"})
    made.nodes.drivers[DRIVER] = None  # type: ignore[assignment]
    made.taking.driver_returned(DRIVER)
    node = made.comes(NODE)
    assert made.done == [], "nothing is placed before all are there"
    assert made.nodes.ledger.free(node.id) == {"CPU": 0.0}, "their places are kept until then"
    cause = "its process had ended when the cluster's head was started again"
    done = await made.finish()
    assert done[:4] == [
        ("lost", lost, cause), ("restart", starting, []), ("lost", stopping, cause),
        ("retire", placed, f"it could not be placed: {cause}"),
    ]  # fmt: skip
    assert placed.withdrawn, "the spawner may ask again"
    assert ("stop", stopping) in done


async def test_an_actor_that_was_starting_gets_another_process() -> None:
    actor = of_log(1, NODE)
    made = Taking({actor: "restarting"}, drivers=())
    made.comes(NODE, worker(W1))
    await turns()
    assert made.orders == [(NodeService.kill_worker, W1, "the cluster's log knows no actor in it")]
    assert ("restart", actor, [made.nodes.worker(W1)[1].ended]) in await made.finish()  # type: ignore[index]


async def test_an_actor_is_started_again_when_all_has_ended_that_it_may_be() -> None:
    """Its last process may have it still, which was asked to close it, and so may a next one on its node."""
    moved, beside, elsewhere = of_log(1, NODE), of_log(2, NODE), of_log(3, OTHER, W2)
    made = Taking({moved: "restarting", beside: "alive", elsewhere: "restarting"}, (NODE, OTHER), ())
    discarding = asyncio.get_running_loop().create_future()
    made.taking._decisions = made.taking._decisions._replace(discard_others=lambda _: discarding)
    made.comes(NODE, worker(W1, shared=True), worker(W3))
    made.comes(OTHER)
    done = await made.finish()
    assert ("restart", moved, [discarding, made.nodes.worker(W3)[1].ended]) in done  # type: ignore[index]
    assert ("restart", elsewhere, []) in done


async def test_workers_that_no_entry_explains_are_ended() -> None:
    made = Taking({}, drivers=())
    node = made.comes(NODE, worker(W1), worker(W2, shared=True))
    await turns()
    assert [order[:2] for order in made.orders] == [(NodeService.kill_worker, W1), (NodeService.kill_worker, W2)]
    assert not node.shared


async def test_no_further_actor_goes_to_a_shared_worker_of_before() -> None:
    """A handle of an actor that had ended there would reach another one, which has its index."""
    actor = of_log(1, NODE)
    made = Taking({actor: "alive"}, drivers=())
    node = made.comes(NODE, worker(W1, shared=True))
    assert actor.worker is not None
    other = made.nodes.worker_for(node, "Shop", ActorSpec("default", process="shared"), DRIVER)
    assert other is not actor.worker


async def test_a_node_and_a_program_that_do_not_return(caplog: pytest.LogCaptureFixture) -> None:
    actor, own = of_log(1, OTHER), of_log(2, HEAD)
    made = Taking({actor: "alive", own: "alive"}, (NODE, OTHER))
    made.comes(NODE)
    done = await made.finish(0.0)
    assert "1 nodes and 1 programs have not returned in 0 s" in caplog.text
    assert ("forget", "driver", DRIVER) in done
    assert ("forget", "member", OTHER) in done
    assert ("lost", actor, "its node did not return to the cluster's new head") in done
    assert actor.node is not None
    assert not made.nodes.has(actor.node), "so that its holders are told"
    assert ("lost", own, "its process had ended when the cluster's head was started again") in done
    assert own.node is made.nodes.own
    assert ("end owned", DRIVER) in done


async def test_a_recipe_that_has_ended_with_the_earlier_head() -> None:
    actor = of_log(1, HEAD, max_restarts=1)
    actor.recipe, actor.recipe_holders = None, [HEAD]
    made = Taking({actor: "restarting"}, members=(), drivers=())
    ((what, which, cause), *_) = await made.finish()
    assert (what, which) == ("lost", actor)
    assert "the log has not its class and arguments" in cause


async def test_what_is_made_by_a_worker_that_has_ended() -> None:
    by_living, by_dead = of_log(1, NODE, W1, W1), of_log(2, NODE, W1, W2)
    made = Taking({by_living: "alive", by_dead: "alive"}, drivers=())
    made.comes(NODE, worker(W1))
    assert [what for what in await made.finish() if what[0] == "end owned"] == [("end owned", W2)]


async def test_an_actor_that_was_ended_before_its_node_returned() -> None:
    """A program may end it as soon as the program itself is back."""
    killed, beside, alone, own, gone = (of_log(number, NODE) for number in range(5))
    alone.location, own.node_id, gone.node_id = (W2, 4), HEAD.hex(), OTHER.hex()
    made = Taking(dict.fromkeys((killed, beside, alone, own, gone), "alive"), (NODE, OTHER), ())
    for actor in (killed, alone, own, gone):
        actor.set_state("dead", "it was killed")
    made.nodes.ledger.release(HEAD.hex(), own.request)  # its end gives back its place, which was kept
    node = made.comes(NODE, worker(W1, shared=True), worker(W2))
    await turns()
    assert made.done == [("resume", beside), ("discard others", beside.worker)], "they share a process"
    assert made.orders == [(NodeService.kill_worker, W2, "the cluster's log knows no actor in it")]
    assert made.nodes.ledger.free(node.id) == {"CPU": 3.0}
    done = await made.finish(0.0)
    assert not [what for what in done if what[-1] in (killed, alone, own, gone) or what[0] == "lost"]
    assert [actor.state for actor in (killed, alone, own, gone)] == ["dead"] * 4
    assert made.nodes.ledger.free(HEAD.hex()) == {"CPU": 4.0}


async def test_who_ends_an_actor_waits_until_its_process_is_known() -> None:
    there, missing = of_log(1, NODE), of_log(2, OTHER)
    made = Taking({there: "alive", missing: "alive"}, (NODE, OTHER), ())
    made.comes(NODE, worker(W1))
    waiting = asyncio.create_task(made.taking.settled(missing))
    async with asyncio.timeout(PATIENCE):
        await made.taking.settled(there)
        await made.taking.settled(of_log(3, NODE))
        await turns()
        assert not waiting.done()
        await made.finish(0.0)
        await waiting


async def test_an_actor_that_is_restarted_and_that_nobody_holds() -> None:
    """All who hold it have returned, so nobody says later that its last handle was dropped."""
    lost, starting, held = of_log(1, NODE), of_log(2, NODE), of_log(3, NODE)
    made = Taking({lost: "alive", starting: "restarting", held: "alive"}, drivers=())
    made.comes(NODE, worker(W1))
    lost.state = "restarting"
    seen: list[tuple[ActorRecord, bool]] = []

    def unheld(actor: ActorRecord) -> None:
        seen.append((actor, made.taking.done.is_set()))

    made.taking._decisions = made.taking._decisions._replace(unheld=unheld)
    await made.finish()
    assert seen == [(lost, True), (starting, True), (held, True)]


async def test_nothing_is_decided_before_that_is_permitted() -> None:
    case = Taking({of_log(1, NODE): "alive"})
    permitted = asyncio.Event()

    async def permission() -> bool:
        return await permitted.wait()

    finishing = asyncio.create_task(case.taking.finish(0.0, permission))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not case.taking.done.is_set()
    assert not case.done
    permitted.set()
    async with asyncio.timeout(PATIENCE):
        assert await finishing
    assert case.taking.done.is_set()
    assert case.done


async def test_another_head_decides_where_that_is_never_permitted() -> None:
    case = Taking({of_log(1, NODE): "alive"})

    async def refusal() -> bool:
        return False

    assert not await case.taking.finish(0.0, refusal)
    assert not case.taking.done.is_set()
    assert not case.done


async def test_the_nodes_that_do_not_come_are_named() -> None:
    taking = Taking({}, (NODE, OTHER), ())
    taking.comes(NODE)
    label = f"node {OTHER.hex()[:8]} ({FACTS['host']}, host:1)"
    assert taking.taking.absent == {OTHER.hex(): label}
    assert taking.taking.given_up == []
    assert [taking.taking.awaits(each) for each in (NODE, OTHER, DRIVER)] == [False, True, False]
    await taking.finish(0.0)
    assert taking.taking.given_up == [label]
