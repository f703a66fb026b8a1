"""The bisection of a network: the fewest links that cut its hosts into halves whose sizes differ by at most 1."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zcactor.topology.requirement import networkx

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["EXHAUSTIVE", "bisection"]

EXHAUSTIVE: Final = 12
"""Hosts up to which all halves are tried: 462 of them."""
_STARTS: Final = 8
"""Halves of neighbouring hosts from which the search in larger networks starts."""


def bisection(graph: Any, hosts: Sequence[Hashable]) -> tuple[int, bool]:
    """The links of the best cut, and whether it is known to be the best one.

    Args:
        graph: a connected `networkx.Graph`, whose edges may have the attribute ``links``.
        hosts: its hosts.
    """
    if len(hosts) < 2:
        return 0, True
    if networkx().is_tree(graph):
        return _of_tree(graph, hosts), True
    if len(hosts) <= EXHAUSTIVE:
        return _exhaustive(graph, hosts), True
    return _searched(graph, hosts), False


def _links(graph: Any, one: Any, other: Any) -> int:
    return int(graph.edges[one, other].get("links", 1))


def _exhaustive(graph: Any, hosts: Sequence[Hashable]) -> int:
    """Try all halves that have the first host on one side; the other half of them are the same cuts."""
    first, *others = hosts
    sizes = {len(hosts) // 2, -(-len(hosts) // 2)}
    halves = ({first, *rest} for size in sizes for rest in combinations(others, size - 1))
    if len(hosts) == len(graph):  # no node may choose its side
        edges = [(one, other, _links(graph, one, other)) for one, other in graph.edges]
        return min(sum(width for one, other, width in edges if (one in half) != (other in half)) for half in halves)
    cut = _Cutter(graph, hosts)
    return min(cut.value(half) for half in halves)


def _of_tree(graph: Any, hosts: Sequence[Hashable]) -> int:
    """The exact bisection of a tree: for each node the fewest cut links below it by the number of hosts on its side,
    from the leaves up."""
    nx, wanted, root = networkx(), set(hosts), next(iter(graph))
    least: dict[Any, Any] = {}
    above = {low: high for high, low in nx.bfs_edges(graph, root)}
    for node in [*reversed(list(above)), root]:
        own = least.pop(node, np.zeros(1))
        if node in wanted:
            own = np.concatenate([[math.inf], own])
        if node == root:
            half = len(hosts) // 2
            return int(min(own[half], own[len(hosts) - half]))
        # On the parent's side as many hosts below as given: either as they are, or all swapped by cutting the link.
        joined = np.minimum(own, own[::-1] + _links(graph, node, above[node]))
        so_far = least.get(above[node], np.zeros(1))
        least[above[node]] = _sums(so_far, joined)
    raise AssertionError("a tree has a root")


def _sums(one: Any, other: Any) -> Any:
    """The least sums of an entry of each, by the sum of their indexes."""
    result = np.full(len(one) + len(other) - 1, math.inf)
    if len(one) > len(other):
        one, other = other, one
    for index, value in enumerate(one):
        part = result[index : index + len(other)]
        np.minimum(part, value + other, out=part)
    return result


class _Cutter:
    """Find the fewest links between two sets of hosts, where each other node may lie on either side: by max-flow."""

    def __init__(self, graph: Any, hosts: Sequence[Hashable]) -> None:
        self._nx = networkx()
        self._hosts = hosts
        self._flow = self._nx.DiGraph()
        for one, other in graph.edges:
            width = _links(graph, one, other)
            self._flow.add_edge(("node", one), ("node", other), capacity=width)
            self._flow.add_edge(("node", other), ("node", one), capacity=width)

    def value(self, half: set[Hashable]) -> int:
        """The links between `half` of the hosts and the others."""
        return int(self.cut(half)[0])

    def cut(self, half: set[Hashable]) -> tuple[int, set[Any]]:
        """The same, and the nodes on the side of `half`."""
        flow = self._flow
        flow.remove_nodes_from(["from", "to"])
        for host in self._hosts:  # an edge without a capacity carries anything
            flow.add_edge(*(("from", ("node", host)) if host in half else (("node", host), "to")))
        value, (side, _) = self._nx.minimum_cut(flow, "from", "to")
        return int(value), {node[1] for node in side if node != "from"}


def _searched(graph: Any, hosts: Sequence[Hashable]) -> int:
    """The best of some halves of neighbouring hosts, improved by exchanges (Kernighan and Lin, "An efficient heuristic
    procedure for partitioning graphs", Bell System Technical Journal 1970)."""
    cutter, half = _Cutter(graph, hosts), len(hosts) // 2
    halves = [set([*hosts, *hosts][start : start + half]) for start in range(0, half, max(1, half // _STARTS))]
    halves.append(set(_from_an_end(graph, hosts)[:half]))
    found = [(*cutter.cut(each), each) for each in halves]
    least, side, chosen = min(found, key=lambda each: each[0])
    while True:
        exchanged = _exchange(graph, hosts, chosen, side)
        value, nodes = cutter.cut(exchanged)
        if value >= least:
            return least
        least, side, chosen = value, nodes, exchanged


def _from_an_end(graph: Any, hosts: Sequence[Hashable]) -> list[Hashable]:
    """The hosts by their distance from one that is far from another."""
    distances = networkx().single_source_shortest_path_length
    start = distances(graph, hosts[0])
    end = distances(graph, max(hosts, key=start.__getitem__))
    return sorted(hosts, key=end.__getitem__)


def _exchange(graph: Any, hosts: Sequence[Hashable], half: set[Hashable], side: set[Any]) -> set[Hashable]:
    """One pass of Kernighan and Lin: exchange the best pairs one by one, each host once, and keep as many exchanges as
    have cut the most links in all."""
    here, at = set(half), {node: node in side for node in graph}
    gain = {
        host: sum(_links(graph, host, other) * (1 if at[other] != at[host] else -1) for other in graph[host])
        for host in hosts
    }
    free, total, best, result = set(hosts), 0, 0, set(half)
    for _ in range(len(half)):
        ours = max((host for host in free if host in here), key=gain.__getitem__)
        theirs = max((host for host in free if host not in here), key=gain.__getitem__)
        between = _links(graph, ours, theirs) if graph.has_edge(ours, theirs) else 0
        total += gain[ours] + gain[theirs] - 2 * between
        here ^= {ours, theirs}
        free -= {ours, theirs}
        for moved in (ours, theirs):
            at[moved] = not at[moved]
            for other in graph[moved]:
                if other in free:
                    gain[other] += 2 * _links(graph, moved, other) * (1 if at[other] != at[moved] else -1)
        if total > best:
            best, result = total, set(here)
    return result
