"""The consumer's end of a stream, filled by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from zcactor.errors import ActorDied, ProtocolError
from zcactor.rpc.call import Call
from zcactor.rpc.messages import Status
from zcactor.rpc.stream import STREAM_WINDOW, Stream


class FakeSession:
    def __init__(self) -> None:
        self.credits: list[int] = []

    def send_stream_credit(self, call: Call, count: int) -> None:
        self.credits.append(count)


class Consumer:
    """A stream, and a record of its effects: credits, cancellations and items."""

    def __init__(self) -> None:
        self.call = Call(bytes(16), asyncio.get_running_loop(), threading.get_ident())
        self.session = self.call.session = FakeSession()
        self.cancelled: list[Call] = []
        self.stream = Stream(self.call, self.unpack, self.cancelled.append)
        self.call.stream = self.stream
        self.sent = 0

    @staticmethod
    def unpack(payload: Any, parts: Sequence[Any], flags: int) -> Any:
        if isinstance(payload, Exception):
            raise payload
        return payload

    def item(self, value: Any) -> None:
        self.stream.fill(self.stream.slot(self.sent), value, (), 0)
        self.sent += 1

    def end(self, status: int = Status.STREAM_END, payload: Any = b"") -> None:
        self.call.complete(status, payload, (), 0)


async def test_items_come_in_order_then_the_end() -> None:
    consumer = Consumer()
    for i in range(3):
        consumer.item(i)
    consumer.end()
    assert [await consumer.stream.next() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await consumer.stream.next()


async def test_waiting_for_an_item_and_for_the_end() -> None:
    consumer = Consumer()
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    consumer.item("a")
    assert await task == "a"
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    consumer.end()
    with pytest.raises(StopAsyncIteration):
        await task


async def test_a_slot_that_is_filled_late_keeps_its_place() -> None:
    consumer = Consumer()
    late = consumer.stream.slot(0)
    consumer.sent = 1
    consumer.item("second")
    consumer.end()
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    assert not task.done()
    consumer.stream.fill(late, "first", (), 0)
    assert await task == "first"
    assert await consumer.stream.next() == "second"
    with pytest.raises(StopAsyncIteration):
        await consumer.stream.next()


async def test_failures_come_after_the_items() -> None:
    consumer = Consumer()
    consumer.item(1)
    consumer.end(Status.ERROR, ValueError("in the generator"))
    assert await consumer.stream.next() == 1
    with pytest.raises(ValueError, match="in the generator"):
        await consumer.stream.next()
    with pytest.raises(StopAsyncIteration):
        await consumer.stream.next()
    consumer = Consumer()
    consumer.item(1)
    consumer.call.fail(ActorDied("a", "killed", True))
    assert await consumer.stream.next() == 1
    with pytest.raises(ActorDied):
        await consumer.stream.next()


async def test_an_item_that_cannot_be_unpacked_is_raised_at_its_place() -> None:
    consumer = Consumer()
    consumer.item(LookupError("bad"))
    consumer.item("good")
    with pytest.raises(LookupError):
        await consumer.stream.next()
    assert await consumer.stream.next() == "good"


async def test_credit_is_given_back_in_halves() -> None:
    consumer = Consumer()
    for i in range(STREAM_WINDOW):
        consumer.item(i)
    for _ in range(STREAM_WINDOW):
        await consumer.stream.next()
    assert consumer.session.credits == [STREAM_WINDOW // 2] * 2
    for i in range(STREAM_WINDOW):
        consumer.item(i)
    consumer.end()
    for _ in range(STREAM_WINDOW):
        await consumer.stream.next()
    assert len(consumer.session.credits) == 2, "an ended producer needs none"


async def test_a_producer_that_breaks_the_rules() -> None:
    consumer = Consumer()
    consumer.item(0)
    for wrong in (0, 2, -1):
        with pytest.raises(ProtocolError, match=f"item {wrong}"):
            consumer.stream.slot(wrong)
    with pytest.raises(ProtocolError, match="ahead"):
        for i in range(1, 3 * STREAM_WINDOW):
            consumer.stream.slot(i)


async def test_closing() -> None:
    consumer = Consumer()
    consumer.item(0)
    task = asyncio.create_task(consumer.stream.next())
    assert await task == 0
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    for _ in range(2):
        consumer.stream.close()
    with pytest.raises(StopAsyncIteration):
        await task
    assert consumer.cancelled == [consumer.call]
    for i in range(1, 100):  # items that were on the way at the close
        consumer.stream.fill(consumer.stream.slot(i), i, (), 0)
    consumer.end(Status.CANCELLED)
    with pytest.raises(StopAsyncIteration):
        await consumer.stream.next()


async def test_closing_after_the_end_cancels_nothing() -> None:
    consumer = Consumer()
    consumer.item(0)
    consumer.end()
    consumer.stream.close()
    consumer.stream.abandon()
    assert consumer.cancelled == []


async def test_abandoning_does_nothing_at_once() -> None:
    consumer = Consumer()
    cancelled = consumer.cancelled
    thread = threading.Thread(target=consumer.stream.abandon)
    consumer.stream.abandon()
    thread.start()
    thread.join()
    assert cancelled == []
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(cancelled) == 1


async def test_cancelling_loses_no_item() -> None:
    consumer = Consumer()
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    consumer.item("kept")
    task.cancel()  # the item came in the same turn
    try:
        assert await task == "kept"
    except asyncio.CancelledError:
        assert await consumer.stream.next() == "kept"
    task = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    consumer.item("next")
    assert await consumer.stream.next() == "next"


async def test_two_tasks() -> None:
    consumer = Consumer()
    first = asyncio.create_task(consumer.stream.next())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="two tasks"):
        await consumer.stream.next()
    consumer.item(1)
    assert await first == 1


async def test_consumed_on_another_loop() -> None:
    consumer = Consumer()
    home = asyncio.get_running_loop()
    got: list[Any] = []

    def elsewhere() -> None:
        async def consume() -> None:
            while True:
                try:
                    got.append(await consumer.stream.next())
                except StopAsyncIteration:
                    return

        asyncio.run(consume())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    for i in range(300):
        while consumer.sent - len(got) >= STREAM_WINDOW:
            await asyncio.sleep(0)
        consumer.item(i)
        if i % 7 == 0:
            await asyncio.sleep(0)
    consumer.end()
    await home.run_in_executor(None, thread.join, 20)
    assert got == list(range(300))
