"""Connections between processes of one interpreter: arenas are mapped, frames are counted, the end comes last."""

from __future__ import annotations

import asyncio
import ctypes
from contextvars import Context
from typing import Any

import pytest

from tests.conformance.connection import ARENA_NBYTES, MappingSuite, Recorder, Side, put, send
from tests.conformance.session import MappingSessionSuite
from tests.conformance.talk import DEPTH
from zcactor import ids
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.store import Store
from zcactor.testing import until
from zcactor.testing.faults import LinkFaults
from zcactor.testing.network import InnerConnection, InnerEndpoint, InnerNetwork

NBYTES = 1 << 16


def endpoint(network: InnerNetwork, *, is_head: bool = False) -> InnerEndpoint:
    return InnerEndpoint(
        network, asyncio.get_running_loop(), Context(), ids.token(), 1, Arena(NBYTES, groups=()), is_head=is_head,
        recv_depth=64, eager_limit=4096,
    )  # fmt: skip


async def connected(faults: LinkFaults | None = None, *, to_head: bool = False) -> tuple[Any, ...]:
    network = InnerNetwork(faults)
    left, right = endpoint(network), endpoint(network, is_head=to_head)
    accepted: asyncio.Queue[Any] = asyncio.Queue()
    await right.start(accepted.put_nowait)
    ours = await left.connect(right.address)
    theirs = await accepted.get()
    at_left, at_right = Recorder(), Recorder()
    ours.start(at_left)
    theirs.start(at_right)
    return ours, theirs, at_left, at_right


class TestConnection(MappingSuite):
    @pytest.fixture
    async def sides(self) -> tuple[Side, Side]:
        network = InnerNetwork()
        left, right = endpoint(network), endpoint(network)
        return seen(left), seen(right)


class TestSession(MappingSessionSuite):
    @pytest.fixture
    async def connections(self, stores: tuple[Store, Store]) -> tuple[Any, Any]:
        network, accepted, loop = InnerNetwork(), asyncio.Queue[Any](), asyncio.get_running_loop()
        ends = [
            InnerEndpoint(network, loop, Context(), store.process, 1, store.arena, is_head=False, recv_depth=DEPTH,
                          eager_limit=16384)
            for store in stores
        ]  # fmt: skip
        await ends[1].start(accepted.put_nowait)
        return await ends[0].connect(ends[1].address), await accepted.get()


def seen(end: InnerEndpoint) -> Side:
    memory = (ctypes.c_char * ARENA_NBYTES).from_address(end.arena.address)
    return Side(end, end.process, memoryview(memory).cast("B"))


def faults(**given: Any) -> LinkFaults:
    made = LinkFaults(asyncio.get_running_loop().time, 0, given)
    made.begin()
    return made


async def closed(*connections: InnerConnection) -> None:
    for connection in connections:
        await connection.aclose()
        connection.unmap()


@pytest.mark.parametrize("count", [0, 1, 4, 5])
async def test_frames_of_both_directions_count(count: int) -> None:
    ours, theirs, at_left, at_right = await connected(faults(break_after=count))
    for start in range(0, 6, 2):
        for connection in (ours, theirs):
            if not (at_left.lost or at_right.lost):
                send(connection, [bytes((start,))])
                await asyncio.sleep(0.001)
    for recorder in (at_left, at_right):
        assert f"broke after {count} frames" in str(await recorder.wait_lost())
    assert len(at_left.frames) + len(at_right.frames) == count
    await closed(ours, theirs)


async def test_a_batch_is_cut_where_the_connection_breaks() -> None:
    ours, theirs, _, at_right = await connected(faults(break_after=2))
    send(ours, [b"a", b"b", b"c"])
    await at_right.wait_lost()
    assert at_right.frames == [b"a", b"b"]
    await closed(ours, theirs)


async def test_delayed_frames_keep_their_order_and_the_end_is_last() -> None:
    ours, theirs, _, at_right = await connected(faults(delay=(0.0, 0.01)))
    frames = [bytes((number,)) for number in range(50)]
    for frame in frames:
        send(ours, [frame])
    assert at_right.frames == []
    await ours.aclose()
    assert isinstance(await at_right.wait_lost(), ConnectionLost)
    assert at_right.frames == frames
    await closed(ours, theirs)


async def test_the_head_has_no_faults() -> None:
    ours, theirs, _, at_right = await connected(faults(break_after=0), to_head=True)
    send(ours, [b"there"])
    assert await at_right.wait_frames(1) == [b"there"]
    await closed(ours, theirs)


async def test_nobody_listens() -> None:
    network = InnerNetwork()
    left, right = endpoint(network), endpoint(network)
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await left.connect(right.address)
    async with right:
        await right.start(lambda _: None)
        with pytest.raises(RuntimeError, match="listens already"):
            await right.start(lambda _: None)
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await left.connect(right.address)


async def test_writable_mappings() -> None:
    ours, theirs, _, _ = await connected()
    with pytest.raises(LookupError, match="not writable yet"):
        ours.map(0, 8, writable=True)
    await ours.open_writable()
    await ours.open_writable()
    assert ours.map(8, 8, writable=True).address != ours.map(8, 8).address
    with pytest.raises(ProtocolError):
        ours.map(NBYTES, 1)
    await closed(ours, theirs)
    with pytest.raises(ConnectionLost, match="closed"):
        ours.map(0, 8)
    with pytest.raises(ConnectionLost, match="closed"):
        await ours.open_writable()


async def test_what_is_written_later_than_the_end() -> None:
    ours, theirs, at_left, _ = await connected()
    theirs.abort()
    await until(lambda: at_left.lost, "the end did not arrive")
    with pytest.raises(ConnectionLost):
        put(ours, b"late")
    await closed(ours, theirs)
