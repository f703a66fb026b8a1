"""`zcactor.topology.cuts`: exact up to 12 hosts and for trees; never below the least elsewhere."""

from __future__ import annotations

from itertools import combinations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor import topology as shapes
from zcactor.topology import Topology, cuts


def tried(topology: Topology) -> int:
    """The bisection by trying all halves of the hosts, and for each all sides of the switches."""
    graph, hosts = topology.graph, topology.hosts
    switches = [node for node in graph if node not in hosts]
    least = 1 << 30
    for half in combinations(hosts, len(hosts) // 2):
        for sides in range(1 << len(switches)):
            here = {*half, *(switch for bit, switch in enumerate(switches) if sides >> bit & 1)}
            cut = sum(facts["links"] for a, b, facts in graph.edges(data=True) if (a in here) != (b in here))
            least = min(least, cut)
    return least


SMALL = [
    *[shapes.chain(n) for n in (2, 3, 7)],
    *[shapes.ring(n) for n in (2, 3, 8)],
    *[shapes.mesh(*dims) for dims in ((3, 3), (2, 5), (3, 4), (2, 2, 2))],
    *[shapes.torus(*dims) for dims in ((3, 3), (2, 3), (2, 2), (2, 2, 3), (3, 4))],
    *[shapes.tree(radix=radix, levels=levels) for radix, levels in ((3, 2), (3, 3), (4, 1), (4, 2), (6, 1))],
    shapes.fat_tree(radix=4, levels=1),
    shapes.fat_tree(radix=4, levels=2),
    shapes.fat_tree(radix=4, levels=2, blocking=2),
    shapes.dragonfly(groups=3, routers=2, hosts=1),
    shapes.dragonfly_plus(groups=2, leaves=2, spines=2, hosts=2),
    shapes.hamming_mesh(boards=(2, 2), board=(1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("topology", SMALL, ids=str)
def test_exact_where_all_halves_are_tried(topology: Topology) -> None:
    least = tried(topology)
    assert (topology.bisection, topology.bisection_exact) == (least, True)
    assert cuts.bisection(topology.graph, topology.hosts) == (least, True)
    assert cuts._searched(topology.graph, topology.hosts) >= least


@settings(max_examples=40)
@given(st.data())
def test_exact_for_trees(data: st.DataObject) -> None:
    count = data.draw(st.integers(3, 10))
    graph = nx.Graph()
    for node in range(1, count):
        graph.add_edge(node, data.draw(st.integers(0, node - 1)), links=data.draw(st.integers(1, 3)))
    topology = Topology(graph, hosts=range(data.draw(st.integers(2, min(7, count)))))
    assert (topology.bisection, topology.bisection_exact) == (tried(topology), True)


def test_a_search_says_that_it_is_one() -> None:
    topology = shapes.dragonfly(groups=4, routers=4, hosts=2)
    assert not topology.bisection_exact
    assert topology.bisection >= 4  # 4 groups: two against two, by 4 pairs with a link each


def test_exchanges_find_what_neighbours_do_not_show() -> None:
    graph = nx.Graph()
    for cluster in range(2):  # two cliques whose hosts are numbered alternately, joined by one link
        members = range(cluster, 14, 2)
        graph.add_edges_from(combinations(members, 2))
    graph.add_edge(0, 1)
    assert cuts._searched(graph, range(14)) == 1


def test_one_host_is_not_cut() -> None:
    assert cuts.bisection(shapes.chain(1).graph, [0]) == (0, True)
