"""`zcactor.topology.orders`: orders are permutations, and better than what chance finds."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zcactor import topology as shapes
from zcactor.topology import Topology, orders, plans

NETWORKS = [
    shapes.torus(4, 4),
    shapes.torus(3, 5),
    shapes.mesh(4, 4),
    shapes.mesh(3, 5),
    shapes.mesh(2, 3, 4),
    shapes.tree(radix=3, levels=4),
    shapes.fat_tree(radix=4, levels=3),
    shapes.fat_tree(radix=4, levels=3, blocking=2),
    shapes.dragonfly(groups=5, routers=2, hosts=2),
    shapes.hamming_mesh(boards=(2, 3), board=(2, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("topology", NETWORKS, ids=str)
def test_no_random_order_is_better_by_a_tenth(topology: Topology) -> None:
    rng, hosts = random.Random(7), list(topology.hosts)
    rng.shuffle(hosts)
    number = {host: index for index, host in enumerate(topology.hosts)}
    (step,) = plans.steps("ring", len(hosts))

    def seconds(order: list[Hashable]) -> float:
        return orders.seconds(topology._arcs, [number[host] for host in order], step.flows, step.part * (64 << 20))

    best = seconds(topology.order(hosts))
    for _ in range(1000):
        rng.shuffle(hosts)
        assert best <= 1.1 * seconds(hosts)


@pytest.mark.parametrize("dims", [(4, 4), (2, 7), (3, 4), (6, 5), (2, 3, 4), (2, 2)])
def test_a_mesh_with_an_even_side_has_a_closed_walk(dims: tuple[int, ...]) -> None:
    topology = shapes.mesh(*dims)
    order = topology.order(random.Random(1).sample(list(topology.hosts), len(topology.hosts)))
    if len(order) > 3:
        assert all(
            topology.graph.has_edge(one, other) for one, other in zip(order, [*order[1:], order[0]], strict=True)
        )


@pytest.mark.slow
@given(st.permutations(list(range(12))), st.integers(1, 12))
def test_orders_are_permutations(hosts: list[int], count: int) -> None:
    topology = shapes.mesh(3, 4)
    assert sorted(topology.order(hosts[:count])) == sorted(hosts[:count])  # type: ignore[type-var]


def test_hosts_of_a_switch_stay_together_in_any_graph() -> None:
    graph = nx.Graph()
    for host in range(12):
        graph.add_edge(host, f"leaf {host % 3}")
    graph.add_edges_from((f"leaf {leaf}", "spine") for leaf in range(3))
    topology = Topology(graph, hosts=range(12))
    leaves = [host % 3 for host in topology.order()]  # type: ignore[operator]
    assert sum(one != other for one, other in itertools.pairwise(leaves)) == 2


def test_the_given_order_stays_where_nothing_is_better() -> None:
    graph = nx.Graph([("a", "c"), ("c", "b"), ("b", "d"), ("d", "a")])
    topology = Topology(graph, hosts=["a", "b", "c", "d"])
    order = topology.order(["a", "c", "b", "d"])
    assert topology.predict(1 << 20, hosts=order) == topology.predict(1 << 20, hosts=["a", "c", "b", "d"])


def test_few_hosts_need_no_order() -> None:
    topology = shapes.ring(8)
    assert topology.order([5, 2]) == [5, 2]
    assert topology.order([3]) == [3]


def test_seconds_of_a_step() -> None:
    arcs = shapes.chain(3, bandwidth=1e9, latency=1e-3)._arcs
    assert orders.seconds(arcs, [0, 1, 2], [(0, 2)], 1e9) == pytest.approx(1.002)
    assert orders.seconds(arcs, [0, 1, 2], [], 1e9) == pytest.approx(2.002)
