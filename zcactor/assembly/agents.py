"""The wiring that makes a `Process` the agent of a node. It is pure, and the same for a real node and a simulated one.

It has no forks, sockets, signals or pipes: those belong to `zcactor.node.agent_main`, which passes their events on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.control.head import Head
from zcactor.control.membership import Membership
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_agent import NodeAgent
from zcactor.peers.head_link import AGENT_INDEX, MEMBERSHIP_INDEX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.assembly.process import Process
    from zcactor.control.head_log import HeadLog
    from zcactor.control.node_table import OwnWorkers

__all__ = ["assemble_agent"]

_OPTIONS: Final = {"max_concurrency": 1 << 20}
"""The options of an agent's actors, whose calls wait for each other."""


def assemble_agent(
    process: Process, workers: OwnWorkers | None, facts: Mapping[str, Any], resources: Mapping[str, float],
    heartbeat: float, hang_after: float, log: HeadLog | None = None,
) -> Head | NodeAgent:  # fmt: skip
    """Give `process` the actors of a node agent: those of the head where the process is the head, else those of a node
    that is about to join.

    Args:
        process: the agent's own.
        workers: starts and ends workers here; None for a head that is no node's agent.
        facts: the facts about a head's process, and its node; see `zcactor.control.node_table.facts_of`.
        resources: of the head's own node, amounts by name.
        heartbeat, hang_after: seconds; see `Head`.
        log: the head's log; by default one in memory, which ends with the process.
    """
    if process.sessions.head == process.process:
        log = log or MemoryLog()
        head = Head(process, process.promises.exports, workers, facts, resources, log, heartbeat, hang_after)
        process.system.revive, process.connections.on_lost = head.grants.revive, head.session_lost
        process.hosts.add(AGENT_INDEX, Head, "node agent", _OPTIONS).adopt(head)
        process.hosts.add(MEMBERSHIP_INDEX, Membership, "membership", _OPTIONS).adopt(head.members)
        return head
    assert workers is not None
    member = NodeAgent(process, workers, process.system.known)
    process.connections.on_lost, process.system.on_actor_changed = member.session_lost, member.actor_changed
    process.system.on_heads = member.watch.told
    process.hosts.add(AGENT_INDEX, NodeAgent, "node agent", _OPTIONS).adopt(member)
    return member
