"""The table of ranks, and what the head's membership does with it."""

from __future__ import annotations

import asyncio

import pytest

from tests.control.agents import FakeSession
from tests.control.test_membership import FACTS, NODE, Head
from zcactor.control.membership import JoinedRank, Ranks
from zcactor.errors import ConnectionLost
from zcactor.ids import ProcessId

PLAIN = {"host": "n0", "pid": 7}
OTHER = ProcessId(b"m" * 16)


def test_ranks_that_come_and_go() -> None:
    ranks = Ranks({**PLAIN, "rank": 0})
    seen: list[list[JoinedRank]] = []
    ranks.changed = lambda: seen.append(ranks.joined())
    ranks.join("c", {"host": "n2", "pid": 9, "rank": 2})
    ranks.join("x", PLAIN)
    ranks.join("b", {"host": "n1", "pid": 8, "rank": 1})
    assert ranks.joined() == [(0, "n0", 7), (1, "n1", 8), (2, "n2", 9)]
    ranks.leave("c")
    ranks.leave("c")
    ranks.leave("x")
    assert [len(each) for each in seen] == [2, 3, 2]
    ranks.join("d", {"host": "n3", "pid": 10, "rank": 2})
    assert ranks.joined()[-1] == (2, "n3", 10)


def test_a_cluster_without_ranks() -> None:
    ranks = Ranks(PLAIN)
    ranks.join("x", PLAIN)
    assert ranks.joined() == []


async def test_a_rank_that_is_started_twice() -> None:
    head = Head()
    facts = {**FACTS, "host": "n1", "pid": 42, "rank": 1}
    first = FakeSession(NODE)
    await head.by(first, head.members.join_node(facts, {"CPU": 1}))
    with pytest.raises(ConnectionLost, match="rank 1 has joined already, from n1 with pid 42; each rank of a run"):
        await head.by(FakeSession(OTHER), head.members.join_node({**facts, "pid": 43}, {"CPU": 1}))
    assert OTHER.hex() not in head.nodes.by_id
    first.closed = ConnectionLost("cut")
    head.members.session_lost(first)  # type: ignore[arg-type]
    assert head.members.ranks.joined() == []
    await head.by(FakeSession(OTHER), head.members.join_node({**facts, "pid": 43}, {"CPU": 1}))
    assert head.members.ranks.joined() == [(1, "n1", 43)]
    await head.end()


async def test_a_node_that_leaves_gives_its_rank_back() -> None:
    head = Head()
    session = FakeSession(NODE)
    await head.by(session, head.members.join_node({**FACTS, "rank": 3}, {"CPU": 1}))
    await head.by(session, head.members.leave_node(1))
    assert head.members.ranks.joined() == []
    await head.end()


async def test_the_end_of_a_run_is_told_before_the_nodes_end() -> None:
    asked: list[tuple[object, ...]] = []

    async def answer(*what: object) -> None:
        if what[1] != "ping":
            asked.append(what)

    head = Head(answer)
    for process in (NODE, OTHER):
        await head.by(FakeSession(process), head.members.join_node(FACTS, {"CPU": 1}))
    head.members.tell_over(3, "because")
    ending = asyncio.create_task(head.members.end(60.0))
    await head.process.settle()
    assert asked == [
        (NODE, "run_over", 1, 3, "because"), (OTHER, "run_over", 1, 3, "because"),
        (NODE, "end", 1, 60.0, False), (OTHER, "end", 1, 60.0, False),
    ]  # fmt: skip
    ending.cancel()
    await head.end()
