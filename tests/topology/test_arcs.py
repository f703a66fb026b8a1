"""`zcactor.topology.arcs`: loads by numbers of paths are those of all shortest paths, listed one by one."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zcactor.topology import Topology, chain, fat_tree, ring, torus
from zcactor.topology.arcs import Arcs


def listed(topology: Topology, source: int, target: int) -> tuple[dict[tuple[object, object], float], int, float]:
    """The load of a flow of 1, its hops and its latency, from networkx's list of paths; each parallel link is a path of
    its own."""
    graph, load = topology.graph, dict[tuple[object, object], float]()
    ways = [list(itertools.pairwise(path)) for path in nx.all_shortest_paths(graph, source, target)]
    counts = [np.prod([graph.edges[pair].get("links", 1) for pair in way]) for way in ways]
    for way, count in zip(ways, counts, strict=True):
        for pair in way:
            load[pair] = load.get(pair, 0.0) + count / sum(counts)
    slowest = max(sum(graph.edges[pair].get("latency", topology.latency) for pair in way) for way in ways)
    return load, len(ways[0]), slowest


def by_pairs(topology: Topology, loads: np.ndarray) -> dict[tuple[object, object], float]:
    """The load of each arc that carries something, by the names of its nodes."""
    arcs, names = topology._arcs, {number: node for node, number in topology._number.items()}
    rows = zip(arcs.sources.tolist(), arcs.targets.tolist(), loads.tolist(), strict=True)
    return {(names[one], names[other]): load for one, other, load in rows if load}


@st.composite
def networks(draw: st.DrawFn) -> Topology:
    """Connected networks of up to 9 hosts, with parallel links and different latencies."""
    count = draw(st.integers(2, 9))
    graph = nx.Graph()
    for node in range(1, count):
        graph.add_edge(node, draw(st.integers(0, node - 1)))
    for _ in range(draw(st.integers(0, 8))):
        one, other = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        if one != other:
            graph.add_edge(one, other)
    for _, _, facts in graph.edges(data=True):
        facts["links"] = draw(st.integers(1, 3))
        if draw(st.booleans()):
            facts["latency"] = draw(st.sampled_from([1e-6, 2e-6, 5e-6]))
    return Topology(graph, hosts=range(count))


@pytest.mark.slow
@settings(max_examples=60)
@given(networks())
def test_each_flow_takes_all_shortest_paths_alike(topology: Topology) -> None:
    count = len(topology.hosts)
    expected: dict[tuple[object, object], float] = {}
    hops, slowest = 0, 0.0
    for source in range(count):
        for target in range(count):
            if source != target:
                load, length, latency = listed(topology, source, target)
                hops, slowest = max(hops, length), max(slowest, latency)
                for pair, share in load.items():
                    expected[pair] = expected.get(pair, 0.0) + share
    found = topology._arcs.load(np.arange(count), np.ones((count, count)))
    assert by_pairs(topology, found.arcs) == pytest.approx(expected)
    assert found.hops == hops
    assert found.latency == pytest.approx(slowest)


@settings(max_examples=30, deadline=None)
@given(networks())
def test_shares_are_the_loads_of_single_flows(topology: Topology) -> None:
    count = len(topology.hosts)
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    sources, targets = np.array(pairs, np.intp).T
    found = topology._arcs.shares(sources, targets)
    for flow, pair in enumerate(pairs):
        entries = slice(found.starts[flow], found.starts[flow + 1])
        loads = np.zeros(len(topology._arcs.rates))
        np.add.at(loads, found.arcs[entries], found.parts[entries])
        load, _, latency = listed(topology, *pair)
        assert by_pairs(topology, loads) == pytest.approx(load)
        assert found.latencies[flow] == pytest.approx(latency)


def test_shares_of_a_flow_between_opposite_corners() -> None:
    found = torus(4, 4)._arcs.shares(np.array([0, 0]), np.array([5, 1]))
    assert found.starts.tolist() == [0, 4, 5]
    assert found.parts.tolist() == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert (found.paths.tolist(), found.latencies.tolist()) == ([2.0, 1.0], [2e-6, 1e-6])


def test_a_flow_between_opposite_corners_spreads() -> None:
    demand = np.zeros((1, 16))
    demand[0, 5] = 3.0
    topology = torus(4, 4)
    found = topology._arcs.load(np.array([0]), demand)
    assert by_pairs(topology, found.arcs) == {(0, 1): 1.5, (0, 4): 1.5, (1, 5): 1.5, (4, 5): 1.5}
    assert (found.hops, found.latency) == (2, 2e-6)


def test_directions_are_apart() -> None:
    topology = chain(3)
    demand = np.array([[0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = topology._arcs.load(np.arange(3), demand)
    assert by_pairs(topology, found.arcs) == {(0, 1): 2.0, (1, 2): 2.0, (2, 1): 1.0, (1, 0): 1.0}


def test_nothing_flows() -> None:
    found = ring(5)._arcs.load(np.arange(5), np.zeros((5, 5)))
    assert (found.arcs.sum(), found.hops, found.latency) == (0.0, 0, 0.0)


def test_distances_are_those_of_networkx() -> None:
    topology = fat_tree(radix=4, levels=3)
    found = topology._arcs.distances(np.arange(16))
    for host in topology.hosts:
        lengths = nx.single_source_shortest_path_length(topology.graph, host)
        assert {node: found[host, number] for node, number in topology._number.items()} == lengths  # type: ignore[index]


def test_a_node_out_of_reach_has_no_distance() -> None:
    arcs = Arcs(4, np.array([[0, 1, 1], [2, 3, 1]]), np.ones(2), np.zeros(2))
    assert arcs.distances(np.array([0])).tolist() == [[0, 1, -1, -1]]


@pytest.mark.slow
def test_many_sources_are_counted_in_parts() -> None:
    topology = ring(1500)  # 3,000 arcs by 1,500 sources: several chunks
    assert topology.diameter == 750
