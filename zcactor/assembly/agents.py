"""The wiring that makes a `Process` the agent of a node. It is pure, and the same for a real node and a simulated one.

It has no forks, sockets, signals or pipes: those belong to `zcactor.node.agent_main`, which passes their events on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zcactor.control.head import Head
from zcactor.control.memory_log import MemoryLog
from zcactor.control.node_agent import NodeAgent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.assembly.process import Process
    from zcactor.control.head_log import HeadLog
    from zcactor.control.node_table import OwnWorkers

__all__ = ["assemble_agent"]


def assemble_agent(
    process: Process, workers: OwnWorkers | None, facts: Mapping[str, Any], resources: Mapping[str, float],
    heartbeat: float, hang_after: float, log: HeadLog | None = None,
) -> Head | NodeAgent:  # fmt: skip
    """Give `process` the services of a node's agent: those of the head where the process is the head, else those of a
    node that is about to join.

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
        process.leases.revive, process.connections.on_lost = head.grants.revive, head.session_lost
        process.serve(head, head.members)
        return head
    assert workers is not None
    member = NodeAgent(process, workers, process.news.known)
    process.connections.on_lost, process.news.on_actor_changed = member.session_lost, member.actor_changed
    process.news.on_heads = member.watch.told
    process.serve(member)
    return member
