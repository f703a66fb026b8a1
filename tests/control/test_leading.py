"""The leader as one process knows it."""

from __future__ import annotations

import asyncio

from zcactor.control.head_log import LeaderAt
from zcactor.control.leading import Leading


async def test_a_slow_reader_misses_what_lies_between() -> None:
    leading = Leading()
    leaders = leading.changes()
    assert await anext(leaders) is None
    for epoch in (1, 2, 3):
        leading.lead(LeaderAt(epoch, f"n{epoch}:1"))
    assert await anext(leaders) == (3, "n3:1")
    waiting = asyncio.ensure_future(anext(leaders))
    leading.lead(LeaderAt(3, "n3:1"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    leading.lead(None)
    assert await waiting is None
