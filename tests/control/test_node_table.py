"""The choice of an actor's node, and the workers of another node, whose agent records its orders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import zcactor as zc
from zcactor.control.node_table import (
    SHARED_WORKERS,
    VISIBLE,
    DriverRecord,
    NodeRecord,
    NodeTable,
    RemotePool,
    facts_of,
    machine_of,
    own_machine,
)
from zcactor.errors import ConnectionLost, InsufficientResources
from zcactor.ids import ProcessId
from zcactor.options import ActorSpec
from zcactor.process.cluster import NodeService
from zcactor.workers.worker_table import WorkerRecord

DRIVER = ProcessId(b"d" * 16)
SPEC, SHARED = ActorSpec("default"), ActorSpec("default", process="shared")


class Node(NodeRecord):
    """A node whose agent records its orders."""

    def __init__(self, letter: str, machine: str = "") -> None:
        self.told: list[tuple[Any, ...]] = []
        self.ended: list[WorkerRecord] = []
        self.pool = RemotePool(asyncio.get_running_loop(), lambda *call: self.told.append(call), self.ended.append)
        super().__init__(
            ProcessId(letter.encode() * 16), self.pool, facts_of(f"{letter}@host:1", ("local", "tcp"), machine)
        )


def nodes_of(*letters: str) -> tuple[NodeTable, dict[str, Node]]:
    """Nodes of these letters, the first of them the head's."""
    made = {letter: Node(letter, f"machine {letter}") for letter in letters}
    nodes = NodeTable(made[letters[0]], {"CPU": 1})
    for letter in letters[1:]:
        nodes.add(made[letter], {"CPU": 2})
    return nodes, made


def home(nodes: NodeTable, made: Mapping[str, Node], owner: bytes) -> str:
    """The letter of the node that the actors of `owner` prefer."""
    near = nodes.order(None, ProcessId(owner)).near()
    return next(letter for letter, node in made.items() if node.id == near)


async def test_where_an_actor_goes() -> None:
    nodes, made = nodes_of("a", "b", "c")
    assert home(nodes, made, DRIVER) == "a", "a stranger's actors go to the head's node first"
    nodes.drivers[DRIVER] = DriverRecord(DRIVER, "machine c")
    assert home(nodes, made, DRIVER) == "c", "a program's to the node on its host"
    worker = nodes.worker_for(made["b"], "Shard", SPEC, DRIVER)
    assert home(nodes, made, worker.process) == "b", "a worker's to its own node"
    assert home(nodes, made, made["c"].process) == "c"
    nodes.remove(made["b"])
    nodes.remove(made["c"])
    assert [home(nodes, made, owner) for owner in (DRIVER, worker.process, made["c"].process)] == ["a"] * 3
    assert [nodes.order(where, DRIVER).only for where in (None, "spread", "pack", "x")] == [None, None, None, "x"]


async def test_where_an_actor_goes_where_the_head_is_no_node() -> None:
    nodes, made = NodeTable(None, {}, "machine b"), {letter: Node(letter, f"machine {letter}") for letter in "abc"}
    assert nodes.told() == []
    assert nodes.order(None, DRIVER).near() is None
    for letter in "ab":
        nodes.add(made[letter], {"CPU": 2})
    assert home(nodes, made, DRIVER) == "b", "a stranger's actors go to the node on the head's host first"
    nodes.drivers[DRIVER] = DriverRecord(DRIVER, "machine a")
    assert home(nodes, made, DRIVER) == "a"
    nodes.remove(made["a"])
    assert home(nodes, made, DRIVER) == "b"
    nodes.remove(made["b"])
    nodes.add(made["c"], {"CPU": 2})
    assert nodes.order(None, DRIVER).near() is None, "none is nearer than another"


async def test_of_two_nodes_on_a_machine_the_first_is_preferred() -> None:
    nodes, made = nodes_of("a")
    for letter in "bc":
        made[letter] = Node(letter, "one machine")
        nodes.add(made[letter], {})
    nodes.drivers[DRIVER] = DriverRecord(DRIVER, "one machine")
    assert home(nodes, made, DRIVER) == "b"
    nodes.remove(made["b"])
    assert home(nodes, made, DRIVER) == "c"


async def test_workers_are_known_until_they_have_ended() -> None:
    nodes, made = nodes_of("a", "b")
    first, second = (nodes.worker_for(made[letter], "Shard", SPEC, DRIVER) for letter in "ab")
    shared = nodes.worker_for(made["b"], "Shard", SHARED, DRIVER)
    nodes.addresses[second.process] = "b@host:2"
    assert nodes.worker(first.process) == (made["a"], first)
    assert nodes.workers_for(DRIVER) == [first.process, second.process, shared.process]
    nodes.remove(made["b"])
    assert nodes.worker(second.process) is None, "its node is gone"
    assert nodes.host_of(second.process) is made["b"], "but it may still run"
    for worker in (second, shared):
        nodes.forget(worker)
        assert nodes.host_of(worker.process) is None
    assert made["b"].shared == []
    assert second.process not in nodes.addresses
    assert nodes.workers_for(DRIVER) == [first.process]
    nodes.forget(first)
    assert nodes.workers_for(DRIVER) == []


async def test_a_worker_that_is_started_after_its_node_was_lost_ends_at_once() -> None:
    nodes, made = nodes_of("a", "b")
    made["b"].pool.lost("its node was lost")
    worker = nodes.worker_for(made["b"], "Shard", SPEC, DRIVER)
    assert not worker.ended.done(), "the caller has to enter its actor first"
    assert await worker.ended == "its node was lost"
    assert (made["b"].ended, made["b"].told, made["b"].pool.by_process) == ([worker], [], {})


async def test_an_actor_sees_its_gpus_alone() -> None:
    nodes, made = nodes_of("a", "b")
    made["b"].facts["gpus"] = ["GPU-0", "GPU-1", "GPU-2"]

    def environment(letter: str, gpus: tuple[int, ...], **options: Any) -> dict[str, str]:
        nodes.worker_for(made[letter], "Shard", ActorSpec("default", **options), DRIVER, gpus)
        found: dict[str, str] = made[letter].told[-1][3]
        return found

    assert environment("b", (0, 2)) == {VISIBLE: "GPU-0,GPU-2"}
    assert environment("b", ()) == {}
    assert environment("b", (1,), env={"A": "b"}) == {VISIBLE: "GPU-1", "A": "b"}
    assert environment("b", (1,), env={VISIBLE: ""}) == {VISIBLE: ""}
    assert environment("a", (0,)) == {}, "a node that knows none of its GPUs"


async def test_a_node_that_is_not_there() -> None:
    nodes, made = nodes_of("a", "b")
    for where in (None, "spread", "pack", made["b"].id):
        nodes.check(where, "Shard")
    with pytest.raises(ValueError, match=rf"there is no node 'x'; nodes: {made['a'].id}, {made['b'].id}"):
        nodes.check("x", "Shard")


async def test_where_processes_are() -> None:
    nodes, made = nodes_of("a", "b")
    assert nodes.find(made["b"].process) == "b@host:1"
    with pytest.raises(ConnectionLost, match="is not known to the cluster"):
        nodes.find(DRIVER)
    nodes.addresses[DRIVER] = "d@host:2"
    assert nodes.find(DRIVER) == "d@host:2"
    nodes.remove(made["b"])
    with pytest.raises(ConnectionLost):
        nodes.find(made["b"].process)
    assert nodes.ledger.total() == {"CPU": 1}


async def test_what_is_told_of_nodes() -> None:
    nodes, made = nodes_of("a", "b")
    made["b"].pool.start("Shard", {}, DRIVER, shared=False)
    first, second = nodes.told()
    assert (first["node_id"], first["address"], first["resources"], first["workers"]) == (
        made["a"].id, "a@host:1", {"CPU": 1}, 0,
    )  # fmt: skip
    assert (second["transports"], second["workers"], second["alive"]) == (["local", "tcp"], 1, True)
    assert made["b"].label.startswith(f"node {made['b'].id[:8]} (")


async def test_a_worker_of_another_node() -> None:
    node = Node("b")
    record = node.pool.start("Shard", {"A": "1"}, DRIVER, shared=False)
    assert node.told == [(NodeService.start_worker, record.process, "Shard", {"A": "1"}, DRIVER, False)]
    assert (len(record.process), record.driver, record.shared) == (16, DRIVER, False)
    record.kill("for a reason")
    record.kill("again")
    kill = NodeService.kill_worker
    assert node.told[1:] == [(kill, record.process, "for a reason"), (kill, record.process, "again")]
    node.pool.worker_ended(record.process, "killed by signal 9")
    assert record.ended.result() == "for a reason"
    assert node.ended == [record]
    assert node.pool.by_process == {}
    with pytest.raises(RuntimeError, match="for a reason"):
        record.ready.result()
    node.pool.worker_ended(record.process, "once more")
    record.kill()
    assert len(node.told) == 3
    assert node.ended == [record]


async def test_a_node_that_is_lost_takes_its_workers_along() -> None:
    node = Node("b")
    records = [node.pool.start("Shard", {}, DRIVER, shared=False) for _ in range(3)]
    records[0].ready.set_result(None)
    node.pool.lost("its node was lost")
    assert [record.ended.result() for record in records] == ["its node was lost"] * 3
    assert node.ended == records
    node.pool.kill_all("too late")
    assert len(node.told) == 3


async def test_shared_workers() -> None:
    nodes, made = nodes_of("a")
    node = made["a"]
    first = nodes.worker_for(node, "Shard", SHARED, DRIVER)
    first.actors["an actor"] = None
    others = [nodes.worker_for(node, "Shard", SHARED, DRIVER) for _ in range(SHARED_WORKERS - 1)]
    assert len({first, *others}) == SHARED_WORKERS
    emptiest = nodes.worker_for(node, "Shard", SHARED, DRIVER)
    assert emptiest in node.shared
    assert emptiest is not first or SHARED_WORKERS == 1
    for record in node.shared:
        record.leaving = True
    assert nodes.worker_for(node, "Shard", SHARED, DRIVER) not in {first, *others}
    own = nodes.worker_for(node, "Shard", ActorSpec("default", env={"A": "1"}), DRIVER)
    assert own not in node.shared
    assert node.told[-1] == (NodeService.start_worker, own.process, "Shard", {"A": "1"}, DRIVER, False)


async def test_no_process_can_be_started() -> None:
    nodes, made = nodes_of("a")

    def start(*_: Any, **__: Any) -> WorkerRecord:
        raise OSError(24, "Too many open files")

    made["a"].pool.start = start  # type: ignore[method-assign]
    with pytest.raises(InsufficientResources, match=r"for Shard: .*Too many open files; see ulimit -n"):
        nodes.worker_for(made["a"], "Shard", SPEC, DRIVER)


def test_machines(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert machine_of(one) == machine_of(one)
    assert machine_of(one) != machine_of(two)


def test_a_machine_has_a_name_where_its_processes_prefer_to_map(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    name = own_machine(zc.Config(), tmp_path)
    assert name and name == own_machine(zc.Config(transports="local"), tmp_path)
    assert name != own_machine(zc.Config(), other)
    assert own_machine(zc.Config(transports="tcp"), tmp_path) == ""
    assert own_machine(zc.Config(transports="tcp,local"), tmp_path) == ""


async def test_the_nodes_of_the_heads_host() -> None:
    nodes = NodeTable(None, {}, "machine b")
    made = {letter: Node(letter, f"machine {letter}") for letter in "ab"}
    assert [nodes.is_beside_head(made[letter]) for letter in "ab"] == [False, True]
