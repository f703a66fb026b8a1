"""Exchanges: arrays that are shared, and those that are not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import zcactor as zc
from tests import hostile
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


@pytest.mark.parametrize("kind", [LookupError, hostile.Closed, hostile.Masked, SystemExit])
@pytest.mark.parametrize("written", [True, False], ids=["unpickling", "pickling"])
@pytest.mark.parametrize("operation", ["broadcast", "allgather"])
async def test_an_error_of_pickling_fails_an_operation_and_ends_no_connection(
    operation: str, written: bool, kind: type[BaseException]
) -> None:
    own, told = kind.__name__, "RuntimeError" if kind is SystemExit else kind.__name__
    async with ranks(3) as (group, actors):
        found = await everywhere(actors, "unreadable", group, operation, 5, kind, written)
        assert found == (["", told, told] if operation == "broadcast" else [told] * 3)
        found = await everywhere(actors, "unreadable", group, operation, 5_000, kind, written)
        if operation == "broadcast":
            assert found == [own, told, told]
        else:  # each rank has raised its own error, and gets no other
            assert found == [own] * 3
        assert await everywhere(actors, "call", group, "barrier") == [None] * 3
