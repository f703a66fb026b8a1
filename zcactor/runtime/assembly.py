"""What makes a `Process` the agent of a node: pure wiring, the same for a real node and a simulated one.

Forks, sockets, signals and pipes are not in it: they belong to `zcactor.runtime.node`, which passes what comes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.runtime.agent import NodeAgent
from zcactor.runtime.head import AGENT_INDEX, MEMBERSHIP_INDEX
from zcactor.runtime.member import NodeMember
from zcactor.runtime.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.runtime.nodes import OwnWorkers
    from zcactor.runtime.process import Process

__all__ = ["assemble_agent"]

_OPTIONS: Final = {"max_concurrency": 1 << 20}
"""Of an agent's actors, whose calls wait for each other."""


def assemble_agent(
    process: Process, workers: OwnWorkers, facts: Mapping[str, Any], resources: Mapping[str, float],
    heartbeat: float, hang_after: float,
) -> NodeAgent | NodeMember:  # fmt: skip
    """Give `process` the actors of a node agent: of the head where that is its own process, else of a node that
    is about to join.

    Args:
        process: the agent's own.
        workers: starts and ends workers here.
        facts: what the head tells of its node; see `zcactor.runtime.nodes.facts_of`.
        resources: of the head's node, amounts by name.
        heartbeat, hang_after: seconds; see `NodeAgent`.
    """
    if process.sessions.head == process.process:
        head = NodeAgent(process, process.promises.exports, workers, facts, resources, heartbeat, hang_after)
        process.system.revive, process.connections.on_lost = head.revive, head.session_lost
        process.add_host(AGENT_INDEX, NodeAgent, "node agent", _OPTIONS).adopt(head)
        process.add_host(MEMBERSHIP_INDEX, Membership, "membership", _OPTIONS).adopt(head.members)
        return head
    member = NodeMember(process, workers)
    process.connections.on_lost = member.session_lost
    process.add_host(AGENT_INDEX, NodeMember, "node agent", _OPTIONS).adopt(member)
    return member
