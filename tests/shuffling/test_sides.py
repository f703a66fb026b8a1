"""`zcactor.shuffling.sides`: parts stay in the process of their mapper, and a merge empties the list of its parts."""

from __future__ import annotations

from typing import Any

import pytest

import zcactor as zc
from zcactor.shuffling.sides import ShuffleService


@zc.actor
class Calling:
    """An actor that calls the sides on itself, as its process's service does."""

    @zc.method
    async def partition_itself(self, me: Any, method: str, count: int) -> tuple[int, list[Any]]:
        """The parts, by value."""
        refs = await ShuffleService().partition(me, method, count, [])
        return len(refs), await zc.get(refs)

    @zc.method
    async def merge_itself(self, me: Any) -> tuple[int, Any]:
        """The number of references left in the list, and the result."""
        refs = [zc.put(1), zc.put(2)]
        (merged,) = await ShuffleService().merge(me, "add", refs)
        return len(refs), await merged

    @zc.method
    async def parts(self, count: int) -> tuple[Any, ...]:
        """Parts, one of them a reference already."""
        return (zc.put("ref"), *range(count - 1))

    @zc.method
    async def none(self, count: int) -> list[Any]:
        """No part."""
        return []

    @zc.method
    async def add(self, parts: list[int]) -> int:
        """The sum of the parts."""
        return sum(parts)


@pytest.mark.slow
async def test_parts_and_references() -> None:
    async with zc.init():
        actor = await Calling.spawn()
        assert await actor.partition_itself(actor, "parts", 3) == (3, ["ref", 0, 1])


@pytest.mark.slow
async def test_a_wrong_count_names_the_actor() -> None:
    async with zc.init():
        actor = await Calling.spawn()
        with pytest.raises(ValueError, match=r"none\(\) of Calling\(\w+\) returned 0 parts for 3 reducers"):
            await actor.partition_itself(actor, "none", 3)


@pytest.mark.slow
async def test_a_merge_lets_go_of_its_references() -> None:
    async with zc.init():
        actor = await Calling.spawn()
        assert await actor.merge_itself(actor) == (0, 3)
