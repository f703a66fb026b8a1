"""Networks measured between nodes: a probe on each, round trips and pulls in pairs, and a tree that fits them.

All pairs are measured in rounds, in each of which no node has more than one partner. The result has one of two
shapes. Where the times of all pairs are alike it is a star: one switch. Otherwise nodes whose round trips are clearly
shorter than others share a switch, and these switches a spine. Links get the latencies and bandwidths that add up to
the measured ones.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zcactor.api.actor import actor, method
from zcactor.api.arrays import ones
from zcactor.api.inspection import NodeInfo, explain
from zcactor.topology.requirement import networkx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MeasuredPair", "fitted", "measure", "rounds"]

NBYTES: Final = 8 << 20
"""Bytes of a pull that measures the bandwidth: long against the latency, and 1 ms at 8 GB/s."""
_PULLS: Final = 3
"""Pulls of a pair, of which the fastest counts."""
_FARTHER: Final = 1.5
"""Ratio of round trips from which on nodes are on different switches: below it is noise."""
_HIGHEST: Final = 1e12
"""Bytes/s of a link at most. Between processes of one host nothing moves, and the measured rate has no bound."""
_LEAST: Final = 1e-9
"""Seconds of a link at least."""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The measured values between two nodes."""

    rtt: float
    """Seconds of a round trip."""
    bandwidth: float
    """Bytes/s of a pull."""


@actor
class Probe:
    """An actor on one node that measures the way to others."""

    def __init__(self) -> None:
        self._array = ones(NBYTES, np.uint8)

    @method
    async def array(self) -> Any:
        """An array to pull, `NBYTES` long."""
        return self._array

    @method
    async def measure(self, other: Any) -> tuple[float, float]:
        """The round trip in seconds and the bandwidth in bytes/s to another probe."""
        path = await explain(other)
        times = []
        for _ in range(_PULLS):
            begun = time.perf_counter()
            await other.array()
            times.append(time.perf_counter() - begun)
        spent = max(min(times) - path.rtt, NBYTES / _HIGHEST)
        return path.rtt, NBYTES / spent


async def measure(nodes: Sequence[NodeInfo]) -> dict[str, Any]:
    """Measure the network between `nodes`. Returns the arguments of `zcactor.topology.topology.Topology`.

    Raises:
        ImportError: networkx is not installed.
        NotInitialized: no runtime is running.
        TypeError: an element is no `NodeInfo`.
        ValueError: there is no node, one occurs twice, or one is dead.
        ActorDied: a node was lost meanwhile.
    """
    networkx()
    nodes = list(nodes)
    for node in nodes:
        if not isinstance(node, NodeInfo):
            raise TypeError(f"Topology.measured takes nodes as zc.nodes() lists them, not {node!r}")
        if not node.alive:
            raise ValueError(f"node {node.node_id[:8]} is dead: leave it out")
    names = [node.node_id for node in nodes]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Topology.measured takes one or more different nodes, not {names!r}")
    spawned: Any = Probe
    probes = [await spawned.options(node=name).spawn() for name in names]
    pairs: dict[tuple[str, str], MeasuredPair] = {}
    for disjoint in rounds(len(names)):
        found = await asyncio.gather(*(probes[one].measure(probes[other]) for one, other in disjoint))
        for (one, other), (rtt, bandwidth) in zip(disjoint, found, strict=True):
            pairs[names[one], names[other]] = MeasuredPair(rtt, bandwidth)
    return fitted(names, pairs)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` players in rounds, each player once a round at most: the circle method of tournaments."""
    players = count + count % 2
    circle, result = list(range(players)), []
    for _ in range(players - 1):
        pairs = [(circle[i], circle[-1 - i]) for i in range(players // 2)]
        result.append([pair for pair in pairs if max(pair) < count])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in result if pairs]


def fitted(names: Sequence[str], pairs: Mapping[tuple[str, str], MeasuredPair]) -> dict[str, Any]:
    """The tree that fits the measured pairs, as the arguments of `zcactor.topology.topology.Topology`.

    Args:
        names: the hosts.
        pairs: the measured values between each two of them, in one direction.
    """
    graph = networkx().Graph()
    graph.add_nodes_from(names)
    leaves = _leaves(names, pairs)
    leaf_of = {name: index for index, leaf in enumerate(leaves) for name in leaf}
    near = [pair for (one, other), pair in pairs.items() if leaf_of[one] == leaf_of[other]]
    far = [pair for (one, other), pair in pairs.items() if leaf_of[one] != leaf_of[other]]
    # Two links between hosts of one switch, four between others. A round trip takes each of them twice.
    base = near or far
    latency = max(_LEAST, median(p.rtt for p in base) / (4 if near else 8)) if base else _LEAST
    bandwidth = min(_HIGHEST, median(p.bandwidth for p in base)) if base else _HIGHEST
    for name in names:
        graph.add_edge(name, ("leaf", leaf_of[name]), bandwidth=bandwidth, latency=latency)
    if far:
        above = max(_LEAST, (median(p.rtt for p in far) - 4 * latency) / 4)
        # Between two switches no pull was faster than this, and each host of theirs takes part in one at a time.
        for index, leaf in enumerate(leaves):
            rates = [
                pair.bandwidth
                for (one, other), pair in pairs.items()
                if leaf_of[one] != leaf_of[other] and index in (leaf_of[one], leaf_of[other])
            ]
            rate = min(_HIGHEST, median(rates) * len(leaf))
            graph.add_edge(("leaf", index), ("spine",), bandwidth=rate, latency=above)
    return {
        "graph": graph,
        "hosts": list(names),
        "bandwidth": bandwidth,
        "latency": latency,
        "label": "measured network",
    }


def _leaves(names: Sequence[str], pairs: Mapping[tuple[str, str], MeasuredPair]) -> list[list[str]]:
    """The hosts by switch: joined from the shortest round trip on (single linkage), until the next one is clearly
    longer than the ones before; all in one where none is."""
    leaf = {name: [name] for name in names}
    joined: list[float] = []
    for (one, other), pair in sorted(pairs.items(), key=lambda each: each[1].rtt):
        if joined and pair.rtt > _FARTHER * median(joined):
            break
        joined.append(pair.rtt)
        if leaf[one] is not leaf[other]:
            leaf[one].extend(leaf[other])
            for name in list(leaf[other]):
                leaf[name] = leaf[one]
    return [list(group) for group in {id(group): group for group in leaf.values()}.values()]
