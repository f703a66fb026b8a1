"""`ObjectRef.result` of collectives, and their timeouts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import ranks

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


async def test_a_plain_method_gives_up_waiting_and_waits_again() -> None:
    async with ranks(2) as (group, actors):
        assert await actors[0].polls(group) == ("TimeoutError", "TimeoutError")
        assert await actors[1].call(group, "barrier") is None
        assert await actors[0].finishes() is None


@pytest.mark.parametrize("kind", ["timeout=0", "timeout=0.01"])
async def test_a_timeout_of_a_plain_method(kind: str) -> None:
    async with ranks(2) as (group, actors):
        timeout = float(kind.partition("=")[2])
        with pytest.raises(zc.GroupTimeout) as raised:
            await actors[0].call_plain(group, "barrier", timeout=timeout)
        original: Any = raised.value.original  # type: ignore[attr-defined]
        assert original.missing == (1,)
        assert await actors[1].call(group, "barrier") is None
