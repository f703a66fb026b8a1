"""Loans to groups end before their results are there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import zcactor as zc

pytestmark = pytest.mark.asyncio(loop_scope="module")


@zc.actor
class Rank:
    async def writable_at_the_end(self, group: zc.Group, operation: str, count: int, times: int) -> list[bool]:
        """Whether the input may be written to at the moment at which each result is there, or its error."""
        found: list[bool] = []
        array = np.ones(count)
        for _ in range(times):
            arguments = (array,) if operation == "allgather" else (array, "sum")
            reference: Any = getattr(group, operation)(*arguments)
            reference._call.add_callback(lambda _: found.append(array.flags.writeable))
            await reference
        return found

    async def writable_after_a_mismatch(self, group: zc.Group, count: int) -> list[bool]:
        found: list[bool] = []
        array = np.ones(count + group.rank)
        reference: Any = group.allreduce(array)
        reference._call.add_callback(lambda _: found.append(array.flags.writeable))
        with pytest.raises(zc.GroupMismatch):
            await reference
        return found


@pytest.mark.parametrize("size", [2, 3])
async def test_who_has_a_result_may_write_to_the_input(size: int) -> None:
    async with zc.init(num_cpus=8, log_to_driver=False):
        ranks: list[Any] = [await Rank.spawn() for _ in range(size)]
        group = await zc.group(ranks)
        for operation in ("allreduce", "reduce_scatter", "allgather"):
            for count in (1, 2048, 2049, 100_000):
                found = await zc.get([rank.writable_at_the_end(group, operation, count, 3) for rank in ranks])
                assert found == [[True] * 3] * size, (operation, count)
        for count in (10, 20_000):
            assert await zc.get([rank.writable_after_a_mismatch(group, count) for rank in ranks]) == [[True]] * size
