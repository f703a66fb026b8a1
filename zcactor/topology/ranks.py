"""The order of a group's ranks, as plain numbers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor.api import inspection
from zcactor.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["order_of_ranks"]


async def order_of_ranks(actors: Sequence[Any], order: Any) -> list[int]:
    """The permutation of ranks that an order stands for: rank i is ``actors[result[i]]``.

    Args:
        actors: different living actors.
        order: ``"given"``, ``"topology"`` (the network between the actors' nodes, measured now) or a `Topology`. Its
            hosts are node ids or names of hosts; one whose hosts are numbers has ``actors[i]`` at host i.

    Raises:
        ImportError: networkx is not installed, for ``"topology"``.
        TypeError, ValueError: another order, or a topology that does not have the actors' hosts.
        What `Topology.measured` raises.
    """
    if isinstance(order, Topology):
        return order.ranks(await _hosts(actors, order))
    if order == "given":
        return list(range(len(actors)))
    if order != "topology":
        text = f"order must be 'given', 'topology' or a zc.topology.Topology, not {order!r}"
        raise ValueError(text) if type(order) is str else TypeError(text)
    placed = await _nodes(actors)
    used = {node.node_id: node for node in placed}
    if len(used) == 1:  # nothing to measure
        return list(range(len(actors)))
    measured = await Topology.measured(list(used.values()))
    return measured.ranks([node.node_id for node in placed])


async def _nodes(actors: Sequence[Any]) -> list[inspection.NodeInfo]:
    """The node of each actor."""
    told, nodes = await asyncio.gather(inspection.actors(), inspection.nodes())
    node_of = {info.actor_id: info.node_id for info in told}
    by_id = {node.node_id: node for node in nodes}
    return [by_id[node_of[actor._remote.actor_id.hex()]] for actor in actors]


async def _hosts(actors: Sequence[Any], topology: Topology) -> Sequence[Hashable]:
    """The host of each actor in a topology."""
    known = set(topology.hosts)
    if all(isinstance(host, int) for host in known):
        if len(actors) > len(known):
            raise ValueError(f"{len(actors)} actors do not fit the {len(known)} hosts of {topology!r}, one on each")
        return topology.hosts[: len(actors)]
    nodes = await _nodes(actors)
    for node in nodes:
        if node.node_id not in known and node.host not in known:
            raise ValueError(f"neither node {node.node_id} nor its host {node.host!r} is a host of {topology!r}")
    return [node.node_id if node.node_id in known else node.host for node in nodes]
