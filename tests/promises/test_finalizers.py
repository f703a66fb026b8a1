"""Calls that a finalizer of the program makes, wherever the interpreter runs the finalizer: also inside of a lock of
the runtime, where the garbage collector has started."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zcactor as zc
from zcactor.process.context import current
from zcactor.rpc.session import Session

PATIENCE = 20.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


@zc.actor
class Store:
    """An actor that finalizers call."""

    def __init__(self) -> None:
        self._refs: Any = None
        self._noted: list[Any] = []

    async def make(self, number: int) -> Value:
        """A value with a finalizer."""
        return Value(number)

    async def keep(self, refs: Any) -> None:
        """Keep references, or nothing."""
        self._refs = refs

    async def note(self, what: Any) -> None:
        """Note a value."""
        self._noted.append(what if isinstance(what, int | str) else len(what))

    async def noted(self) -> list[Any]:
        """The noted values."""
        return self._noted

    def items(self, count: int) -> Any:
        """A stream."""
        yield from range(count)


class Value:
    """A value that a call of `at_end` follows when it goes."""

    at_end: Callable[[int], None] | None = None

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        if Value.at_end is not None:
            Value.at_end(self.number)


async def test_a_value_whose_last_holder_lets_go(zc_runtime: zc.Runtime) -> None:
    """The peer's release drops the promise here, with the value that was unpacked from it."""
    store: Any = await Store.spawn()
    ended = asyncio.Event()

    def at_end(number: int) -> None:
        store.note(number)
        ended.set()

    ref = store.make(7)
    value = await ref
    await store.keep([ref])
    Value.at_end = at_end
    try:
        del ref, value
        await store.keep(None)
        async with asyncio.timeout(PATIENCE):
            await ended.wait()
            while await store.noted() != [7]:
                pass
    finally:
        Value.at_end = None


@pytest.mark.parametrize("transports", [("local",), ("tcp",)])
async def test_calls_inside_of_the_locks_of_their_connection(transports: tuple[str, ...]) -> None:
    """As from a finalizer that runs where frames are written: each call, with arguments of any kind, is sent."""
    async with asyncio.timeout(PATIENCE), zc.init(transports=transports, num_cpus=2, log_to_driver=False):
        store: Any = await Store.spawn()
        await store.note("first")
        array = zc.freeze(np.ones(100_000))
        remote: Any = store._remote
        route = remote.route
        assert route is not None
        stream = store.items(1_000_000)
        assert await anext(stream) == 0
        with route[0].lock, remote._lock, current().store._lock:
            calls = [
                store.note(1), store.note("text"), store.note({"key": 1}), store.note(array), store.note([array] * 70),
                store.note(b"x" * 100_000),
            ]  # fmt: skip
            given_up = store.note([array])
            given_up.cancel()
            await stream.aclose()
        await zc.get(calls)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        noted = await store.noted()
        assert sorted(map(str, noted)) == sorted(map(str, ["first", 1, "text", 1, 100_000, 70, 100_000]))


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_call_that_waited_ends_with_the_connection_as_one_that_was_sent(retries: int) -> None:
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2, log_to_driver=False):
        store: Any = await Store.spawn()
        await store.note("first")
        session = store._remote.route[0]
        with session.lock:
            call = store.note.options(retries=retries, idempotent=True)({"key": [1]})
            session.connection.abort()
            session.fail(zc.ConnectionLost("cut"))
        if retries:
            await call
            assert await store.noted() == ["first", 1]
        else:
            with pytest.raises(zc.ActorUnavailable) as failed:
                await call
            assert not failed.value.maybe_executed


async def test_a_call_between_the_two_steps_that_open_a_connection() -> None:
    """The queue was empty at the first step, and calls do not go by the route before the second one."""
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2, log_to_driver=False):
        store: Any = await Store.spawn()
        remote = store._remote
        await store.note(1)
        late: list[Any] = []

        class Queue(deque[Any]):
            def __bool__(self) -> bool:
                filled = len(self) > 0
                if not filled and not late:
                    late.append(store.note(2))
                return filled

        session, index = remote.route
        with remote._lock:
            remote._unsent, remote.route, remote._opening = Queue(), None, True
        assert remote._drain(session, index)
        await zc.get(late)
        assert await store.noted() == [1, 2]


async def test_a_stream_is_known_before_its_call_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread than the loop's is overtaken by the first item."""
    async with asyncio.timeout(PATIENCE), zc.init(num_cpus=2, log_to_driver=False):
        store: Any = await Store.spawn()
        await store.note(1)
        sent, streams = Session.send_call, list[Any]()

        def watched(self: Session, call: Any, *rest: Any) -> None:
            streams.append(call.stream)
            sent(self, call, *rest)

        monkeypatch.setattr(Session, "send_call", watched)
        stream = store.items(3)
        monkeypatch.undo()
        assert [item async for item in stream] == [0, 1, 2] and streams == [stream._stream]
