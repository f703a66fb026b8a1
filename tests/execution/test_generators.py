"""The producer's end of a stream, with a recorded session, and a queue in place of the actor's thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from zcactor.errors import ConnectionLost
from zcactor.execution.generators import AsyncProducer, SyncProducer
from zcactor.rpc.messages import Status
from zcactor.rpc.stream import STREAM_WINDOW


class FakeSession:
    connection = SimpleNamespace(eager_limit=100)

    def __init__(self) -> None:
        self.items: list[tuple[int, Any]] = []
        self.lost = False

    def send_item(self, incoming: Any, index: int, payload: Any, parts: Any, flags: int) -> None:
        if self.lost:
            raise ConnectionLost("gone")
        self.items.append((index, payload))


class FakeIncoming:
    def __init__(self) -> None:
        self.session = FakeSession()
        self.cancelled = False


def pack(value: Any, eager_limit: int) -> tuple[Any, Any, int]:
    assert eager_limit == FakeSession.connection.eager_limit
    if isinstance(value, Exception):
        raise value
    return value, (), 0


class Source:
    """Generators that record how far they were driven."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    def sync(self, n: int, last: Any = None) -> Generator[Any, None, None]:
        try:
            for i in range(n):
                self.made += 1
                yield i
            if last is not None:
                yield last
        finally:
            self.closed += 1

    async def coroutine(self, n: int, last: Any = None) -> AsyncIterator[Any]:
        with closing(self.sync(n, last)) as items:
            for item in items:
                yield item


# ---------------------------------------------------------------- async


async def test_async_items_and_end() -> None:
    incoming: Any = FakeIncoming()
    source = Source()
    await AsyncProducer(incoming, pack).run(source.coroutine(5))  # type: ignore[arg-type]
    assert incoming.session.items == [(i, i) for i in range(5)]
    assert source.closed == 1


async def test_async_runs_one_window_ahead() -> None:
    incoming: Any = FakeIncoming()
    source = Source()
    producer = AsyncProducer(incoming, pack)
    task = asyncio.create_task(producer.run(source.coroutine(1000)))  # type: ignore[arg-type]
    for granted in (0, 1, 5, 8):
        producer.credit(granted)
        for _ in range(100):
            await asyncio.sleep(0)
    assert source.made == len(incoming.session.items) == STREAM_WINDOW + 14
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed == 1


async def test_async_failures_close_the_generator() -> None:
    incoming: Any = FakeIncoming()
    source = Source()
    with pytest.raises(LookupError):
        await AsyncProducer(incoming, pack).run(source.coroutine(2, LookupError()))  # type: ignore[arg-type]
    assert source.closed == 1
    assert len(incoming.session.items) == 2


async def test_async_cancelled_while_the_generator_waits() -> None:
    incoming: Any = FakeIncoming()
    inside = asyncio.Event()
    closed: list[str] = []

    async def generator() -> AsyncIterator[int]:
        try:
            yield 1
            inside.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closed.append("cancelled")
            raise
        finally:
            closed.append("closed")

    task = asyncio.create_task(AsyncProducer(incoming, pack).run(generator()))  # type: ignore[arg-type]
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == ["cancelled", "closed"]


async def test_async_cancelled_a_generator_that_swallows_it_sends_no_further_item() -> None:
    """The task is cancelled once, and that may reach the generator and not the producer."""
    incoming: Any = FakeIncoming()
    inside = asyncio.Event()

    async def generator() -> AsyncIterator[int]:
        for item in range(10 * STREAM_WINDOW):
            yield item
            try:
                inside.set()
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                pass

    task = asyncio.create_task(AsyncProducer(incoming, pack).run(generator()))  # type: ignore[arg-type]
    await inside.wait()
    incoming.cancelled = True
    task.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert incoming.session.items == [(0, 0)]


# ---------------------------------------------------------------- sync


class Stage:
    """A sync producer whose thread is a queue that the test empties."""

    def __init__(self, generator: Any) -> None:
        self.incoming: Any = FakeIncoming()
        self.queue: deque[Callable[[], None]] = deque()
        self.ended: list[int] = []
        self.failed: list[BaseException] = []
        self.producer = SyncProducer(
            self.incoming,  # type: ignore[arg-type]
            generator,
            pack,
            self.queue.append,
            ended=self.ended.append,
            failed=self.failed.append,
        )
        self.producer.step()

    def run(self) -> None:
        while self.queue:
            self.queue.popleft()()

    @property
    def items(self) -> list[Any]:
        return [payload for _, payload in self.incoming.session.items]


def test_sync_items_and_end() -> None:
    source = Source()
    stage = Stage(source.sync(5))
    assert stage.items == [0], "one step at a time"
    assert len(stage.queue) == 1
    stage.run()
    assert stage.items == [0, 1, 2, 3, 4]
    assert [index for index, _ in stage.incoming.session.items] == [0, 1, 2, 3, 4]
    assert stage.ended == [Status.STREAM_END]
    assert source.closed == 1
    stage.producer.close()  # the response and the cancellation crossed
    stage.producer.credit(5)
    stage.run()
    assert stage.ended == [Status.STREAM_END]


def test_sync_runs_one_window_ahead() -> None:
    source = Source()
    stage = Stage(source.sync(1000))
    stage.run()
    assert source.made == len(stage.items) == STREAM_WINDOW
    stage.producer.credit(3)
    stage.run()
    assert source.made == STREAM_WINDOW + 3
    stage.producer.credit(2)
    stage.producer.credit(2)
    assert len(stage.queue) == 1, "resumed once"
    stage.run()
    assert source.made == STREAM_WINDOW + 7


@pytest.mark.parametrize("parked", [False, True])
def test_sync_close(parked: bool) -> None:
    source = Source()
    stage = Stage(source.sync(1000))
    if parked:
        stage.run()
    stage.producer.close()
    stage.producer.close()
    stage.producer.credit(100)
    stage.run()
    assert source.closed == 1
    assert stage.ended == [Status.CANCELLED]
    assert source.made == (STREAM_WINDOW if parked else 1)


def test_sync_failures() -> None:
    def raising() -> Iterator[int]:
        yield 1
        raise SystemExit(3)

    stage = Stage(raising())
    stage.run()
    assert [type(error) for error in stage.failed] == [SystemExit]
    assert stage.ended == []
    source = Source()
    stage = Stage(source.sync(2, LookupError("cannot be packed")))
    stage.run()
    assert [type(error) for error in stage.failed] == [LookupError]
    assert source.closed == 1
    assert stage.items == [0, 1]


def test_sync_close_that_fails() -> None:
    def stubborn() -> Iterator[int]:
        while True:
            try:
                yield 1
            except GeneratorExit:
                yield 2

    stage = Stage(stubborn())
    stage.producer.close()
    stage.run()
    assert [type(error) for error in stage.failed] == [RuntimeError]
    assert not stage.queue


def test_sync_connection_lost() -> None:
    source = Source()
    stage = Stage(source.sync(100))
    stage.incoming.session.lost = True
    stage.run()  # this raises nothing, because an exception would end the actor's thread
    assert [type(error) for error in stage.failed] == [ConnectionLost]
    assert source.closed == 1
    assert not stage.queue


def test_sync_failure_of_a_generator_that_will_not_close(caplog: pytest.LogCaptureFixture) -> None:
    def stubborn() -> Iterator[Any]:
        try:
            yield LookupError("cannot be packed")
        finally:
            raise ValueError("while closing")

    stage = Stage(stubborn())
    stage.run()
    assert [type(error) for error in stage.failed] == [LookupError]
    assert "while it was being closed" in caplog.text
