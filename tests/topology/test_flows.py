"""`zcactor.topology.flows`: rates that are fair, steps that wait for those they read from, judged by SimGrid."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topology.simgrid_judge import judged
from tests.topology.test_arcs import networks
from zcactor import topology as shapes
from zcactor.topology import Topology, flows, plans
from zcactor.topology.flows import Flows
from zcactor.topology.plans import Exchange

RATE = 1e9
DELAY = 1e-3
MIB = 1 << 20


def rates(topology: Topology, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The rates of flows between `pairs` of hosts while all are under way, in parts of a link's."""
    sources, targets = np.array(pairs, np.intp).T
    found = Flows(topology._arcs, sources, targets).rates(np.arange(len(pairs)))
    return [float(rate) / topology.bandwidth for rate in found]


def seconds(topology: Topology, steps: Sequence[Exchange], nbytes: float = RATE, grain: float = 0.0) -> float:
    return flows.seconds(topology._arcs, range(len(topology.hosts)), steps, nbytes, grain)


def chain(count: int, latency: float = 0.0) -> Topology:
    return shapes.chain(count, bandwidth=RATE, latency=latency)


# ---------------------------------------------------------------- rates


def test_a_single_flow_has_all_of_its_links() -> None:
    assert rates(chain(4), [(0, 3)]) == pytest.approx([1.0])


def test_a_flow_over_two_paths_has_the_links_of_both() -> None:
    assert rates(shapes.torus(4, 4), [(0, 5)]) == pytest.approx([2.0])


def test_two_flows_share_a_link_alike() -> None:
    assert rates(chain(4), [(0, 2), (1, 3)]) == pytest.approx([0.5, 0.5])


def test_directions_are_apart() -> None:
    assert rates(chain(2), [(0, 1), (1, 0)]) == pytest.approx([1.0, 1.0])


def test_one_that_is_held_up_elsewhere_leaves_the_rest() -> None:
    """Three flows share the first link. One of them goes on by the second, where it leaves two thirds to another."""
    graph = chain(4).graph.copy()
    topology = Topology(graph, hosts=range(4), bandwidth=RATE, latency=0.0)
    found = Flows(topology._arcs, np.array([0, 0, 0, 1]), np.array([1, 1, 2, 2])).rates(np.arange(4))
    assert found / RATE == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3])


def test_half_the_part_at_twice_the_latency() -> None:
    assert rates(chain(3, DELAY), [(0, 1), (0, 2)]) == pytest.approx([2 / 3, 1 / 3])


def test_each_path_is_a_connection_of_its_own() -> None:
    """In a square the flow between opposite corners has two paths, one of them by the link that the other flow takes:
    each of the two connections there gets by its latency."""
    square = shapes.ring(4, latency=DELAY)
    assert rates(square, [(0, 2), (0, 1)]) == pytest.approx([2 / 3, 2 / 3])


def test_of_some_flows_only() -> None:
    found = Flows(chain(4)._arcs, np.array([0, 1, 2]), np.array([2, 3, 3]))
    assert found.rates(np.array([0, 2])) / RATE == pytest.approx([1.0, 1.0])
    assert found.rates(np.empty(0, np.intp)).tolist() == []


@settings(max_examples=60, deadline=None)
@given(networks(), st.data())
def test_each_flow_is_held_up_by_one_full_link(topology: Topology, data: st.DataObject) -> None:
    """No link carries more than it can, so no flow beats the links on its way. And each flow meets a full one."""
    hosts = st.integers(0, len(topology.hosts) - 1)
    pairs = data.draw(st.lists(st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=9))
    sources, targets = np.array(pairs, np.intp).T
    arcs = topology._arcs
    found = Flows(arcs, sources, targets).rates(np.arange(len(pairs)))
    shares = arcs.shares(sources, targets)
    flow = np.repeat(np.arange(len(pairs)), np.diff(shares.starts))
    load = np.bincount(shares.arcs, shares.parts * found[flow], minlength=len(arcs.rates))
    assert (load <= arcs.rates * (1 + 1e-6)).all()
    full = load >= arcs.rates * (1 - 1e-6)
    assert set(flow[full[shares.arcs]].tolist()) == set(range(len(pairs)))


# ---------------------------------------------------------------- steps


def test_nothing_to_do() -> None:
    assert seconds(chain(3), []) == 0.0


def test_latency_comes_before_the_bytes() -> None:
    assert seconds(chain(3, DELAY), [Exchange(((0, 2),), 1.0)]) == pytest.approx(1.0 + 2 * DELAY)
    assert seconds(chain(3, DELAY), [Exchange(((0, 2),), 1.0)], nbytes=0) == pytest.approx(2 * DELAY)


def test_a_flow_that_ends_leaves_its_part() -> None:
    """Both share the middle link until the shorter has ended, at 1 s; of the longer half is left then."""
    steps = [Exchange(((0, 2),), 0.5), Exchange(((1, 3),), 1.0)]
    assert seconds(chain(4), steps) == pytest.approx(1.5)


def test_a_rank_waits_for_those_it_reads_from() -> None:
    steps = [Exchange(((0, 1),), 1.0), Exchange(((1, 2),), 1.0), Exchange(((2, 3),), 1.0)]
    assert seconds(chain(4), steps) == pytest.approx(3.0)


def test_a_rank_goes_on_before_others_have_finished_the_step() -> None:
    """Ranks 2 and 3 are done with the first step, which has little for them, long before ranks 0 and 1 are."""
    graph = chain(4).graph.copy()
    graph.edges[0, 1]["bandwidth"] = RATE / 10
    topology = Topology(graph, hosts=range(4), bandwidth=RATE, latency=0.0)
    steps = [Exchange(((0, 1), (3, 2)), 1.0), Exchange(((2, 3),), 9.0)]
    assert seconds(topology, steps) == pytest.approx(10.0)


def test_a_rank_reads_from_all_when_the_last_of_them_is_ready() -> None:
    steps = [Exchange(((0, 1),), 1.0), Exchange(((1, 2), (3, 2)), 1.0)]
    assert seconds(chain(4), steps) == pytest.approx(2.0)


def test_steps_are_repeated() -> None:
    assert seconds(chain(2, DELAY), [Exchange(((0, 1), (1, 0)), 0.25, 6)]) == pytest.approx(6 * (0.25 + DELAY))


def test_all_to_all() -> None:
    assert seconds(chain(3), [Exchange((), 1.0)]) == pytest.approx(2.0)


@pytest.mark.parametrize("plan", plans.PLANS)
@pytest.mark.parametrize("ranks", [2, 3, 7, 8])
def test_flows_that_are_alike_take_as_long_as_the_steps_together(plan: str, ranks: int) -> None:
    star = Topology(nx.star_graph(ranks), hosts=range(1, ranks + 1))
    steps = plans.steps(plan, ranks)
    together = sum(
        step.times * (step.part * MIB * (1 if step.flows else ranks - 1) / star.bandwidth + 2 * star.latency)
        for step in steps
    )
    assert flows.seconds(star._arcs, range(ranks), steps, MIB) == pytest.approx(together)


@settings(max_examples=30, deadline=None)
@given(networks(), st.sampled_from(plans.PLANS), st.integers(0, MIB))
def test_no_plan_beats_the_links_into_a_host(topology: Topology, plan: str, nbytes: int) -> None:
    ranks, arcs = len(topology.hosts), topology._arcs
    into = max(float(arcs.rates[arcs.targets == host].sum()) for host in range(ranks))
    assert seconds(topology, plans.steps(plan, ranks), nbytes) >= plans.volume(plan, ranks) * nbytes / into * (1 - 1e-6)


@pytest.mark.parametrize("plan", ["ring", "halving"])
def test_a_grain_changes_little(plan: str) -> None:
    topology = shapes.torus(4, 4)
    hosts = random.Random(1).sample(range(16), 16)
    steps = plans.steps(plan, 16)
    exact = flows.seconds(topology._arcs, hosts, steps, 256 * MIB)
    grain = exact / flows.pieces(16, steps)
    assert flows.seconds(topology._arcs, hosts, steps, 256 * MIB, grain) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(("plan", "most"), [("ring", 128), ("halving", 2047), ("direct", 32), ("naive", 32)])
def test_many_flows_are_not_followed(plan: str, most: int) -> None:
    assert flows.pieces(most, plans.steps(plan, most)) > 0
    assert flows.pieces(most + 1, plans.steps(plan, most + 1)) == 0


# ---------------------------------------------------------------- judged


def shuffled(topology: Topology, ranks: int, seed: int = 1) -> list[Hashable]:
    return random.Random(seed).sample(list(topology.hosts), ranks)


JUDGED: list[Any] = [
    (shapes.dragonfly(groups=8, routers=4, hosts=2), "halving", 64, None),  # 16 % by steps together
    (shapes.dragonfly(groups=8, routers=4, hosts=2), "halving", 49, 1),
    (shapes.dragonfly_plus(groups=4, leaves=4, spines=2, hosts=4), "halving", 64, 1),
    (shapes.torus(8, 8), "halving", 49, 1),  # 25 %
    (shapes.torus(8, 8), "ring", 64, 2),  # 18 %
    (shapes.mesh(8, 8), "halving", 64, 1),
    (shapes.hamming_mesh(boards=(4, 4), board=(2, 2)), "halving", 49, 1),  # 18 %
    (shapes.fat_tree(radix=8, levels=3, blocking=2), "halving", 64, 1),
    (shapes.fat_tree(radix=8, levels=3, blocking=2), "ring", 49, 2),
    (shapes.chain(16), "ring", 16, 1),  # 28 %
    (shapes.tree(radix=3, levels=4), "direct", 12, None),  # 11 %
]


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "plan", "ranks", "seed"), JUDGED, ids=str)
def test_as_simgrid_finds(topology: Topology, plan: str, ranks: int, seed: int | None) -> None:
    hosts = list(topology.hosts[:ranks]) if seed is None else shuffled(topology, ranks, seed)
    found = judged(topology, 256 * MIB, plan, hosts)
    assert topology.predict(256 * MIB, plan=plan, hosts=hosts) == pytest.approx(found, rel=0.07)
