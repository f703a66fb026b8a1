"""Nodes of graphs: their graph, and the arguments that ``bind`` refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import zcactor as zc
from tests.graphs.parts import Node


@pytest.fixture
def node(zc_runtime: zc.Runtime) -> zc.Runtime:
    return zc_runtime


async def test_bad_arguments(node: zc.Runtime) -> None:
    actor: Any = await Node.spawn()
    async with zc.graph() as first:
        x = first.input()
        with pytest.raises(TypeError, match=r"Node.add\(\): "):
            actor.add.bind()
        with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
            actor.later.bind(x, d=2)
        with pytest.raises(AttributeError):
            actor.missing.bind(x)
        with pytest.raises(AttributeError):
            actor._private.bind(x)
        with pytest.raises(TypeError, match="a generator method has many results"):
            actor.items.bind(x)
        with pytest.raises(TypeError, match="a node lies within a list; give each node as an argument"):
            actor.add.bind([x])
        with pytest.raises(ValueError, match="calls of a graph have no options"):
            actor.add.options(timeout=1).bind(x)
        assert repr(x) == "<graph node input>" and repr(actor.add.bind(x)) == "<graph node Node.add>"
    async with zc.graph() as second:
        with pytest.raises(ValueError, match="belong to different graphs"):
            actor.add.bind(x, second.input())
    with pytest.raises(ValueError, match="no argument is a node, and no graph is being built"):
        actor.add.bind(1)
    actor.add.bind(x)  # a node says which graph is meant, also after its block
    with pytest.raises(TypeError, match="travels nowhere"):
        pickle.dumps(x)
    with pytest.raises(TypeError, match="travels nowhere"):
        await actor.add({"in": x})


async def test_a_node_without_nodes_belongs_to_the_graph_that_is_built(node: zc.Runtime) -> None:
    actor: Any = await Node.spawn()
    async with zc.graph() as g:
        made = actor.add.bind(1)
    assert made._graph is g
