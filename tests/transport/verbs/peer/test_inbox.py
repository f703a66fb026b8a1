"""Messages of a peer: their credits, and messages from before the start of the connection."""

from __future__ import annotations

import pytest

from tests.conformance.connection import (
    ConnectedPair,
    Recorder,
    send,
    turns,
)
from tests.transport.verbs.peer.test_connection import ends
from tests.transport.verbs.sides import (
    engine_of,
)
from zcactor.errors import ProtocolError
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeSharedReceiveQueue


async def test_a_peer_that_ignores_credits_is_named(pair: ConnectedPair, caplog: pytest.LogCaptureFixture) -> None:
    """Such a peer takes receives that belong to others, so the log names it."""
    one = ends(pair)[1]
    before = one._inbox._held
    while one._inbox._held + one._credits.owed < one._credits.window:
        one._inbox._hold()
    assert not caplog.records
    with pytest.raises(ProtocolError, match="beyond its window"):
        one._inbox._hold()
    one._inbox._held = before
    (record,) = caplog.records
    assert f"process {one.peer.pid} ignores its credits" in record.getMessage()


async def test_receiver_that_is_never_started(pair: ConnectedPair, left: Recorder, fabric: FakeFabric) -> None:
    for i in range(1000):
        send(pair.left, [b"%d" % i * 100])
        if i % 50 == 0:
            await turns(2)
    await turns(50)
    window = ends(pair)[0]._credits.window
    assert ends(pair)[0]._sender.pending
    assert len(ends(pair)[1]._inbox._early) <= window
    assert fabric.statistics().rnr == 0 and not left.lost
    srq = engine_of(pair.sides[1]).srq
    assert isinstance(srq, FakeSharedReceiveQueue) and srq.receives
    recorder = Recorder()
    pair.right.start(recorder)
    assert await recorder.wait_frames(1000) == [b"%d" % i * 100 for i in range(1000)]
    assert fabric.statistics().rnr == 0


async def test_slots_of_one_that_was_never_started_come_back(pair: ConnectedPair, left: Recorder) -> None:
    engine = engine_of(pair.sides[1])
    assert isinstance(engine.srq, FakeSharedReceiveQueue)
    before = len(engine.srq.receives)
    for i in range(10):
        send(pair.left, [b"%d" % i])
        await turns(5)
    assert len(engine.srq.receives) < before
    pair.right.abort()
    await left.wait_lost()
    await turns(20)
    assert len(engine.srq.receives) == before
