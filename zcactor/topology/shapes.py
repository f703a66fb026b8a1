"""The shapes of networks: chain, ring, mesh, torus, tree, fat tree, dragonfly, dragonfly+ and Hamming mesh.

Hosts are numbers from 0, neighbours close together. Switches are tuples that begin with what they are. All functions
raise a ValueError for numbers of which nothing can be built, and an ImportError without networkx.
"""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from zcactor.topology.requirement import networkx
from zcactor.topology.topology import BANDWIDTH, LATENCY, Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "chain",
    "dragonfly",
    "dragonfly_plus",
    "fat_tree",
    "hamming_mesh",
    "mesh",
    "ring",
    "torus",
    "tree",
]


def chain(n: int, *, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """`n` hosts in a row, each linked to the next."""
    return _grid("chain", (n,), False, bandwidth, latency)


def ring(n: int, *, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """`n` hosts in a row whose ends are linked; two hosts have one link."""
    return _grid("ring", (n,), True, bandwidth, latency)


def mesh(*dims: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A grid of hosts with sizes `dims`, numbered row by row, each linked to the next along each axis."""
    return _grid("mesh", dims, False, bandwidth, latency)


def torus(*dims: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A mesh with sizes `dims` whose ends are linked along each axis; an axis of size 2 has no second link."""
    return _grid("torus", dims, True, bandwidth, latency)


def tree(*, radix: int, levels: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY) -> Topology:
    """A tree of switches with `radix` ports, one of them up, in `levels` levels; ``(radix - 1) ** levels`` hosts."""
    _counts("tree", radix=(radix, 2), levels=(levels, 1))
    graph, below = _new(), radix - 1
    _hosts(graph, below**levels)
    nodes: list[Any] = list(range(below**levels))
    for level in range(1, levels + 1):
        parents = [("switch", level, index) for index in range(len(nodes) // below)]
        graph.add_edges_from((node, parents[index // below]) for index, node in enumerate(nodes))
        nodes = parents
    # Of an even number of branches half are cut off; of an odd one, half of them and half of one more, level by level.
    cut = below // 2 if below % 2 == 0 else levels * (below // 2)
    return _made(graph, below**levels, bandwidth, latency, f"tree of radix {radix} with {levels} levels", cut)


def fat_tree(
    *, radix: int, levels: int, blocking: int = 1, bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """A folded Clos network of switches with `radix` ports; ``2 * (radix // 2) ** levels`` hosts.

    The lowest switches have ``radix // 2`` hosts and a `blocking`-th of that links up. (Petrini and Vanneschi,
    "k-ary n-trees", IPPS 1997; Öhring et al., "On generalized fat trees", IPPS 1995.)
    """
    _counts("fat_tree", radix=(radix, 2), levels=(levels, 1), blocking=(blocking, 1))
    half = radix // 2
    if radix % 2 or half % blocking or (levels == 1 and blocking > 1):
        raise ValueError(
            f"fat_tree: radix {radix} with blocking {blocking} and {levels} levels cannot be built: the radix must be "
            "even, half of it a multiple of the blocking, and one level has no links up to leave out"
        )
    down = [half] * (levels - 1) + [radix]
    up = [1] + [half // blocking if level == 1 else half for level in range(1, levels)]
    graph, count = _new(), math.prod(down)
    _hosts(graph, count)
    nodes: dict[Any, Any] = {(place, ()): number for number, place in enumerate(product(*map(range, reversed(down))))}
    for level in range(levels):
        above: dict[Any, Any] = {}
        for (place, parents), node in nodes.items():
            for port in range(up[level]):
                key = (place[:-1], (*parents, port))
                switch = above.setdefault(key, ("switch", level + 1, *place[:-1], *key[1][1:]))
                graph.add_edge(node, switch)
        nodes = above
    label = f"fat tree of radix {radix} with {levels} levels" + (f" and blocking {blocking}" if blocking > 1 else "")
    return _made(graph, count, bandwidth, latency, label, count // (2 * blocking))


def dragonfly(
    *, groups: int, routers: int, hosts: int, links: int | None = None, bandwidth: float = BANDWIDTH,
    latency: float = LATENCY,
) -> Topology:  # fmt: skip
    """`groups` groups of `routers` routers, all linked with each other, with `hosts` hosts each.

    Args:
        groups, routers, hosts: as above.
        links: links of each router to other groups; None for the fewest that link all groups with each other. Each
            two groups get the same number of links, and what is left over is not used.
        bandwidth: bytes/s of a link and direction.
        latency: seconds of a link.

    (Kim et al., "Technology-Driven, Highly-Scalable Dragonfly Topology", ISCA 2008.)
    """
    _counts("dragonfly", groups=(groups, 1), routers=(routers, 1), hosts=(hosts, 1))
    needed = -(-(groups - 1) // routers)
    if links is None:
        links = needed
    _counts("dragonfly", links=(links, 0))
    if links < needed:
        raise ValueError(
            f"dragonfly: {routers} routers with {links} links each do not link a group to {groups - 1} others; "
            f"each needs {needed}"
        )
    graph = _new()
    _hosts(graph, groups * routers * hosts)
    for group in range(groups):
        for router in range(routers):
            first = (group * routers + router) * hosts
            graph.add_edges_from((first + host, ("router", group, router)) for host in range(hosts))
        graph.add_edges_from((("router", group, a), ("router", group, b)) for a, b in combinations(range(routers), 2))
    rounds = routers * links // (groups - 1) if groups > 1 else 0
    for one, other in combinations(range(groups), 2):
        for turn in range(rounds):  # the slot of a group's link to the group `step` further on
            here = (other - one - 1 + turn * (groups - 1)) // links
            there = (one - other - 1 + groups + turn * (groups - 1)) // links
            _link(graph, ("router", one, here), ("router", other, there))
    label = f"dragonfly of {groups} groups of {routers} routers"
    return _made(graph, groups * routers * hosts, bandwidth, latency, label)


def dragonfly_plus(
    *, groups: int, leaves: int, spines: int, hosts: int, bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """`groups` groups of `leaves` switches with `hosts` hosts each, every leaf linked to all `spines` of its group, and
    spine i of each group to spine i of all others. (Shpiner et al., "Dragonfly+", HiPINEB 2017.)"""
    _counts("dragonfly_plus", groups=(groups, 1), leaves=(leaves, 1), spines=(spines, 1), hosts=(hosts, 1))
    graph = _new()
    _hosts(graph, groups * leaves * hosts)
    for group, leaf in product(range(groups), range(leaves)):
        first = (group * leaves + leaf) * hosts
        graph.add_edges_from((first + host, ("leaf", group, leaf)) for host in range(hosts))
        graph.add_edges_from((("leaf", group, leaf), ("spine", group, spine)) for spine in range(spines))
    for (one, other), spine in product(combinations(range(groups), 2), range(spines)):
        graph.add_edge(("spine", one, spine), ("spine", other, spine))
    label = f"dragonfly+ of {groups} groups of {leaves} leaves"
    return _made(graph, groups * leaves * hosts, bandwidth, latency, label)


def hamming_mesh(
    *, boards: tuple[int, int], board: tuple[int, int], bandwidth: float = BANDWIDTH, latency: float = LATENCY
) -> Topology:
    """A grid of `boards`, each a mesh of `board` hosts; all ends of a row of hosts, on all boards in line, are linked
    by a switch, and so are those of a column. (Hoefler et al., "HammingMesh", SC 2022.)"""
    given: dict[str, Any] = {"boards": boards, "board": board}
    for name, pair in given.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"hamming_mesh: {name} must be two whole numbers, not {pair!r}")
        _counts("hamming_mesh", **{f"{name}[{axis}]": (size, 1) for axis, size in enumerate(pair)})
    graph, sizes = _new(), (boards[0] * board[0], boards[1] * board[1])
    _hosts(graph, math.prod(sizes), sizes)
    for place in product(*map(range, sizes)):
        number = place[0] * sizes[1] + place[1]
        for axis, step in ((0, sizes[1]), (1, 1)):
            within, switch = place[axis] % board[axis], ("switch", axis, place[1 - axis])
            if within + 1 < board[axis]:
                graph.add_edge(number, number + step)
            for end in (within == 0, within + 1 == board[axis]):
                if end and boards[axis] > 1:
                    _link(graph, number, switch)
    label = f"Hamming mesh of {boards[0]} x {boards[1]} boards of {board[0]} x {board[1]}"
    return _made(graph, math.prod(sizes), bandwidth, latency, label)


# -------------------------------------------------------------------- parts of all


def _grid(label: str, dims: Sequence[int], wrapped: bool, bandwidth: float, latency: float) -> Topology:
    if not dims:
        raise ValueError(f"{label}: give at least one size")
    _counts(label, **{f"size {axis + 1}" if len(dims) > 1 else "size": (size, 1) for axis, size in enumerate(dims)})
    graph, count = _new(), math.prod(dims)
    _hosts(graph, count, dims)
    for number, place in enumerate(product(*map(range, dims))):
        for axis, size in enumerate(dims):
            step = math.prod(dims[axis + 1 :])
            if place[axis] + 1 < size:
                graph.add_edge(number, number + step)
            elif wrapped and size > 2:
                graph.add_edge(number, number - (size - 1) * step)
    cut: int | None = _grid_bisection([size for size in dims if size > 1])
    if wrapped and any(size > 2 for size in dims):
        cut = None if 2 in dims else 2 * _grid_bisection([size for size in dims if size > 1])
    shape = " x ".join(map(str, dims))
    return _made(graph, count, bandwidth, latency, f"{label} of {shape}", cut)


def _grid_bisection(dims: Sequence[int]) -> int:
    """The bisection of a mesh; that of a torus whose axes are longer than 2 is twice as much. (Aroca and Anta,
    "Bisection (Band)Width of Product Networks with Application to Data Centers", IEEE TPDS 2014.)"""
    sizes, cut = sorted(dims, reverse=True), 0
    for axis, size in enumerate(sizes):
        cut += math.prod(sizes[axis + 1 :])
        if size % 2 == 0:
            break
    return cut


def _new() -> Any:
    return networkx().Graph()


def _hosts(graph: Any, count: int, sizes: Sequence[int] = ()) -> None:
    """Add the hosts, with their coordinates in a grid of `sizes` where they have some."""
    if sizes:
        graph.add_nodes_from((n, {"at": place}) for n, place in enumerate(product(*map(range, sizes))))
    else:
        graph.add_nodes_from(range(count))


def _link(graph: Any, one: Any, other: Any) -> None:
    """Add a link beside those that there are."""
    width = graph.edges[one, other]["links"] if graph.has_edge(one, other) else 0
    graph.add_edge(one, other, links=width + 1)


def _made(
    graph: Any, count: int, bandwidth: float, latency: float, label: str, bisection: int | None = None
) -> Topology:
    for _, _, facts in graph.edges(data=True):
        facts.setdefault("links", 1)
    return Topology(graph, hosts=range(count), bandwidth=bandwidth, latency=latency, bisection=bisection, label=label)


def _counts(shape: str, **given: tuple[Any, int]) -> None:
    for name, (value, least) in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{shape}: {name} must be a whole number >= {least}, not {value!r}")
