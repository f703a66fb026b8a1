"""Operations that one rank cannot do its part of: all ranks get the error, and the group goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import everywhere, ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")

LARGE = 50_000


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=8, log_to_driver=False, store_capacity=8 << 20) as node:
        yield node


@pytest.mark.slow
async def test_a_full_store_is_an_error_on_all_ranks() -> None:
    async with ranks(2) as (group, actors):
        filled = await actors[0].fill()
        assert filled
        for operation in ("allreduce", "reduce_scatter", "allgather"):
            errors = await everywhere(actors, "raises", group, operation, np.ones(LARGE))
            assert {name for name, _ in errors} == {"OutOfMemory"}, errors
        await actors[0].drop("filling")
        found = await everywhere(actors, "call", group, "allreduce", np.ones(LARGE))
        assert all(result[0] == 2 for result in found)


async def test_a_connection_without_write_access_gets_it_on_the_way() -> None:
    async with ranks(2) as (group, actors):
        for _ in range(2):
            await everywhere(actors, "forget_write_access")
            for operation, plan in (("allreduce", {"plan": "shared"}), ("allreduce", {}), ("allgather", {})):
                found = await everywhere(actors, "call", group, operation, np.ones(LARGE), timeout=20, **plan)
                assert all(result.sum() == 2 * LARGE for result in found)
