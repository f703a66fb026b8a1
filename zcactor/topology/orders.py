"""Orders of hosts in which a ring's neighbours are near each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zcactor.topology.arcs import Arcs

__all__ = ["best", "seconds"]

_NBYTES: Final = float(64 << 20)
"""Bytes of the allreduce by which orders are compared: the load counts for more than the latency."""


def seconds(arcs: Arcs, hosts: Sequence[int], flows: Sequence[tuple[int, int]], nbytes: float) -> float:
    """The time of one step.

    Args:
        arcs: the network.
        hosts: the nodes of the ranks.
        flows: pairs of ranks; empty for every rank to every other one.
        nbytes: bytes of each flow.
    """
    sources = np.array(hosts, np.intp)
    if flows:
        givers = sorted({rank for rank, _ in flows})
        row = {rank: index for index, rank in enumerate(givers)}
        demand = np.zeros((len(givers), arcs.nodes))
        for rank, target in flows:
            demand[row[rank], hosts[target]] += 1.0
        sources = sources[givers]
    else:
        demand = np.zeros((len(hosts), arcs.nodes))
        demand[:, sources] = 1.0
    load = arcs.load(sources, demand)
    return float((load.arcs / arcs.rates).max()) * nbytes + load.latency


def best(arcs: Arcs, hosts: Sequence[int], at: Sequence[tuple[int, ...] | None]) -> list[int]:
    """The order of `hosts` with the least time of a ring, of those tried.

    Args:
        arcs: the network, whose first nodes are its hosts.
        hosts: different nodes, in the order given.
        at: the coordinates of each of the network's hosts; None for a host without any.
    """
    if len(hosts) < 3:
        return list(hosts)
    ring = [(rank, (rank + 1) % len(hosts)) for rank in range(len(hosts))]
    part = _NBYTES / len(hosts)
    # No order beats one link each, of the fastest and of the shortest ones.
    least = part / float(arcs.rates.max()) + float(arcs.latencies.min())
    chosen, time = list(hosts), math.inf
    tried: set[tuple[int, ...]] = set()
    for candidate in _candidates(arcs, hosts, at):
        if tuple(candidate) in tried:
            continue
        tried.add(tuple(candidate))
        took = seconds(arcs, candidate, ring, part)
        if took < time:
            chosen, time = candidate, took
        if time <= least * (1 + 1e-9):
            break
    return chosen


def _candidates(arcs: Arcs, hosts: Sequence[int], at: Sequence[tuple[int, ...] | None]) -> Iterator[list[int]]:
    """Orders that are good in some network, and the given one, whose time takes longest to find where it is bad."""
    yield sorted(hosts)
    places = {host: place for host in hosts if (place := at[host]) is not None}
    if len(places) == len(hosts):
        sizes = [max(place[axis] for place in places.values()) + 1 for axis in range(len(places[hosts[0]]))]
        for axis, size in enumerate(sizes):
            if size % 2 == 0:
                yield sorted(hosts, key=lambda host, axis=axis: _comb(places[host], sizes, axis))  # type: ignore[misc]
        yield sorted(hosts, key=lambda host: _snake(places[host], sizes))
    yield _walk(arcs, hosts)
    yield list(hosts)


def _snake(place: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a place in the walk through a mesh that turns round at the end of each row."""
    number = 0
    for coordinate, size in zip(place, sizes, strict=True):
        number = number * size + (coordinate if number % 2 == 0 else size - 1 - coordinate)
    return number


def _comb(place: Sequence[int], sizes: Sequence[int], axis: int) -> int:
    """The number of a place in the closed walk through a mesh whose `axis` has an even size: to and fro in the rows
    across, but for their first places, and back through these."""
    rest, others = [*place[:axis], *place[axis + 1 :]], [*sizes[:axis], *sizes[axis + 1 :]]
    row, rows = place[axis], sizes[axis]
    column, columns = _snake(rest, others), math.prod(others)
    if column == 0:
        return rows * (columns - 1) + rows - 1 - row
    return row * (columns - 1) + (column - 1 if row % 2 == 0 else columns - 1 - column)


def _walk(arcs: Arcs, hosts: Sequence[int]) -> list[int]:
    """The hosts as a depth-first walk meets them that visits all hosts of a switch before it goes up."""
    neighbours: list[list[int]] = [[] for _ in range(arcs.nodes)]
    for source, target in zip(arcs.sources.tolist(), arcs.targets.tolist(), strict=True):
        neighbours[source].append(target)
    degree: list[Any] = [len(near) for near in neighbours]
    met: dict[int, None] = {}
    stack = [min(hosts)]
    while stack:
        node = stack.pop()
        if node not in met:
            met[node] = None
            stack.extend(sorted(neighbours[node], key=lambda near: (-degree[near], -near)))
    wanted = set(hosts)
    return [node for node in met if node in wanted]
