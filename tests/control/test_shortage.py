"""The reasons for which spawns wait, in words."""

from __future__ import annotations

import asyncio
from typing import Any

from zcactor.control.actor_record import ActorRecord
from zcactor.control.node_table import NodeRecord, RemotePool, facts_of
from zcactor.control.scheduler import Ledger
from zcactor.control.shortage import waits
from zcactor.ids import ProcessId
from zcactor.interface import Interface
from zcactor.options import ActorSpec
from zcactor.workers.worker_table import WorkerRecord

NODE = ProcessId(b"n" * 16)
INTERFACE = Interface.of(object).wire()


def actor(name: str, **options: Any) -> ActorRecord:
    """An actor that has no place yet."""
    made = ActorRecord(ActorSpec("default", name, **options), "Shard", INTERFACE, ProcessId(b"o" * 16), 1)
    assert made.label == f"Shard({name})"
    return made


def ledger(total: dict[str, float], free: dict[str, float]) -> Ledger:
    """A ledger of one node."""
    made = Ledger()
    made.add("n", total)
    made._nodes["n"].free = free
    return made


async def node() -> NodeRecord:
    """A node."""
    pool = RemotePool(asyncio.get_running_loop(), lambda *_: None, lambda _: None)
    return NodeRecord(NODE, pool, facts_of("n@host:1", (), ""))


async def test_resources_that_others_have() -> None:
    held = ledger({"CPU": 4, "tape": 1}, {"CPU": 0, "tape": 0})
    others = [actor(f"a{number}", num_cpus=1) for number in range(4)]
    for other in others:
        other.node = await node()
    one, both = actor("b", num_cpus=1), actor("c", num_cpus=1, resources={"tape": 1})
    assert (
        waits([one], held, others) == "Shard waits for 1 CPU: 4 of 4 held by Shard(a0), Shard(a1), Shard(a2) and 1 more"
    )
    assert (
        waits([both], held, [])
        == "Shard waits for 1 CPU, 1 tape: 4 of 4 CPU held by nobody; 1 of 1 tape held by nobody"
    )
    assert waits([one], ledger({"CPU": 4}, {"CPU": 2}), others) == "Shard waits for 1 CPU on one node"
    assert waits([], held, others) == ""


async def test_what_is_placed() -> None:
    placed = actor("a")
    placed.node = await node()
    held = ledger({"CPU": 1}, {"CPU": 1})
    assert waits([placed], held, []) == "Shard waits for its process to start"
    placed.worker = WorkerRecord(
        ProcessId(b"w" * 16), asyncio.get_running_loop(), "Shard", ProcessId(b"d" * 16), shared=False
    )
    assert waits([placed], held, []) == "Shard waits for its process to start"
    placed.worker.ready.set_result(None)
    assert waits([placed], held, []) == "Shard waits for its constructor"


async def test_many_that_wait_for_the_same_are_one_reason() -> None:
    held = ledger({"CPU": 1}, {"CPU": 0})
    many = [actor(f"a{number}", num_cpus=1) for number in range(1200)]
    other = actor("b")
    other.node = await node()
    assert waits([*many, other], held, []) == (
        "1,200 spawns of Shard wait, each for 1 CPU: 1 of 1 held by nobody; Shard waits for its process to start"
    )
