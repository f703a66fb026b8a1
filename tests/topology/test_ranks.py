"""`zcactor.topology.ranks`: orders of actors as plain numbers."""

from __future__ import annotations

import networkx as nx
import pytest

import zcactor as zc
from zcactor import topology as shapes
from zcactor.topology import Topology
from zcactor.topology.ranks import order_of_ranks


@zc.actor
class Idle:
    """An actor that does nothing."""

    @zc.method
    def ping(self) -> None:
        """Answer."""


@pytest.mark.slow
async def test_orders() -> None:
    async with zc.init():
        actors = [await Idle.spawn() for _ in range(4)]
        (node,) = await zc.nodes()
        assert await order_of_ranks(actors, "given") == [0, 1, 2, 3]
        assert await order_of_ranks(actors, "topology") == [0, 1, 2, 3]
        one, _, opposite, _ = await order_of_ranks(actors, shapes.mesh(2, 2))
        assert {one, opposite} in ({0, 3}, {1, 2})
        for name in (node.node_id, node.host):
            known = Topology(nx.Graph([(name, "s"), ("other", "s")]), hosts=[name, "other"])
            assert await order_of_ranks(actors, known) == [0, 1, 2, 3]


@pytest.mark.slow
async def test_bad_orders() -> None:
    async with zc.init():
        actors = [await Idle.spawn() for _ in range(3)]
        with pytest.raises(ValueError, match="order must be 'given', 'topology' or a zc.topology.Topology, not 'best'"):
            await order_of_ranks(actors, "best")
        with pytest.raises(TypeError, match="order must be"):
            await order_of_ranks(actors, 3)
        with pytest.raises(ValueError, match="3 actors do not fit the 2 hosts"):
            await order_of_ranks(actors, shapes.ring(2))
        foreign = Topology(nx.Graph([("a", "s"), ("b", "s")]), hosts=["a", "b"])
        with pytest.raises(ValueError, match=r"neither node \w+ nor its host .* is a host of <topology"):
            await order_of_ranks(actors, foreign)
