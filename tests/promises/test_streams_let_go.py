"""A stream that has ended keeps nothing: the memory of its arguments comes back without a garbage collection."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import zcactor as zc
from zcactor.process.context import current
from zcactor.testing import until


@zc.actor
class Source:
    def __init__(self) -> None:
        gc.disable()

    def plain(self, array: Any, end: str) -> Iterator[Any]:
        yield float(array[0])
        if end == "error":
            raise ValueError("of the generator")
        if end == "unsendable":
            yield threading.Lock()
        yield from range(100)

    async def coroutine(self, array: Any, end: str) -> AsyncIterator[Any]:
        for item in self.plain(array, end):
            yield item


@pytest.mark.parametrize("end", ["whole", "error", "unsendable", "left"])
@pytest.mark.parametrize("method", ["plain", "coroutine"])
async def test_arguments_of_a_stream_go_with_its_end(method: str, end: str) -> None:
    async with zc.init():
        source: Any = await Source.spawn()
        process: Any = current()
        sessions = process.sessions
        for number in range(5):
            array = zc.full(100_000, float(number))
            try:
                async for item in getattr(source, method)(array, end):
                    assert item is not None
                    if end == "left":
                        break
            except (ValueError, TypeError):
                assert end in ("error", "unsendable")
            del array
        await until(lambda: sum(session.leases.total for session in sessions.all()) == 0, "all leases are back")
