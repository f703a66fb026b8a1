"""`until`: the wait for a condition."""

from __future__ import annotations

import asyncio

import pytest

from zcactor.testing import until


async def test_true_at_once() -> None:
    await until(lambda: True, "never shown", 0.0)


async def test_true_later() -> None:
    seen = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, seen.set)
    await until(seen.is_set, "the event was not set")


async def test_too_late() -> None:
    with pytest.raises(TimeoutError, match=r"^the moon is no cheese$"):
        await until(lambda: False, "the moon is no cheese", 0.01)


async def test_errors_of_the_predicate() -> None:
    with pytest.raises(ZeroDivisionError):
        await until(lambda: 1 // 0, "never shown")
