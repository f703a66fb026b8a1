"""The links of a network as arrays, one *arc* a direction, and the load of flows on them.

A flow takes all shortest paths from its source to its target at once, each the same share of it, where every link
between the same two nodes is a path of its own: ECMP with an even spread. The load of each arc follows from the
numbers of shortest paths, without listing them (Brandes, "A faster algorithm for betweenness centrality", Journal of
Mathematical Sociology 2001). Here many sources are counted at a time, by levels of the distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Arcs", "Load", "Shares"]

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.intp]

_AT_A_TIME: Final = 1 << 20
"""Products of sources and arcs that are counted at a time: 8 MiB an array at most."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of some flows on a network."""

    arcs: _Floats
    """The load of each arc, in the unit of the demand."""
    hops: int
    """Links on the longest path of a flow."""
    latency: float
    """Seconds of the links on the slowest path of a flow."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of flows that arcs carry, one entry for each flow and arc on a path of it, sorted by flows."""

    starts: _Ints
    """The first entry of each flow, and the number of entries at the end."""
    arcs: _Ints
    """The arc of each entry."""
    parts: _Floats
    """The part of the flow that the arc carries: 1 where all paths share it."""
    latencies: _Floats
    """Seconds of the links on the slowest path of each flow."""
    paths: _Floats
    """The number of shortest paths of each flow."""


class Arcs:
    """The arcs of a connected network, whose nodes are numbered from 0.

    Args:
        nodes: the number of nodes.
        links: one row a link: the two nodes, and the number of parallel cables.
        bandwidths: bytes/s of each row's cables, a cable and direction.
        latencies: seconds of each row's cables.
    """

    __slots__ = (
        "_back",
        "_degrees",
        "_starts",
        "latencies",
        "nodes",
        "rates",
        "sources",
        "targets",
        "uniform",
        "widths",
    )

    def __init__(self, nodes: int, links: _Ints, bandwidths: _Floats, latencies: _Floats) -> None:
        self.nodes = nodes
        both = np.concatenate([links, links[:, [1, 0, 2]]])
        order = np.lexsort((both[:, 1], both[:, 0]))
        both = both[order]
        self.sources: _Ints = both[:, 0].copy()
        self.targets: _Ints = both[:, 1].copy()
        self.widths: _Floats = both[:, 2].astype(np.float64)
        self.rates: _Floats = self.widths * np.tile(bandwidths, 2)[order]
        """Bytes/s of each arc."""
        self.latencies: _Floats = np.tile(latencies, 2)[order]
        self.uniform: float | None = float(latencies[0]) if len(latencies) and np.ptp(latencies) == 0 else None
        """The latency of every link in seconds; None where they differ."""
        self._starts: _Ints = np.searchsorted(self.sources, np.arange(nodes))
        self._degrees: _Ints = np.bincount(self.sources, minlength=nodes)
        self._back: _Ints = np.lexsort((self.sources, self.targets))  # of each arc the one in the other direction
        """The arc in the other direction of each arc."""

    def _chunks(self, count: int) -> Iterator[slice]:
        size = max(1, _AT_A_TIME // max(1, len(self.sources)))
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def _out(self, nodes: _Ints) -> tuple[_Ints, _Ints]:
        """The arcs that leave `nodes`, one node after the other, and the position of each one's node."""
        degrees = self._degrees[nodes]
        which = np.repeat(np.arange(len(nodes)), degrees)
        first = np.cumsum(degrees) - degrees
        return self._starts[nodes][which] + np.arange(len(which)) - first[which], which

    def _search(self, sources: _Ints, wanted: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int32], _Floats]:
        """Search from `sources`, each until it has met its `wanted` nodes.

        Returns, by source and node, the distance (-1 where it was not met) and the number of shortest paths.

        It goes from places to places: a source and a node as one number.
        """
        rows, nodes = np.arange(len(sources)), self.nodes
        distance = np.full(len(sources) * nodes, -1, np.int32)
        paths = np.zeros(len(distance))
        last = np.empty(len(distance), np.intp)
        wanted = wanted.ravel()
        front = rows * nodes + sources
        distance[front], paths[front] = 0, 1.0
        left = np.bincount(np.flatnonzero(wanted) // nodes, minlength=len(sources))
        left[wanted[front]] -= 1
        level = 0
        while len(front := front[left[front // nodes] > 0]):
            level += 1
            arcs, which = self._out(front % nodes)
            came = front[which]
            there = came - came % nodes + self.targets[arcs]
            new = distance[there] < 0
            there, came, arcs = there[new], came[new], arcs[new]
            np.add.at(paths, there, paths[came] * self.widths[arcs])
            last[there] = np.arange(len(there))
            front = there[last[there] == np.arange(len(there))]  # each place once
            distance[front] = level
            np.subtract.at(left, front[wanted[front]] // nodes, 1)
        shape = (len(sources), nodes)
        return distance.reshape(shape), paths.reshape(shape)

    def distances(self, sources: _Ints) -> npt.NDArray[np.int32]:
        """The links on a shortest path from each of `sources` to each node; -1 where there is no path."""
        found = np.empty((len(sources), self.nodes), np.int32)
        for chunk in self._chunks(len(sources)):
            part = sources[chunk]
            found[chunk] = self._search(part, np.ones((len(part), self.nodes), bool))[0]
        return found

    def load(self, sources: _Ints, demand: _Floats) -> Load:
        """The load of flows.

        Args:
            sources: the flows' sources, each once.
            demand: the flow from ``sources[i]`` to node j in ``demand[i, j]``, not below 0.
        """
        total = np.zeros(len(self.sources))
        hops, latency = 0, 0.0
        for chunk in self._chunks(len(sources)):
            flows: _Floats = demand[chunk].copy()
            flows[np.arange(len(flows)), sources[chunk]] = 0.0
            wanted = flows > 0
            if not wanted.any():
                continue
            distance, paths = self._search(sources[chunk], wanted)
            hops = max(hops, int(distance[wanted].max()))
            if self.uniform is None:
                latency = max(latency, float(self._slowest(distance)[wanted].max()))
            for _, on, carried in self._trace(distance.ravel(), paths.ravel(), flows.ravel()):
                total += np.bincount(on, carried, minlength=len(total))
        return Load(total, hops, latency if self.uniform is None else hops * self.uniform)

    def shares(self, sources: _Ints, targets: _Ints) -> Shares:
        """The parts of the flows from ``sources[i]`` to ``targets[i]``, which are different nodes, on each arc."""
        flows, arcs, parts = [np.empty(0, np.intp)], [np.empty(0, np.intp)], [np.empty(0)]
        latencies, numbers = np.empty(len(sources)), np.empty(len(sources))
        for chunk in self._chunks(len(sources)):
            ends = targets[chunk]
            rows = np.arange(len(ends))
            demand = np.zeros((len(ends), self.nodes))
            demand[rows, ends] = 1.0
            distance, paths = self._search(sources[chunk], demand > 0)
            slowest = distance * self.uniform if self.uniform is not None else self._slowest(distance)
            latencies[chunk] = slowest[rows, ends]
            numbers[chunk] = paths[rows, ends]
            for row, on, carried in self._trace(distance.ravel(), paths.ravel(), demand.ravel()):
                flows.append(row + chunk.start)
                arcs.append(on)
                parts.append(carried)
        flow = np.concatenate(flows)
        order = np.argsort(flow, kind="stable")
        starts = np.searchsorted(flow[order], np.arange(len(sources) + 1))
        return Shares(starts, np.concatenate(arcs)[order], np.concatenate(parts)[order], latencies, numbers)

    def _trace(
        self, distance: npt.NDArray[np.int32], paths: _Floats, flows: _Floats
    ) -> Iterator[tuple[_Ints, _Ints, _Floats]]:
        """Follow `flows` from their targets back to their sources. `flows` ends up with the flow through each place.

        Yields, level by level, the row, the arc and the flow on it.
        """
        nodes = self.nodes
        places = np.flatnonzero(flows)
        order = np.argsort(-distance[places], kind="stable")
        places = places[order]
        levels = distance[places]
        last = np.empty(len(distance), np.intp)
        came = np.empty(0, np.intp)
        for level in range(int(levels[0]), 0, -1):
            at = np.concatenate([came, places[levels == level]])
            last[at] = np.arange(len(at))
            at = at[last[at] == np.arange(len(at))]
            arcs, which = self._out(at % nodes)
            here = at[which]
            before = here - here % nodes + self.targets[arcs]
            on_path = distance[before] == level - 1
            here, before, arcs = here[on_path], before[on_path], self._back[arcs[on_path]]
            carried = flows[here] * (paths[before] * self.widths[arcs] / paths[here])
            yield here // nodes, arcs, carried
            np.add.at(flows, before, carried)
            came = before

    def _slowest(self, distance: npt.NDArray[np.int32]) -> _Floats:
        """Seconds of the slowest of the shortest paths to each node that was met."""
        slowest = np.zeros(distance.shape)
        forward = (distance[:, self.targets] == distance[:, self.sources] + 1) & (distance[:, self.sources] >= 0)
        for level in range(1, int(distance.max()) + 1):
            rows, arcs = np.nonzero(forward & (distance[:, self.targets] == level))
            over = slowest[rows, self.sources[arcs]] + self.latencies[arcs]
            np.maximum.at(slowest, (rows, self.targets[arcs]), over)
        return slowest
