"""The wait for nodes that start in the place of others."""

from __future__ import annotations

import asyncio

import pytest

from tests.control.agents import FakePool
from zcactor.control.membership import Successors
from zcactor.control.node_table import NodeRecord, facts_of
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId

FACTS = facts_of("n@host:1", ("local",), "machine n")
PATIENCE = 600.0


def node(letter: bytes) -> NodeRecord:
    return NodeRecord(ProcessId(letter * 16), FakePool(), FACTS)


async def test_a_node_leaves_and_another_follows() -> None:
    successors, leaving, other, following = Successors(), node(b"a"), node(b"b"), node(b"c")
    left = asyncio.Event()
    waiting = asyncio.create_task(successors.after(leaving, left.set, PATIENCE))
    await left.wait()
    assert successors.are_expected_for(leaving)
    assert not successors.are_expected_for(other)
    leaving.gone.set()
    successors.joined(other, "")
    successors.joined(following, leaving.id)
    successors.joined(other, leaving.id)  # another that says so is one node more
    assert await waiting is following
    assert not successors.are_expected_for(leaving)


async def test_a_node_leaves_and_none_follows() -> None:
    successors, leaving = Successors(), node(b"a")
    assert await successors.after(leaving, leaving.gone.set, None) is None
    assert not successors.are_expected_for(leaving)


async def test_a_node_that_does_not_come_back() -> None:
    successors, leaving = Successors(), node(b"a")
    with pytest.raises(ConnectionLost, match="has left and did not start again in 0 s"):
        await successors.after(leaving, leaving.gone.set, 0.0)
    assert not successors.are_expected_for(leaving)
