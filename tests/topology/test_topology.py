"""`zcactor.topology.topology`: measures, ranks and predictions, judged by SimGrid where it is installed."""

from __future__ import annotations

import random
from typing import Any

import networkx as nx
import pytest

import zcactor as zc
from tests.topology.simgrid_judge import judged
from zcactor import topology as shapes
from zcactor.topology import Topology
from zcactor.topology.topology import BANDWIDTH, LATENCY

MIB = 1 << 20
SIXTEEN = [
    shapes.chain(16),
    shapes.ring(16),
    shapes.mesh(4, 4),
    shapes.torus(4, 4),
    shapes.tree(radix=3, levels=4),
    shapes.fat_tree(radix=4, levels=3),
    shapes.dragonfly(groups=4, routers=2, hosts=2),
    shapes.dragonfly_plus(groups=2, leaves=2, spines=2, hosts=4),
    shapes.hamming_mesh(boards=(2, 2), board=(2, 2)),
]


def test_it_is_an_attribute_of_the_package() -> None:
    assert zc.topology.Topology is Topology


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ring", "halving", "direct"])
@pytest.mark.parametrize("topology", SIXTEEN, ids=str)
def test_sixteen_hosts_as_simgrid_finds(topology: Topology, plan: str) -> None:
    seconds = judged(topology, 256 * MIB, plan)
    assert topology.predict(256 * MIB, plan=plan) == pytest.approx(seconds, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "plan"),
    [
        (shapes.torus(8, 8), "ring"),
        (shapes.torus(8, 8), "halving"),
        (shapes.fat_tree(radix=8, levels=3), "ring"),
        (shapes.fat_tree(radix=8, levels=3), "halving"),
        (shapes.tree(radix=9, levels=2), "ring"),
        (shapes.tree(radix=9, levels=2), "halving"),
        (shapes.tree(radix=9, levels=2), "direct"),
    ],
    ids=str,
)
def test_sixty_four_hosts_as_simgrid_finds(topology: Topology, plan: str) -> None:
    hosts = topology.hosts[:64]
    seconds = judged(topology, 256 * MIB, plan, hosts)
    assert topology.predict(256 * MIB, plan=plan, hosts=hosts) == pytest.approx(seconds, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ring", "halving"])
def test_shuffled_ranks_as_simgrid_finds(plan: str) -> None:
    topology = shapes.torus(4, 4)
    hosts = random.Random(1).sample(list(topology.hosts), 16)
    assert topology.predict(256 * MIB, plan=plan, hosts=hosts) == pytest.approx(
        judged(topology, 256 * MIB, plan, hosts), rel=0.15
    )


@pytest.mark.slow
def test_simgrid_with_its_own_model_of_tcp() -> None:
    """SimGrid's default model has 13.01 times the latency and 0.97 of the bandwidth that a link is given."""
    plain, slowed = shapes.torus(8, 8), shapes.torus(8, 8, bandwidth=0.97 * BANDWIDTH, latency=13.01 * LATENCY)
    assert slowed.predict(256 * MIB) == pytest.approx(judged(plain, 256 * MIB, "ring", model="default"), rel=0.15)


def test_a_ring_of_a_torus_reaches_the_bound() -> None:
    topology = shapes.torus(8, 8)
    order = topology.order(random.Random(0).sample(list(topology.hosts), 64))
    assert topology.predict(256 * MIB, hosts=order) == pytest.approx(topology.bound(256 * MIB), rel=0.01)


def test_the_order_of_ranks_counts_for_more_than_the_plan() -> None:
    topology = shapes.torus(8, 8)
    shuffled = random.Random(0).sample(list(topology.hosts), 64)
    assert topology.predict(256 * MIB, hosts=shuffled) > 2 * topology.predict(256 * MIB)


@pytest.mark.parametrize("plan", ["ring", "halving", "direct", "naive"])
def test_one_rank_takes_no_time(plan: str) -> None:
    assert shapes.ring(4).predict(1 << 30, plan=plan, hosts=[2]) == 0.0


def test_links_with_facts_of_their_own() -> None:
    graph = nx.Graph()
    graph.add_edge("a", "s", bandwidth=2e9, latency=1e-3)
    graph.add_edge("b", "s", links=4)
    topology = Topology(graph, hosts=["a", "b"], bandwidth=1e9, latency=1e-4)
    assert topology.predict(2e9, plan="naive") == pytest.approx(1.0011)
    assert repr(topology) == "<topology: 2 hosts, 3 nodes, 2 edges>"


def test_ranks_are_plain_numbers() -> None:
    graph = nx.Graph([("a", "x"), ("b", "x"), ("c", "y"), ("d", "y"), ("x", "y")])
    topology = Topology(graph, hosts=["a", "b", "c", "d"])
    given = ["a", "c", "b", "d", "a"]  # two ranks on a
    ranks = topology.ranks(given)
    assert sorted(ranks) == [0, 1, 2, 3, 4]
    assert [given[rank] for rank in ranks] == topology.order(given) == ["a", "a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Topology("ring"), TypeError, r"networkx.Graph.*'ring'"),
        (lambda: Topology(nx.DiGraph([(0, 1)])), TypeError, r"undirected"),
        (lambda: Topology(nx.Graph()), ValueError, r"hosts must be one or more"),
        (lambda: Topology(nx.Graph([(0, 1)]), hosts=[0, 7]), ValueError, r"7 is no node of the graph"),
        (lambda: Topology(nx.Graph([(0, 1)]), hosts=[0, 0]), ValueError, r"different nodes"),
        (lambda: Topology(nx.Graph([(0, 1), (2, 3)])), ValueError, r"not connected: 2 parts"),
        (lambda: Topology(nx.Graph([(0, 1), (1, 1)])), ValueError, r"link from 1 to itself"),
        (lambda: Topology(nx.Graph([(0, 1, {"links": 0})])), ValueError, r"links between 0 and 1 must be"),
        (lambda: Topology(nx.Graph([(0, 1, {"latency": -1})])), ValueError, r"latency must be"),
        (lambda: Topology(nx.Graph([(0, 1)]), bandwidth="fast"), ValueError, r"bandwidth must be .* not 'fast'"),  # type: ignore[arg-type]
        (lambda: shapes.ring(4).predict(1, plan="auto"), ValueError, r"plan must be one of .* not 'auto'"),
        (lambda: shapes.ring(4).predict(-1), ValueError, r"nbytes must be a number of bytes >= 0, not -1"),
        (lambda: shapes.ring(4).predict(float("nan")), ValueError, r"nbytes"),
        (lambda: shapes.ring(4).predict("256MiB"), TypeError, r"nbytes must be a number of bytes, not '256MiB'"),  # type: ignore[arg-type]
        (lambda: shapes.ring(4).predict(1, hosts=[0, 4]), ValueError, r"4 is no host of the ring of 4.*0, 1, 2, 3"),
        (lambda: shapes.ring(9).predict(1, hosts=[9]), ValueError, r"0, 1, 2, 3, 4, 5, ... \(9 in all\)"),
        (lambda: shapes.ring(4).predict(1, hosts=[0, 1, 0]), ValueError, r"host of its own, but 0 occurs twice"),
        (lambda: shapes.ring(4).predict(1, hosts=[]), ValueError, r"at least one host"),
        (lambda: shapes.tree(radix=3, levels=2).order([("switch", 1, 0)]), ValueError, r"is no host of the tree"),
        (lambda: shapes.ring(4).ranks([5]), ValueError, r"5 is no host"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
