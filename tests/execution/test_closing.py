"""The last step of an actor, by ``__aexit__`` or ``close()``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from zcactor.execution.closing import close_instance

done: list[str] = []


class Sync:
    def close(self) -> None:
        done.append("close")


class Async:
    async def close(self) -> None:
        done.append("async close")


class Entered(Sync):
    async def __aexit__(self, *error: object) -> None:
        done.append(f"exit {error}")


class Failing:
    def close(self) -> None:
        raise ValueError("broken")


class Odd:
    close = 3


async def closed(instance: Any) -> list[str]:
    done.clear()

    async def run(function: Callable[[], Any]) -> Any:
        done.append("in the thread")
        return function()

    await close_instance(instance, "Odd(a)", run, asyncio.create_task)
    return list(done)


async def test_each_way_to_end() -> None:
    assert await closed(Sync()) == ["in the thread", "close"]
    assert await closed(Async()) == ["async close"]
    assert await closed(Entered()) == ["exit (None, None, None)"]
    assert await closed(Odd()) == await closed(object()) == await closed(None) == []


async def test_what_it_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await closed(Failing()) == ["in the thread"]
    assert "Odd(a) raised while it was being closed" in caplog.text and "ValueError: broken" in caplog.text
