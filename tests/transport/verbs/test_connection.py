"""`VerbsConnection`: the suite of all connections, and on a fake fabric what only RDMA has."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest
from msgspec.structs import replace

from tests.conformance.connection import (
    ARENA_NBYTES,
    Keeper,
    Pair,
    PullingSuite,
    Recorder,
    Side,
    connect,
    finish,
    region,
    send,
    turns,
)
from tests.transport.verbs.sides import SIDES, device_of, engine_of, fake_sides
from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory
from zcactor.transport.base import RemoteRegion
from zcactor.transport.verbs.connection import VerbsConnection
from zcactor.transport.verbs.fake import FakeFabric, FakeSharedReceiveQueue


class TestConformance(PullingSuite):
    @pytest.fixture(params=SIDES)
    def sides(self, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
        with SIDES[request.param]() as sides:
            yield sides


@pytest.fixture
async def pair(fabric: FakeFabric) -> AsyncIterator[Pair]:
    with fake_sides(fabric) as sides:
        pair = await connect(*sides)
        yield pair
        await finish(pair)


@pytest.fixture
def left(pair: Pair) -> Recorder:
    recorder = Recorder()
    pair.left.start(recorder)
    return recorder


@pytest.fixture
def right(pair: Pair) -> Recorder:
    recorder = Recorder()
    pair.right.start(recorder)
    return recorder


@pytest.fixture
def source(pair: Pair) -> bytes:
    """What the right side's arena holds."""
    data = pair.sides[1].arena[:] = random.Random(1).randbytes(ARENA_NBYTES)
    return data


def ends(pair: Pair) -> tuple[VerbsConnection, VerbsConnection]:
    assert isinstance(pair.left, VerbsConnection) and isinstance(pair.right, VerbsConnection)
    return pair.left, pair.right


async def named(pair: Pair, offset: int = 0, nbytes: int = ARENA_NBYTES) -> RemoteRegion:
    """Bytes of the right side's arena as a reference to them has them: with seal and rkey."""
    await pair.left.pull(region(0, 1), pair.sides[0].address, None)  # has the memory registered
    assert pair.right.export is not None
    seal, rkey = pair.right.export(1, offset, nbytes)
    assert seal and rkey
    return RemoteRegion(1, offset, nbytes, seal, rkey)


async def exact(pair: Pair, wanted: RemoteRegion, source: bytes) -> None:
    """A pull of it brings its bytes."""
    side = pair.sides[0]
    side.arena[:] = bytes(ARENA_NBYTES)
    await pair.left.pull(wanted, side.address, side)
    assert bytes(side.arena[: wanted.nbytes]) == source[wanted.offset :][: wanted.nbytes]


# ---- keys


async def test_reference_with_a_key_asks_nobody(pair: Pair, source: bytes, fabric: FakeFabric) -> None:
    wanted = await named(pair)
    left = ends(pair)[0]
    asked = left._asks
    before = fabric.statistics().reads
    await exact(pair, wanted, source)
    assert left._asks == asked
    assert fabric.statistics().reads == before + 2, "one for the bytes, one for the seal"
    assert left.generation == 0


async def test_forged_key_is_asked_for_again(pair: Pair, source: bytes, left: Recorder, right: Recorder) -> None:
    wanted = replace(await named(pair), rkey=0x666)
    await exact(pair, wanted, source)
    assert ends(pair)[0].generation == 1
    send(pair.left, [b"frames go on"])
    await right.wait_frames(1)


async def test_revoked_key(pair: Pair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric) -> None:
    wanted = await named(pair)
    stale = device_of(pair.sides[1]).regions[wanted.rkey]
    stale.revoke()
    side = pair.sides[0]
    with pytest.raises(ObjectLost, match="REM_ACCESS"):
        await pair.left.pull(wanted, side.address, side)
    one, other = ends(pair)
    while (one.generation, other.generation) != (1, 1):
        await asyncio.sleep(0)
    device_of(pair.sides[1]).regions[wanted.rkey] = stale
    send(pair.right, [b"frames go on"])
    await left.wait_frames(1)
    await exact(pair, wanted, source)
    assert (fabric.statistics().rnr, fabric.statistics().retries) == (0, 0)
    assert not left.lost and not right.lost


async def test_a_hundred_times(pair: Pair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric) -> None:
    wanted = await named(pair)
    for count in range(1, 101):
        await exact(pair, replace(wanted, rkey=0x600 + count), source)
        assert ends(pair)[0].generation == count
        send(pair.left, [b"%d" % count])
    assert await right.wait_frames(100) == [b"%d" % count for count in range(1, 101)]
    assert ends(pair)[1].generation == 100
    assert fabric.statistics().rnr == 0
    assert engine_of(pair.sides[0]).connections == 1


async def test_failing_beside_others(pair: Pair, source: bytes) -> None:
    wanted = await named(pair, 0, 1000)
    side = pair.sides[0]
    side.arena[:] = bytes(ARENA_NBYTES)
    await asyncio.gather(
        *(
            pair.left.pull(
                replace(wanted, offset=i * 1000, rkey=wanted.rkey if i % 5 else 0x600 + i),
                side.address + i * 1000,
                side,
            )
            for i in range(50)
        )
    )
    assert bytes(side.arena[:50_000]) == source[:50_000]


async def test_both_ends_read_while_one_fails(pair: Pair, source: bytes) -> None:
    wanted = await named(pair, 0, 1000)
    left, right = pair.sides
    for count in range(20):
        await asyncio.gather(
            pair.left.pull(replace(wanted, rkey=0x600 + count), left.address + 2000, left),
            *(pair.right.pull(region(2000, 1000), right.address + 40_000, right) for _ in range(3)),
        )
        assert bytes(left.arena[2000:3000]) == source[:1000]
        assert bytes(right.arena[40_000:41_000]) in (bytes(1000), source[:1000])
    one, other = ends(pair)
    while one.generation != other.generation:
        await asyncio.sleep(0)
    assert one.generation >= 20


async def test_object_that_is_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, side = await named(pair), pair.sides[0]
    engine_of(pair.sides[1]).seals.clear(1)
    monkeypatch.setattr(ends(pair)[1], "_lookup", lambda _: None)
    for each in (wanted, region(0, 10)):
        with pytest.raises(ObjectLost, match="no such object"):
            await pair.left.pull(each, side.address, side)
    assert ends(pair)[0].generation == 0, "nothing failed as far as the device goes"


async def test_bytes_outside_the_object(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        offset, nbytes = 100, 50

    part, side = Part(), pair.sides[0]
    monkeypatch.setattr(ends(pair)[1], "_lookup", lambda _: part)
    for offset, nbytes in ((99, 1), (100, 51), (150, 1)):
        with pytest.raises(ObjectLost, match="not inside the object's 50 bytes"):
            await pair.left.pull(RemoteRegion(2, offset, nbytes), side.address, side)
    await pair.left.pull(RemoteRegion(2, 100, 50), side.address, side)


async def test_owner_cannot_register(pair: Pair) -> None:
    nic = device_of(pair.sides[1]).nic
    for _ in range(50):
        if engine_of(pair.sides[1]).extents.find(0, 1) is not None:
            break
        await asyncio.wait(list(engine_of(pair.sides[1]).extents._under_way.values()))
        await turns(2)
    for each in engine_of(pair.sides[1]).extents._regions:
        each.close()
    engine_of(pair.sides[1]).extents._regions.clear()
    nic.pin_limit = nic.pinned
    with pytest.raises(ObjectLost, match="ulimit -l"):
        await pair.left.pull(region(0, 10), pair.sides[0].address, None)


async def test_owner_has_no_memory_to_register(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    extents = engine_of(pair.sides[1]).extents

    async def full(offset: int, nbytes: int) -> None:
        raise OutOfMemory(nbytes, 0, 0, 0)

    monkeypatch.setattr(extents, "get", full)
    with pytest.raises(ObjectLost, match="cannot let 10 bytes be read"):
        await pair.left.pull(region(0, 10), pair.sides[0].address, None)


# ---- the peer dies


async def test_device_dies_during_sends(pair: Pair, left: Recorder, right: Recorder, fabric: FakeFabric) -> None:
    fabric.manual = True
    for i in range(20):
        send(pair.left, [b"%d" % i * 300])
    fabric.step(3)
    fabric.kill(device_of(pair.sides[1]))
    fabric.manual = False
    fabric.posted()
    cause = await left.wait_lost()
    assert isinstance(cause, ConnectionLost) and "RETRY_EXC" in str(cause) and cause.maybe_executed
    with pytest.raises(ConnectionLost):
        pair.left.reserve(10)


async def test_device_dies_during_reads(
    pair: Pair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    wanted, side, keeper = await named(pair), pair.sides[0], Keeper()
    held = weakref.ref(keeper)
    fabric.manual = True
    pull = asyncio.ensure_future(pair.left.pull(wanted, side.address, keeper))
    del keeper
    await turns()
    assert held() is not None
    fabric.kill(device_of(pair.sides[1]))
    fabric.manual = False
    fabric.posted()
    await turns(20)
    engine_of(pair.sides[1])._broken(OSError(5, "dead"))  # has the socket closed, as the end of the process does
    outcome = (await asyncio.gather(pull, return_exceptions=True))[0]
    assert isinstance(outcome, ConnectionLost)
    await left.wait_lost()
    del pull, outcome
    while held() is not None:
        await asyncio.sleep(0)
    side.arena[:] = bytes(ARENA_NBYTES)
    fabric.drain()
    await turns(20)
    assert not any(side.arena), "something was written after the memory was let go of"


async def test_own_device_fails_during_a_pull(pair: Pair, source: bytes, left: Recorder, fabric: FakeFabric) -> None:
    wanted, side = await named(pair), pair.sides[0]
    fabric.manual = True
    pull = asyncio.ensure_future(pair.left.pull(wanted, side.address, side))
    await turns()
    engine_of(side)._broken(OSError(5, "the device is gone"))
    with pytest.raises(ConnectionLost, match="the device is gone"):
        await pull
    await left.wait_lost()


# ---- flow control


async def test_receiver_that_is_never_started(pair: Pair, left: Recorder, fabric: FakeFabric) -> None:
    for i in range(1000):
        send(pair.left, [b"%d" % i * 100])
        if i % 50 == 0:
            await turns(2)
    await turns(50)
    window = ends(pair)[0]._credits.window
    assert ends(pair)[0]._sender.pending
    assert len(ends(pair)[1]._early) <= window
    assert fabric.statistics().rnr == 0 and not left.lost
    srq = engine_of(pair.sides[1]).srq
    assert isinstance(srq, FakeSharedReceiveQueue) and srq.receives
    recorder = Recorder()
    pair.right.start(recorder)
    assert await recorder.wait_frames(1000) == [b"%d" % i * 100 for i in range(1000)]
    assert fabric.statistics().rnr == 0


async def test_slots_of_one_that_was_never_started_come_back(pair: Pair, left: Recorder) -> None:
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


async def test_healthy_traffic_never_repeats_anything(
    pair: Pair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    side = pair.sides[0]
    for i in range(500):
        send(pair.left, [b"%d" % i * (i % 200)])
        send(pair.right, [b"%d" % i])
        if i % 10 == 0:
            await pair.left.pull(region(i, 1000), side.address, side)
    assert len(await right.wait_frames(500)) == len(await left.wait_frames(500)) == 500
    statistics = fabric.statistics()
    assert (statistics.rnr, statistics.retries, statistics.failures) == (0, 0, 0)


async def test_nothing_is_left_of_a_closed_connection(
    pair: Pair, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    await named(pair)
    await pair.left.aclose()
    await right.wait_lost()
    while any(engine_of(side).connections for side in pair.sides):
        await asyncio.sleep(0)
    for side in pair.sides:
        side.endpoint.dispose()
        assert len(device_of(side).ledger) == 0
    assert all(nic.pinned == 0 for nic in fabric.nics.values())
    assert fabric.statistics().rnr == 0
