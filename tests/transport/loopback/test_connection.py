"""Faults of loopback connections: seeded, counted, and reported truthfully at the end."""

from __future__ import annotations

import os

import pytest

from tests.conformance.connection import Recorder, put, send, turns
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.loopback.endpoint import LoopbackConnection, LoopbackFaults, loopback_pair


def started(seed: int, faults: LoopbackFaults) -> tuple[LoopbackConnection, LoopbackConnection, Recorder, Recorder]:
    left, right = loopback_pair(seed=seed, faults=faults)
    at_left, at_right = Recorder(), Recorder()
    left.start(at_left)
    right.start(at_right)
    return left, right, at_left, at_right


async def test_delay_keeps_order_and_repeats() -> None:
    async def arrivals(seed: int) -> list[int]:
        left, _, _, at_right = started(seed, LoopbackFaults(delay_turns=5))
        for i in range(20):
            send(left, [bytes((i,))])
        seen = []
        while len(at_right.frames) < 20:
            await turns(1)
            seen.append(len(at_right.frames))
        assert at_right.frames == [bytes((i,)) for i in range(20)]
        left.abort()
        await turns()
        return seen

    first = await arrivals(7)
    assert first == await arrivals(7)
    assert first != await arrivals(8)


@pytest.mark.parametrize("count", [0, 1, 5, 7])
async def test_break_after(count: int) -> None:
    left, right, at_left, at_right = started(1, LoopbackFaults(break_after=count))
    for start in (0, 3, 6):
        if not at_left.lost:
            send(left, [bytes((start + i,)) for i in range(3)])
            await turns()
    for recorder in (at_left, at_right):
        assert isinstance(await recorder.wait_lost(), ConnectionLost)
    assert at_right.frames == [bytes((i,)) for i in range(count)]
    with pytest.raises(ConnectionLost):
        right.reserve(1)


async def test_lost_batch_breaks_the_connection() -> None:
    left, _, at_left, at_right = started(1, LoopbackFaults(drop=1.0))
    send(left, [b"gone"])
    for recorder in (at_left, at_right):
        assert isinstance(await recorder.wait_lost(), ConnectionLost)
    assert at_right.frames == []


async def test_batches_lost_silently() -> None:
    async def survivors(seed: int) -> list[bytes]:
        left, _, at_left, at_right = started(seed, LoopbackFaults(drop=0.5, drop_silently=True))
        for i in range(64):
            send(left, [bytes((i,))])
        await left.aclose()
        await at_right.wait_lost()
        assert at_left.lost == [None]
        return at_right.frames

    first = await survivors(3)
    assert 0 < len(first) < 64
    assert first == sorted(first)
    assert first == await survivors(3)
    assert first != await survivors(4)


async def test_batch_that_ends_inside_a_frame() -> None:
    left, _, _, at_right = started(1, LoopbackFaults())
    put(left, b"whole")
    buffer, offset = left.reserve(10)
    buffer[offset : offset + 4] = (100).to_bytes(4, "little")
    left.commit(10)
    left.flush()
    assert isinstance(await at_right.wait_lost(), ProtocolError)
    assert at_right.frames == [b"whole"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
async def test_abort_in_a_forked_child_says_nothing() -> None:
    left, _, at_left, at_right = started(1, LoopbackFaults())
    child = os.fork()
    if child == 0:
        left.abort()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    send(left, [b"unharmed"])
    await at_right.wait_frames(1)
    assert at_left.lost == []


async def test_without_arena() -> None:
    left, _ = loopback_pair()
    assert left.map(0, 0).address == 0
    with pytest.raises(ProtocolError):
        left.map(0, 1)
