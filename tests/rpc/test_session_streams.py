"""A stream between two sessions: items one way, credit the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.rpc.sessions import Pair
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Status
from zcactor.rpc.stream import Stream


class Producer:
    """A producer that records the credit that it gets."""

    def __init__(self) -> None:
        self.granted: list[int] = []

    def credit(self, count: int) -> None:
        self.granted.append(count)


@dataclass
class Ends:
    """The two ends of one stream, and the producer's call."""

    stream: Stream
    incoming: Incoming
    producer: Producer


@pytest.fixture
async def ends(pair: Pair) -> Ends:
    call = pair.call()
    stream = call.stream = Stream(call, lambda payload, parts, flags: payload, pair.a.cancel)
    await pair.settle()
    (incoming,) = pair.hubs[1].received
    producer = incoming.stream = Producer()
    return Ends(stream, incoming, producer)


async def test_stream_items_and_credit(pair: Pair, ends: Ends) -> None:
    for i in range(10):
        pair.b.send_item(ends.incoming, i, b"\xc1%d" % i, (), 0)
    pair.b.respond(ends.incoming, Status.STREAM_END, b"", (), 0)
    assert [await ends.stream.next() for _ in range(8)] == [b"\xc1%d" % i for i in range(8)]
    await pair.settle()
    with pytest.raises(StopAsyncIteration):
        while True:
            await ends.stream.next()


async def test_stream_credit_reaches_the_producer(pair: Pair, ends: Ends) -> None:
    for i in range(9):
        pair.b.send_item(ends.incoming, i, b"\xc1%d" % i, (), 0)
    for _ in range(9):
        await ends.stream.next()
    await pair.settle()
    assert ends.producer.granted == [8]
