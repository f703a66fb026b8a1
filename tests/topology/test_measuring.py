"""`zcactor.topology.measuring`: rounds of pairs, trees that fit, and a measured cluster of this machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

import zcactor as zc
from tests.cluster.hosts import Hosts
from zcactor.topology import Topology
from zcactor.topology.measuring import MeasuredPair, fitted, rounds


@pytest.mark.parametrize("count", range(1, 10))
def test_rounds_have_each_pair_once(count: int) -> None:
    found = rounds(count)
    pairs = [tuple(sorted(pair)) for each in found for pair in each]
    assert sorted(pairs) == list(combinations(range(count), 2))
    for each in found:
        players = [player for pair in each for player in pair]
        assert len(set(players)) == len(players)


def test_alike_pairs_make_a_star() -> None:
    pairs = {pair: MeasuredPair(4e-5 * (1 + index / 20), 1e9) for index, pair in enumerate(combinations("abcd", 2))}
    topology = Topology(**fitted("abcd", pairs))
    assert (topology.hosts, topology.diameter, len(topology.graph)) == (("a", "b", "c", "d"), 2, 5)
    assert topology.latency == pytest.approx(1.125e-5)
    assert topology.bandwidth == 1e9


def test_near_pairs_share_a_switch() -> None:
    racks = {"a": 0, "b": 1, "c": 0, "d": 1}
    pairs = {
        (one, other): MeasuredPair(2e-5, 4e9) if racks[one] == racks[other] else MeasuredPair(6e-5, 1e9)
        for one, other in combinations(racks, 2)
    }
    topology = Topology(**fitted(list(racks), pairs))
    assert topology.diameter == 4
    assert topology.order(["a", "b", "c", "d"]) in (["a", "c", "b", "d"], ["a", "c", "d", "b"])
    # The round trip and the rate that were measured come out again.
    assert 2 * topology.predict(0, plan="naive", hosts=["a", "b"]) == pytest.approx(6e-5)
    assert topology.predict(1e9, plan="naive", hosts=["a", "c"]) == pytest.approx(0.25, rel=0.01)


def test_one_host_has_nothing_to_measure() -> None:
    assert Topology(**fitted(["a"], {})).hosts == ("a",)


@pytest.mark.slow
async def test_the_nodes_of_a_cluster() -> None:
    async with zc.init():
        nodes = await zc.nodes()
        topology = await Topology.measured(nodes)
        assert topology.hosts == tuple(node.node_id for node in nodes)


@pytest.mark.slow
async def test_bad_nodes() -> None:
    async with zc.init():
        (node,) = await zc.nodes()
        with pytest.raises(TypeError, match=r"nodes as zc.nodes\(\) lists them, not 'node'"):
            await Topology.measured(["node"])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="one or more different nodes"):
            await Topology.measured([])
        with pytest.raises(ValueError, match="one or more different nodes"):
            await Topology.measured([node, node])
        with pytest.raises(ValueError, match=f"node {node.node_id[:8]} is dead: leave it out"):
            await Topology.measured([replace(node, alive=False)])


@pytest.mark.slow
def test_three_nodes_are_measured_and_ordered() -> None:
    with Hosts() as hosts:
        head = hosts.start()
        hosts.start("b", head)
        hosts.start("a", head)
        source = """
from zcactor.topology.ranks import order_of_ranks
@zc.actor
class Idle:
    def ping(self): pass
async def main():
    async with zc.init(ADDRESS):
        nodes = await zc.nodes()
        topology = await zc.topology.Topology.measured(nodes)
        actors = [await Idle.options(node=node.node_id).spawn() for node in (*nodes, *nodes)]
        tell(found=dict(nodes=[node.node_id for node in nodes], hosts=topology.hosts, diameter=topology.diameter,
             seconds=topology.predict(1 << 20), order=await order_of_ranks(actors, "topology")))
zc.run(main())
"""
        with hosts.program(source, head.record.address) as program:
            found = program.told("found", 60.0)
            assert found["hosts"] == found["nodes"]
            assert found["diameter"] in (2, 4)
            assert found["seconds"] > 0
            order = found["order"]
            assert sorted(order) == list(range(6))
            # The two actors of each node are neighbours.
            assert all(abs(order[place] - order[place + 1]) == 3 for place in (0, 2, 4))
            assert program.status() == 0
