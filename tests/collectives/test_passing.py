"""Groups on their way to other processes, and messages that are malformed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import zcactor as zc
from tests.collectives.ranks import everywhere, ranks
from zcactor.collectives.passing import unpack_group
from zcactor.errors import ProtocolError

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def node() -> AsyncIterator[zc.Runtime]:
    async with zc.init(num_cpus=4, log_to_driver=False) as node:
        yield node


async def test_a_group_travels_nested_and_comes_back() -> None:
    async with ranks(2) as (group, actors):
        await everywhere(actors, "keep", "group", {"here": [group]})
        reference = zc.put(group)
        assert await reference == group
        assert copy.copy(group) is group and copy.deepcopy(group) is group
        with pytest.raises(TypeError, match="groups travel inside calls"):
            pickle.dumps(group)
        assert await actors[0].give(group) == group


@pytest.mark.parametrize(
    "fields",
    [
        1, [], [b"", 0, b"", [False, 0.0], []], [bytes(24), "0", b"", [False, 0.0], [b""]],
        [bytes(24), 0, b"", 1, [b""]], [bytes(24), 0, b"", [False, 0.0], []],
        [bytes(24), 0, b"", [False, 0], [b""]], [bytes(24), 0, b"", [0, 0.0], [b""]],
    ],
)  # fmt: skip
async def test_malformed_groups_are_refused(fields: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        unpack_group(None, memoryview(msgspec.msgpack.encode(fields)))
