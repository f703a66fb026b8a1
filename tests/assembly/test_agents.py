"""The services of a process that becomes the agent of a node."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.control.agents import FakePool, FakeProcess, turns
from zcactor.assembly.agents import assemble_agent
from zcactor.control.head import Head
from zcactor.control.node_agent import NodeAgent
from zcactor.control.node_table import facts_of
from zcactor.process.place import Place


class AgentProcess(FakeProcess):
    """A fake process that records the services it is to have."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = SimpleNamespace(exports={})
        self.connections = SimpleNamespace(on_lost=None)
        self.served: list[Any] = []

    def serve(self, *services: Any) -> None:
        """Add services as `zcactor.assembly.process.Process` does."""
        self.served += services


@pytest.mark.parametrize("is_head", [True, False])
async def test_services_of_an_agent(is_head: bool) -> None:
    process = AgentProcess()
    process.sessions.head = process.process if is_head else b"another process "
    facts = facts_of("a@h:1", ("local",), "machine", Place(7, "h"))
    assert (facts["pid"], facts["host"]) == (7, "h")
    node = assemble_agent(process, FakePool(), facts, {"CPU": 2.0}, 1.0, 10.0)  # type: ignore[arg-type]
    assert process.connections.on_lost == node.session_lost
    if is_head:
        assert isinstance(node, Head) and process.leases.revive == node.grants.revive
        assert process.served == [node, node.members]
    else:
        assert isinstance(node, NodeAgent) and process.served == [node]


async def test_a_head_that_is_no_nodes_agent() -> None:
    process = AgentProcess()
    facts = facts_of("a@h:1", ("local",), "machine", Place(7, "h"))
    head = assemble_agent(process, None, facts, {}, 1.0, 10.0)  # type: ignore[arg-type]
    assert isinstance(head, Head)
    assert await head.nodes() == []
    assert (await head.leader())["pid"] == 7
    waiting = asyncio.create_task(head.members.some_node())
    await turns()
    assert not waiting.done(), "nothing is placed before the first node is there"
    waiting.cancel()
    await head.shutdown(1.0)
    await head.finished
