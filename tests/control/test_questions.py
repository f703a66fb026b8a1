"""The questions that the head answers from its tables."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.callers import asked_by
from tests.control.agents import DRIVER, FakePool, FakeSession
from zcactor.control.actor_record import ActorRecord
from zcactor.control.actor_table import ActorTable
from zcactor.control.head import Head
from zcactor.control.head_log import Candidate
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_table import NodeRecord, NodeTable, facts_of
from zcactor.control.recorder import HeadRecorder
from zcactor.errors import AuthenticationError, NoSuchActor
from zcactor.ids import ActorId, ProcessId
from zcactor.interface import Interface
from zcactor.options import ActorSpec

NODE = ProcessId(b"n" * 16)


class Asked(Head):
    """A head that only answers."""

    def __init__(self) -> None:
        self._nodes = NodeTable(NodeRecord(NODE, FakePool(), facts_of("n@host:1", (), "here")), {"CPU": 2.0})
        self._ledger = self._nodes.ledger
        self._actors = ActorTable[ActorRecord]()
        self.recorder = HeadRecorder(asyncio.get_running_loop(), MemoryLog(), Candidate("n@host:1", "n", 1))

    def add(self, name: str) -> ActorRecord:
        """A pending actor."""
        actor = ActorRecord(ActorSpec("shops", name, num_cpus=1), "Shop", Interface.of(object).wire(), DRIVER, 7)
        self._actors.add(actor)
        return actor


async def test_the_place_of_an_actor_is_told_when_it_has_one() -> None:
    head = Asked()
    assert await head.locate(ActorId(b"a" * 16), False) == ("dead", b"", 0, "it is unknown to its node")
    actor = head.add("till")
    asked = asyncio.ensure_future(head.locate(actor.actor_id, False))
    await asyncio.sleep(0)
    assert not asked.done()
    actor.location = (b"w" * 16, 3)
    actor.set_state("alive")
    assert await asked == ("alive", b"w" * 16, 3, "")
    assert await head.process_of(actor.actor_id) == b"w" * 16
    actor.set_state("restarting", "it fell")
    assert await head.locate(actor.actor_id, True) == ("restarting", b"w" * 16, 3, "it fell")
    actor.set_state("dead", "it is closed")
    with pytest.raises(NoSuchActor, match="is dead: it is closed"):
        await head.process_of(actor.actor_id)


async def test_a_name_whose_actor_dies_meanwhile() -> None:
    head = Asked()
    actor = head.add("till")
    asked = asyncio.ensure_future(head.get_actor("till", "shops"))
    await asyncio.sleep(0)
    actor.set_state("dead", "it is closed")
    with pytest.raises(NoSuchActor, match="'till' in namespace 'shops' has just died: it is closed"):
        await asked


@pytest.mark.parametrize("wrong", [None, 5, ["till"], "", "x" * 1_001])
async def test_a_name_that_no_actor_can_have_is_refused(wrong: Any) -> None:
    head = Asked()
    head.add("till")
    with pytest.raises(TypeError, match="the name of an actor must be a str of 1 to 1,000 characters"):
        await head.get_actor(wrong, "shops")
    with pytest.raises(TypeError, match="the namespace must be a str of 1 to 1,000 characters"):
        await head.get_actor("till", wrong)


async def test_the_facts_of_all() -> None:
    head = Asked()
    head.add("till")
    assert [actor["name"] for actor in await head.actors()] == ["till"]
    assert [node["node_id"] for node in await head.nodes()] == [NODE.hex()]
    assert await head.resources() == ({"CPU": 2.0}, {"CPU": 2.0})


async def test_each_spawn_that_waits_is_told_once() -> None:
    head = Asked()
    head.add("till")
    driver = FakeSession(DRIVER)
    assert (await asked_by(driver, head.waits("Shop", b""))).startswith("Shop waits for 1 CPU")
    assert await asked_by(driver, head.waits("Shop", b"")) == ""
    with pytest.raises(AuthenticationError, match="is no worker of the node whose agent has asked"):
        await asked_by(driver, head.waits("Shop", b"w" * 16))


@pytest.mark.parametrize("lacks", [True, False])
async def test_a_head_that_waits_for_nodes_says_so(lacks: bool) -> None:
    head: Any = Asked()
    head._facts = {"address": "aa@h:1", "pid": 7}
    head.heads = SimpleNamespace(standbys=["b:1"])
    taking = SimpleNamespace(absent={"bb": "node bb (b)"})
    leader_lease = SimpleNamespace(in_term=True, silent={"bb"}, lacks_half=lambda: lacks)
    head.members = SimpleNamespace(taking_over=taking, leader_lease=leader_lease, is_taking_over=True, log="the log")
    told = await head.leader()
    assert told.pop("waits_for", None) == (["node bb (b)"] if lacks else None)
    assert told == {
        "address": "h:1", "pid": 7, "epoch": head.recorder.epoch, "log": "the log", "state": "taking over",
        "standbys": ["b:1"],
    }  # fmt: skip
