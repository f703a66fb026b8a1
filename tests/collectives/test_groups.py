"""The groups of a process: messages for members that it does not have, or that cannot be right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import Rank, everywhere, ranks
from zcactor.collectives.founding import KEY_NBYTES
from zcactor.collectives.group_options import GroupOptions
from zcactor.collectives.service import GroupService
from zcactor.errors import ConnectionLost, ProtocolError, RemoteError
from zcactor.peers.seating import Misplaced
from zcactor.process.context import current

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOWHERE = bytes(KEY_NBYTES)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


async def session_of(actor: Any) -> Any:
    """The session with the process of an actor."""
    return await current().connections.connect(actor._remote.location[0])


def publication(key: bytes, source: int, seq: int) -> tuple[Any, ...]:
    """The arguments of a message for rank 0."""
    return (key, 0, source, seq, "barrier()", False, None, b"", 0, b"")


async def test_messages_for_unknown_groups_change_nothing() -> None:
    actor: Any = await Rank.spawn()
    before = await actor.facts()
    session, requests = await session_of(actor), current().requests
    requests.send(session, GroupService.publish, publication(NOWHERE, 1, 0))
    requests.send(session, GroupService.piece, (NOWHERE, 0, 1, 0, b"x"))
    requests.send(session, GroupService.report, (NOWHERE, 0, 1, 0, None))
    requests.send(session, GroupService.broken, (NOWHERE, 0, "actor", "cause"))
    requests.send(session, GroupService.superseded, (NOWHERE[:16], 3))
    requests.send(session, GroupService.forget, (NOWHERE,))
    assert await requests.ask(session, GroupService.publish_with, *(*publication(NOWHERE, 1, 0), 1, 0, 8)) is False
    assert await requests.ask(session, GroupService.offer, NOWHERE, 0, 1, 0, 1, 0, 8) is False
    assert await requests.ask(session, GroupService.facts, NOWHERE) is None
    assert not session.pending
    assert await actor.facts() == before
    await zc.kill(actor)


@pytest.mark.parametrize(("source", "seq"), [(0, 0), (2, 0), (-1, 0), (1, -1)])
async def test_publications_of_ranks_that_are_none_are_refused(source: int, seq: int) -> None:
    async with ranks(2) as (group, actors):
        session, requests = await session_of(actors[0]), current().requests
        requests.send(session, GroupService.publish, publication(group._key, source, seq))
        with pytest.raises(RemoteError) as raised:
            await requests.ask(session, GroupService.publish_with, *(*publication(group._key, source, seq), 0, 0, 0))
        assert isinstance(raised.value.original, ProtocolError)
        assert await everywhere(actors, "call", group, "barrier") == [None, None]


async def test_a_repeated_publication_is_refused() -> None:
    async with ranks(3) as (group, actors):
        called = actors[0].next_call()
        waiting = actors[0].call(group, "barrier")
        await called
        session, requests = await session_of(actors[0]), current().requests
        for _ in range(2):
            requests.send(session, GroupService.publish, publication(group._key, 1, 0))
        await actors[0].pid()
        assert not waiting.done()
        assert await zc.get([actor.call(group, "barrier") for actor in actors[1:]]) == [None, None]
        assert await waiting is None
        assert await everywhere(actors, "call", group, "barrier") == [None] * 3


async def test_one_of_two_connections_ends() -> None:
    async with ranks(2) as (group, actors):
        await actors[0].leave_connection(group, 1, replaced=True)
        assert await everywhere(actors, "call", group, "barrier") == [None, None]
        for rank, actor in enumerate(actors):  # either end notices it
            await actor.leave_connection(group, 1 - rank, replaced=False)
        for kind, text in await everywhere(actors, "raises", group, "barrier"):
            assert kind == "GroupBroken"
            assert "a connection to its process broke" in text
        group = await group.reform()
        assert await everywhere(actors, "call", group, "barrier") == [None, None]


async def test_an_actor_that_is_not_where_it_was_said_to_be() -> None:
    actor: Any = await Rank.spawn()
    process = current()
    host, index = actor._remote.location
    with pytest.raises(RemoteError) as raised:
        seat = _seat(actor._remote.actor_id, host, index + 1, "Rank(elsewhere)")
        await process.groups().found(bytes([1]) * KEY_NBYTES, 0, [seat], GroupOptions(False))
    assert type(raised.value.original) is Misplaced
    with pytest.raises(ConnectionLost):
        seat = _seat(actor._remote.actor_id, bytes(16), index, "x")
        await process.groups().found(bytes([2]) * KEY_NBYTES, 0, [seat], GroupOptions(False))
    assert (await actor.facts())[3] == 0
    await zc.kill(actor)


async def test_a_group_that_is_not_made_keeps_no_connection() -> None:
    actors: list[Any] = [await Rank.spawn() for _ in range(2)]
    process: Any = current()
    groups, kept = process.groups(), process.sessions.kept
    gone = _seat(actors[1]._remote.actor_id, bytes(range(16)), 2, "gone")
    groups._hosts.by_index[99] = SimpleNamespace(info=SimpleNamespace(actor_id=b"own"))
    try:
        with pytest.raises(ConnectionLost):
            await groups.join(bytes([3]) * KEY_NBYTES, 0, [_seat(b"own", process.process, 99, "own"), gone])
    finally:
        del groups._hosts.by_index[99]
        groups.forget(bytes([3]) * KEY_NBYTES)
    assert not kept
    for actor in actors:
        await zc.kill(actor)


def _seat(*fields: Any) -> Any:
    from zcactor.peers.seating import Seat

    return Seat(*fields)


async def test_figures_count_operations_and_bytes() -> None:
    async with ranks(2) as (group, actors):
        before = await zc.stats(actors[0])
        await everywhere(actors, "call", group, "allreduce", [1.0, 2.0])
        after = await zc.stats(actors[0])
        assert after.collectives == before.collectives + 1
        assert after.bytes_reduced == before.bytes_reduced + 2 * 16


@pytest.mark.parametrize(("nbytes", "at_once"), [(1 << 20, True), ((1 << 20) + 1, False), (None, False)])
async def test_short_work_needs_no_thread(nbytes: int | None, at_once: bool) -> None:
    work = current().groups().work
    threads: list[int] = []
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    work(lambda: threads.append(get_ident()), done.set_result, nbytes)
    assert done.done() is at_once
    assert await done is None
    assert (threads == [get_ident()]) is at_once
    failed: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    work(lambda: threads.remove(0), failed.set_result, nbytes)
    assert type(await failed) is ValueError
