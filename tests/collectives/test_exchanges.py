"""Exchanges: arrays that are shared, and those that are not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import everywhere, ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


@pytest.mark.parametrize("process", ["own", "shared"])
async def test_a_large_array_is_shared_as_an_argument_is_and_a_small_one_copied(process: str) -> None:
    options = {"process": "shared"} if process == "shared" else {}
    async with ranks(2, **options) as (_, actors):
        group = await zc.group(actors)
        found = await everywhere(actors, "shares", group, 50_000)
        assert found == [(False, [7.0, 7.0])] * 2
        # A small one stays writable, and a later change of it is not seen by others.
        found = await everywhere(actors, "shares", group, 10)
        assert found == [(True, [7.0, 7.0])] * 2
