"""A network of hosts: its graph, its measures, good orders of its hosts, and the time of an allreduce in it."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zcactor.topology import cuts, files, flows, measuring, orders, plans
from zcactor.topology.arcs import Arcs
from zcactor.topology.requirement import networkx

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Iterable, Sequence

    from zcactor.api.inspection import NodeInfo

__all__ = ["BANDWIDTH", "LATENCY", "Topology"]

BANDWIDTH: Final = 12.5e9
"""Bytes/s of a link and direction: 100 Gbit/s."""
LATENCY: Final = 1e-6
"""Seconds of a link."""


class Topology:
    """A network of hosts and switches, all of whose links carry bytes in both directions at once.

    Args:
        graph: a connected `networkx.Graph`. An edge may have the attributes ``links`` (parallel cables, default 1),
            ``bandwidth`` and ``latency`` of each cable; without the latter two those given here hold.
        hosts: the nodes that are hosts, in their natural order; None for all. Hosts may pass bytes on as switches do.
        bandwidth: bytes/s of a link and direction.
        latency: seconds of a link.
        bisection: the bisection where it is known; None to have it computed.
        label: the name that `repr` shows.

    Raises:
        ImportError: networkx is not installed.
        ValueError: the graph is not connected, has no host, or a number in it is impossible.
        TypeError: `graph` is no `networkx.Graph`.
    """

    def __init__(
        self, graph: Any, *, hosts: Iterable[Hashable] | None = None, bandwidth: float = BANDWIDTH,
        latency: float = LATENCY, bisection: int | None = None, label: str = "topology",
    ) -> None:  # fmt: skip
        nx = networkx()
        if not isinstance(graph, nx.Graph) or graph.is_directed() or graph.is_multigraph():
            raise TypeError(f"a topology is made of a networkx.Graph, undirected and without parallel edges: {graph!r}")
        self.graph = graph
        """The `networkx.Graph`."""
        self.hosts: tuple[Hashable, ...] = tuple(graph.nodes if hosts is None else hosts)
        """The hosts in their natural order."""
        self.bandwidth, self.latency = _checked(bandwidth, latency)
        self.label = label
        self._known_bisection = bisection
        unknown = [host for host in self.hosts if host not in graph]
        if not self.hosts or unknown or len(set(self.hosts)) != len(self.hosts):
            what = f"{unknown[0]!r} is no node of the graph" if unknown else f"{list(self.hosts[:8])!r}"
            raise ValueError(f"hosts must be one or more different nodes of the graph: {what}")
        if not nx.is_connected(graph):
            raise ValueError(f"the {label} is not connected: {nx.number_connected_components(graph)} parts")
        rest = [node for node in graph if node not in set(self.hosts)]
        self._number = {node: number for number, node in enumerate([*self.hosts, *rest])}
        links, bandwidths, latencies = [], [], []
        for one, other, facts in graph.edges(data=True):
            if one == other:
                raise ValueError(f"the {label} has a link from {one!r} to itself")
            width = facts.get("links", 1)
            if not _is_count(width):
                raise ValueError(f"links between {one!r} and {other!r} must be a whole number >= 1, not {width!r}")
            rate, delay = _checked(facts.get("bandwidth", bandwidth), facts.get("latency", latency))
            links.append((self._number[one], self._number[other], int(width)))
            bandwidths.append(rate)
            latencies.append(delay)
        rows = np.array(links, np.intp).reshape(-1, 3)
        self._arcs = Arcs(len(self._number), rows, np.array(bandwidths), np.array(latencies))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Topology:
        """Read a network of hosts, switches and spines from a TOML file; see ``docs/how-to/topologies.md``.

        Raises:
            ImportError: networkx is not installed.
            OSError: the file cannot be read.
            ValueError: the file is no TOML, or describes no network. The message names the file and the entry.
        """
        return cls(**files.read(path))

    @classmethod
    async def measured(cls, nodes: Sequence[NodeInfo]) -> Topology:
        """Measure the network between nodes of the cluster; see `zcactor.topology.measuring`.

        Args:
            nodes: as `zc.nodes` lists them. Their ids are the hosts of the topology.

        Raises:
            ImportError: networkx is not installed.
            NotInitialized: no runtime is running.
            TypeError: an element is no `NodeInfo`.
            ValueError: there is no node, one occurs twice, or one is dead.
            ActorDied: a node was lost meanwhile.

        Cancelling ends the measuring, and the actors that do it.
        """
        return cls(**await measuring.measure(nodes))

    # ---------------------------------------------------------------- measures

    @cached_property
    def diameter(self) -> int:
        """Links on the longest shortest path between two hosts."""
        count = len(self.hosts)
        return int(self._arcs.distances(np.arange(count))[:, :count].max()) if count > 1 else 0

    @property
    def bisection(self) -> int:
        """The fewest links that cut the hosts into halves whose sizes differ by at most 1.

        Exact where `bisection_exact` says so; otherwise the best cut that was found, so not fewer links than the
        fewest.
        """
        return self._bisection[0]

    @property
    def bisection_exact(self) -> bool:
        """Whether `bisection` is the least: for known shapes, trees, and up to 12 hosts."""
        return self._bisection[1]

    @cached_property
    def _bisection(self) -> tuple[int, bool]:
        if self._known_bisection is not None:
            return self._known_bisection, True
        return cuts.bisection(self.graph, self.hosts)

    # ---------------------------------------------------------------- ranks

    def order(self, hosts: Sequence[Hashable] | None = None) -> list[Hashable]:
        """Put hosts into an order in which neighbours are near each other, for a ring and for halving.

        Args:
            hosts: hosts of this topology; None for all. One that occurs several times (several ranks on a host) comes
                as often, in a row.

        Returns:
            The same hosts in the order whose ring takes least if all ranks start each step together, of those tried:
            the order given, the natural order, and walks through the network.

        Raises:
            ValueError: a host is unknown.
        """
        given = list(self.hosts if hosts is None else hosts)
        self._numbers(given)
        return [given[position] for position in self.ranks(given)]

    def ranks(self, hosts: Sequence[Hashable]) -> list[int]:
        """The order of `order` as plain numbers: rank i of the new order is ``hosts[result[i]]``.

        Raises:
            ValueError: a host is unknown.
        """
        numbers = self._numbers(hosts)
        places: dict[int, list[int]] = {}
        for position, number in enumerate(numbers):
            places.setdefault(number, []).append(position)
        best = orders.best(self._arcs, list(places), [self.graph.nodes[host].get("at") for host in self.hosts])
        return [position for number in best for position in places[number]]

    def predict(self, nbytes: float, *, plan: str = "ring", hosts: Sequence[Hashable] | None = None) -> float:
        """The time of an allreduce, in seconds.

        The flows of all steps are followed. A rank starts a step when it has finished the one before and the ranks that
        it reads from have. Flows spread evenly over all shortest paths, and share links as `zcactor.topology.flows`
        says, each direction apart. Adding is not counted.

        Where flows are many they are not followed: of halving among 2,048 ranks and more, of a ring of more than
        128 ranks, and of the other plans among more than 32. Then ranks start each step together. It takes the time of
        the link that carries most for its bandwidth, and the latency of the links on the longest path.

        Args:
            nbytes: bytes of the array, on each rank.
            plan: ``"ring"``, ``"halving"``, ``"direct"`` or ``"naive"``.
            hosts: the ranks' hosts in the order of ranks; None for all in their natural order.

        Raises:
            ValueError: another plan, a host that is unknown or occurs twice, or bytes below 0.
            TypeError: `nbytes` is no number.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int | float | np.integer | np.floating):
            raise TypeError(f"nbytes must be a number of bytes, not {nbytes!r}")
        if not 0 <= nbytes < math.inf:
            raise ValueError(f"nbytes must be a number of bytes >= 0, not {nbytes!r}")
        chosen = self.hosts if hosts is None else hosts
        numbers = self._numbers(chosen)
        if len(set(numbers)) != len(numbers):
            twice = next(host for position, host in enumerate(chosen) if host in chosen[:position])
            raise ValueError(f"each rank needs a host of its own, but {twice!r} occurs twice")
        steps = plans.steps(plan, len(numbers))
        together = math.fsum(
            step.times * orders.seconds(self._arcs, numbers, step.flows, step.part * nbytes) for step in steps
        )
        pieces = flows.pieces(len(numbers), steps)
        return flows.seconds(self._arcs, numbers, steps, nbytes, together / pieces) if pieces else together

    def bound(self, nbytes: float, ranks: int | None = None) -> float:
        """The time that no allreduce among `ranks` ranks (None: all hosts) beats where a host has one link, in seconds:
        ``2 nbytes (ranks - 1) / ranks`` bytes in and out of each by `bandwidth`."""
        count = len(self.hosts) if ranks is None else ranks
        return 2 * nbytes * (count - 1) / count / self.bandwidth

    def _numbers(self, hosts: Sequence[Hashable]) -> list[int]:
        limit, numbers = len(self.hosts), []
        for host in hosts:
            number = self._number.get(host, limit)
            if number >= limit:
                raise ValueError(f"{host!r} is no host of the {self.label}, whose hosts are {_few(self.hosts)}")
            numbers.append(number)
        if not numbers:
            raise ValueError("there must be at least one host")
        return numbers

    def __repr__(self) -> str:
        return f"<{self.label}: {len(self.hosts)} hosts, {len(self.graph)} nodes, {self.graph.number_of_edges()} edges>"


def _few(hosts: Sequence[Hashable]) -> str:
    names = ", ".join(map(repr, hosts[:6]))
    return f"{names}, ... ({len(hosts)} in all)" if len(hosts) > 6 else names


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _checked(bandwidth: Any, latency: Any) -> tuple[float, float]:
    for name, value, least in (("bandwidth", bandwidth, "> 0 bytes/s"), ("latency", latency, ">= 0 s")):
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0 or (name == "bandwidth" and value == 0):
            raise ValueError(f"{name} must be a finite number {least}, not {value!r}")
    return float(bandwidth), float(latency)
