"""Which actors a process gets that is to be the agent of a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.agents import FakePool, FakeProcess
from zcactor.runtime.agent import NodeAgent
from zcactor.runtime.assembly import assemble_agent
from zcactor.runtime.head import AGENT_INDEX, MEMBERSHIP_INDEX
from zcactor.runtime.member import NodeMember
from zcactor.runtime.membership import Membership
from zcactor.runtime.nodes import facts_of
from zcactor.runtime.place import Place


class Host:
    """Notes what it is to host."""

    instance: Any = None

    def adopt(self, instance: Any) -> None:
        """As of `zcactor.runtime.host.ActorHost`."""
        self.instance = instance


class AgentProcess(FakeProcess):
    """With room for actors."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = SimpleNamespace(exports={})
        self.connections = SimpleNamespace(on_lost=None)
        self.added: dict[int, Host] = {}

    def add_host(self, index: int, *_: Any) -> Host:
        """As of `zcactor.runtime.process.Process`."""
        self.added[index] = Host()
        return self.added[index]


@pytest.mark.parametrize("is_head", [True, False])
async def test_actors_of_an_agent(is_head: bool) -> None:
    process = AgentProcess()
    process.sessions.head = process.process if is_head else b"another process "
    facts = facts_of("a@h:1", ("local",), "machine", Place(7, "h"))
    assert (facts["pid"], facts["host"]) == (7, "h")
    node = assemble_agent(process, FakePool(), facts, {"CPU": 2.0}, 1.0, 10.0)  # type: ignore[arg-type]
    kinds = {index: type(host.instance) for index, host in process.added.items()}
    assert process.connections.on_lost == node.session_lost
    if is_head:
        assert isinstance(node, NodeAgent) and process.system.revive == node.revive
        assert kinds == {AGENT_INDEX: NodeAgent, MEMBERSHIP_INDEX: Membership}
    else:
        assert kinds == {AGENT_INDEX: NodeMember}
    assert process.added[AGENT_INDEX].instance is node
