"""Small actors that the tests share, in a module that workers can import without importing a test."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import numpy as np

import zcactor as zc
from zcactor.objectstore.table import LeaseTable
from zcactor.process import context
from zcactor.rpc import outgoing as outgoing_module
from zcactor.rpc.codec import encode_into

__all__ = ["Caller", "Faulty", "Plain", "Probe", "Unusual"]

WATCHDOG = 30
"""Seconds after which a blocked method of a failed test gives back its thread."""


def _end() -> NoReturn:
    raise StopAsyncIteration


class Ending:
    """An object that ends a loop over a stream when it is unpickled."""

    def __reduce__(self) -> Any:
        return _end, ()


@zc.actor(concurrency_groups={"control": 64})
class Probe:
    """An actor that logs its calls and blocks until a test lets it go on: handshakes instead of sleeps.

    The methods that steer it are in a concurrency group of their own, so blocked methods do not hold them up.
    """

    def __init__(self) -> None:
        self._entries: list[Any] = []
        self._opened: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._aopened: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._constructor_thread = threading.get_ident()

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def _log(self, entry: Any) -> None:
        self._entries.append(entry)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    # ---- steering

    @zc.method(concurrency_group="control")
    async def open(self, key: str) -> None:
        """Let go every call that waits under `key`, now and later."""
        self._opened[key].set()
        self._aopened[key].set()

    @zc.method(concurrency_group="control")
    async def until(self, *entries: Any) -> None:
        """Return once all `entries` have been logged."""
        async with asyncio.timeout(WATCHDOG):
            while not all(entry in self._entries for entry in entries):
                self._changed.clear()
                await self._changed.wait()

    @zc.method(concurrency_group="control")
    async def entries(self) -> list[Any]:
        """The log."""
        return self._entries

    # ---- sync

    def note(self, value: Any = None) -> Any:
        self._log(value)
        return value

    def hold(self, key: str) -> str:
        """Occupy the thread until `open`."""
        self._log(f"{key} began")
        self._opened[key].wait(WATCHDOG)
        self._log(f"{key} ended")
        return key

    def threads(self) -> tuple[bool, bool]:
        """Whether the method runs in the constructor's thread, and whether it runs in the main thread."""
        me = threading.get_ident()
        return me == self._constructor_thread, me == threading.main_thread().ident

    # ---- async

    async def anote(self, value: Any = None) -> Any:
        self._log(value)
        return value

    async def ahold(self, key: str) -> str:
        """Suspend until `open`, and log a cancellation."""
        self._log(f"{key} began")
        try:
            await self._aopened[key].wait()
        except asyncio.CancelledError:
            self._log(f"{key} cancelled")
            raise
        self._log(f"{key} ended")
        return key

    async def anote_after(self, key: str, value: Any) -> Any:
        """Suspend first, then log."""
        await self._aopened[key].wait()
        self._log(value)
        return value

    @zc.method(inline=True)
    def inote(self, value: Any = None) -> Any:
        self._log(value)
        return value

    @zc.method(inline=True)
    def on_loop(self) -> bool:
        return threading.get_ident() == threading.main_thread().ident

    # ---- streams

    async def acount(self, n: int) -> AsyncIterator[int]:
        """Yield numbers; log each before its yield, and the end of the generator."""
        try:
            for i in range(n):
                self._log(("item", i))
                yield i
        finally:
            self._log("stream closed")

    def count(self, n: int) -> Iterator[int]:
        """Do the same as `acount`, in the actor's thread."""
        try:
            for i in range(n):
                self._log(("item", i))
                yield i
        finally:
            self._log("stream closed")

    async def afail_at(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ValueError(f"at {n}")

    def fail_at(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError(f"at {n}")

    def endings(self) -> Iterator[Any]:
        yield from (1, Ending(), 3)

    async def astall_at(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        self._log("stalled")
        await self._aopened["stall"].wait()

    def raising(self, error: BaseException) -> None:
        raise error

    async def araising(self, error: BaseException) -> None:
        raise error


@zc.actor
class Plain:
    """An actor with sync methods only."""

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def echo(self, *values: Any, **named: Any) -> Any:
        self._seen.append((values, named))
        return values[0] if values else named

    def seen(self) -> list[Any]:
        return self._seen

    def types(self, *values: Any, **named: Any) -> list[str]:
        return [type(value).__name__ for value in (*values, *named.values())]

    def fail(self, text: str) -> None:
        raise ValueError(text)


@zc.actor
class Caller:
    """A caller in a process of its own."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    async def call(self, handle: Any, method: str, *args: Any) -> Any:
        return await getattr(handle, method)(*args)

    async def keep(self, *values: Any) -> int:
        self._kept.extend(values)
        return len(self._kept)

    async def drop(self) -> None:
        self._kept.clear()

    async def kept(self) -> list[Any]:
        return self._kept

    async def start(self, handle: Any, method: str, *args: Any) -> Any:
        """Start a call and return its reference in a list, not its value."""
        return [getattr(handle, method)(*args)]

    async def value(self, box: list[Any]) -> Any:
        """Await the reference in `box` and return its value."""
        return await box[0]

    async def give_to(self, other: Any, box: list[Any]) -> Any:
        """Let `other` await the reference in `box`."""
        return await other.value(box)


def _logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Base:
    def inherited(self) -> str:
        return "inherited"


class Unusual(Base, dict[str, int]):
    """A class whose methods are not plain functions."""

    def __init__(self) -> None:
        super().__init__(a=1)

    @_logged
    async def wrapped(self, n: int) -> int:
        await asyncio.sleep(0)
        return n

    @_logged
    async def wrapped_failing(self) -> None:
        raise ValueError("wrapped")

    @functools.lru_cache  # noqa: B019 - there is one instance
    def cached(self, n: int) -> int:
        return n

    __hash__ = object.__hash__  # type: ignore[assignment]

    def _add(self, a: int, b: int) -> int:
        return a + b

    add_five = functools.partialmethod(_add, 5)

    async def _amultiply(self, a: int, b: int) -> int:
        return a * b

    nested = functools.partialmethod(_amultiply, 2)

    @functools.singledispatchmethod
    def kind(self, value: Any) -> str:
        return "anything"

    @kind.register
    def _(self, value: int) -> str:
        return "int"

    async def returns_nothing(self) -> None: ...


class Faulty:
    """Methods that make a step of answering fail in their process, for the next `times` calls of that step."""

    def _break(self, step: str, times: int) -> None:
        left = times

        def failing(function: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left > 0:
                    left -= 1
                    raise MemoryError("injected")
                return function(*args, **kwargs)

            return call

        process: Any = context.current()
        if step == "pack":
            process.marshaller._finish = failing(process.marshaller._finish)
        elif step == "share":
            process.store.block_at = failing(process.store.block_at)
        elif step == "encode":
            vars(outgoing_module)["encode_into"] = failing(encode_into)
        elif step == "grant":
            LeaseTable.grant = failing(LeaseTable.grant)  # type: ignore[method-assign]
        for session in process.sessions.all():
            if step in ("encode", "reserve"):
                session.connection.native_out.declines = True  # the native part writes frames without these steps
            holder, name = {
                "export": (session._grants, "export"),
                "reserve": (session._outgoing, "_reserve"),
                "flush_now": (session, "_flush_now"),
            }.get(step, (None, ""))
            if holder is not None:
                setattr(holder, name, failing(getattr(holder, name)))

    def sync(self, step: str, times: int) -> Any:
        array = np.ones(1 << 14)
        self._break(step, times)
        return array if step == "share" else {"array": array}

    async def coroutine(self, step: str, times: int) -> Any:
        return self.sync(step, times)

    @zc.method(inline=True)
    def inline(self, step: str, times: int) -> Any:
        return self.sync(step, times)

    async def astream(self, step: str, times: int) -> AsyncIterator[Any]:
        yield self.sync(step, times)

    def stream(self, step: str, times: int) -> Iterator[Any]:
        yield self.sync(step, times)

    async def fine(self) -> str:
        return "fine"
