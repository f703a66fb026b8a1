"""Making groups, from other threads and by actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import Rank, everywhere, ranks
from zcactor.collectives.founding import checked

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


@zc.actor
class Founder:
    """An actor that makes a group of others and itself."""

    async def found(self, others: list[Any]) -> Any:
        """Make a group, and call a collective in it."""
        group = await zc.group([zc.current_actor().handle, *others])
        calls = [other.call(group, "allreduce", [1]) for other in others]
        result = await group.allreduce([1])
        await zc.get(calls)
        return group, int(result[0])


async def test_a_group_of_another_thread() -> None:
    async with ranks(2) as (_, actors):

        async def make() -> zc.Group:
            group = await zc.group(actors)
            plan = await group.explain(10)
            assert plan.plan == "eager"
            return group

        group = await asyncio.to_thread(lambda: asyncio.run(make()))
        assert await everywhere(actors, "call", group, "barrier") == [None, None]


@pytest.mark.slow
async def test_an_actor_makes_a_group_with_itself() -> None:
    founder: Any = await Founder.spawn()
    others: list[Any] = [await Rank.spawn() for _ in range(2)]
    group, total = await founder.found(others)
    assert total == 3 and group.size == 3
    # The value outlives the founder's own, and so do the members.
    assert (await others[0].facts())[3] == 1


async def test_actors_are_checked_first() -> None:
    with pytest.raises(ValueError, match="here: there are no actors"):
        checked("here", [])
    with pytest.raises(TypeError, match=r"here: actors\[0\] is of type int"):
        checked("here", [1])
