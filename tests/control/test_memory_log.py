"""The log in memory, and candidates that wait for it."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.conformance.head_log import ONE, TWO, HeadLogTests, Make
from tests.control.agents import turns
from zcactor.control.memory_log import MemoryBook, MemoryLog


class TestMemoryLog(HeadLogTests):
    """The suite for `MemoryLog`."""

    @pytest.fixture
    def make(self) -> Make:
        book = MemoryBook()
        return lambda: MemoryLog(book)


async def test_a_log_of_its_own() -> None:
    first, second = MemoryLog(), MemoryLog()
    term = await first.campaign(ONE)
    assert (await second.campaign(TWO)).epoch == term.epoch == 1
    assert term.valid_until() == math.inf


@pytest.mark.parametrize("when", ["while it waits", "when it is its turn"])
async def test_a_candidate_that_gives_up(when: str) -> None:
    book = MemoryBook()
    first, second, third = MemoryLog(book), MemoryLog(book), MemoryLog(book)
    term = await first.campaign(ONE)
    giving_up = asyncio.ensure_future(second.campaign(TWO))
    await turns()
    waiting = asyncio.ensure_future(third.campaign(TWO))
    await turns()
    if when == "while it waits":
        giving_up.cancel()
        await turns()
        await first.resign(term)
    else:
        await first.resign(term)
        giving_up.cancel()
    await turns()
    assert giving_up.cancelled()
    assert (await waiting).epoch == 2
