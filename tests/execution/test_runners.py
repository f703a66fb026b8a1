"""The table of actors in a process: their numbers, calls to actors that are not there, and the end."""

from __future__ import annotations

import asyncio

import pytest

from tests.assembly.test_process import PATIENCE, Pair, Sums, _call
from zcactor.errors import ActorDied


async def test_numbers_are_fresh_and_system_actors_are_no_programs() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (caller, owner, _):
        first, second = (owner.hosts.take_index() for _ in range(2))
        assert second == first + 1 and first not in owner.hosts.by_index
        assert [host.index for host in owner.hosts.actors()] == [first - 1]
        assert caller.hosts.actors() == [] and list(caller.hosts.by_index) == [0]


async def test_a_call_of_an_actor_that_is_not_there_says_so() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (_, owner, actor):
        host = owner.hosts.by_index.pop(actor.location[1])
        with pytest.raises(ActorDied):
            await _call(actor, "total", [1.0])
        host.close()


async def test_closing_ends_all_and_watches_none() -> None:
    async with asyncio.timeout(PATIENCE), Pair() as (_, owner, _):
        watchdog = owner.hosts.watchdog
        assert watchdog is not None and not watchdog._closed.is_set()
        (host,) = owner.hosts.actors()
        for _ in range(2):
            owner.hosts.close()
            assert not owner.hosts.by_index and host.stopping and host.instance is None
            assert watchdog._closed.is_set()
        assert host.actor_class is Sums
