"""The last step of an actor, by ``__aexit__`` or ``close()``."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Generator
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


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


class Decorated:
    @traced
    async def close(self) -> None:
        done.append("decorated close")


class DecoratedExit:
    @traced
    async def __aexit__(self, *error: object) -> None:
        done.append(f"decorated exit {error}")


class Later:
    """A callable object that gives an awaitable one."""

    async def __call__(self) -> None:
        done.append("called")

    def __await__(self) -> Generator[Any, Any, None]:
        done.append("awaited")
        yield from asyncio.sleep(0).__await__()


class Awaited:
    def __aexit__(self, *error: object) -> Later:
        return Later()


class Called:
    close = Later()


class NoExit(Sync):
    __aexit__ = None


class Unset:
    __slots__ = ("close",)


class Failing:
    def close(self) -> None:
        raise ValueError("broken")


class Odd:
    close = 3


class Settings:
    """An actor whose other attributes are the keys of a dict."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class ClosedSettings(Settings, Sync):
    """The same with a `close` of its own."""


class Proxy(Sync):
    """An actor that has an attribute of any name."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: done.append(name)


class Broken:
    @property
    def close(self) -> Any:
        raise ValueError("broken")


async def closed(instance: Any) -> list[str]:
    done.clear()

    async def run(function: Callable[[], Any]) -> Any:
        done.append("in the thread")
        return function()

    async def begin(left: Awaitable[Any]) -> Any:
        return await left

    await close_instance(instance, "Odd(a)", run, begin)
    return list(done)


async def test_each_way_to_end() -> None:
    assert await closed(Sync()) == ["in the thread", "close"]
    assert await closed(Async()) == ["async close"]
    assert await closed(Entered()) == ["exit (None, None, None)"]
    assert await closed(Odd()) == await closed(object()) == await closed(None) == []


async def test_an_awaitable_that_it_returns_is_awaited() -> None:
    assert await closed(Decorated()) == ["in the thread", "decorated close"]
    assert await closed(DecoratedExit()) == ["in the thread", "decorated exit (None, None, None)"]
    assert await closed(Awaited()) == ["in the thread", "awaited"]
    assert await closed(Called()) == ["in the thread", "called"]


async def test_what_is_declared_and_not_there_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    assert await closed(NoExit()) == ["in the thread", "close"]
    assert await closed(Unset()) == []
    assert not caplog.records


async def test_an_attribute_that_is_made_up_closes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert await closed(Settings()) == []
    assert await closed(ClosedSettings()) == await closed(Proxy()) == ["in the thread", "close"]
    assert not caplog.records


async def test_a_close_that_cannot_be_had_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await closed(Broken()) == []
    assert "Odd(a) raised while it was being closed" in caplog.text and "ValueError: broken" in caplog.text


async def test_what_it_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert await closed(Failing()) == ["in the thread"]
    assert "Odd(a) raised while it was being closed" in caplog.text and "ValueError: broken" in caplog.text
