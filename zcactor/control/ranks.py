"""The ranks of a run as its head knows them: which have joined, from where, and a launcher that follows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from zcactor.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["JoinedRank", "Ranks"]


class JoinedRank(NamedTuple):
    """A node of a run: its rank, and where it is."""

    rank: int
    host: str
    pid: int


class Ranks:
    """The table of the ranks whose nodes belong to the cluster. Nodes without a rank are not in it.

    Args:
        own: the facts about the head's own node, if any; see `zcactor.control.node_table.facts_of`.
    """

    def __init__(self, own: Mapping[str, Any]) -> None:
        self._by_node: dict[str, JoinedRank] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called after each change."""
        self.join("", own)

    def join(self, node: str, facts: Mapping[str, Any]) -> None:
        """Note that a node has joined.

        Args:
            node: its id.
            facts: about it; it has a rank where they have ``"rank"``.

        Raises:
            ConnectionLost: a node with that rank is there already.
        """
        rank = facts.get("rank")
        if rank is None:
            return
        for other in self._by_node.values():
            if other.rank == rank:
                raise ConnectionLost(
                    f"rank {rank} has joined already, from {other.host} with pid {other.pid}; each rank of a run "
                    "is started once"
                )
        self._by_node[node] = JoinedRank(rank, facts["host"], facts["pid"])
        self.changed()

    def leave(self, node: str) -> None:
        """Note that a node is gone. Idempotent."""
        if self._by_node.pop(node, None) is not None:
            self.changed()

    def joined(self) -> list[JoinedRank]:
        """The ranks that are there, in order."""
        return sorted(self._by_node.values())
