"""`VerbsConnection`: the suite of all connections, and on a fake fabric the properties that only RDMA has."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import mmap
import os
import random
import socket
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.conformance.connection import (
    ARENA_NBYTES,
    ConnectedPair,
    PullingSuite,
    PullKeeper,
    Recorder,
    Side,
    connect,
    finish,
    put,
    region,
    send,
    turns,
)
from tests.transport.verbs.entitlements import Entitlements
from tests.transport.verbs.sides import (
    SIDES,
    Whole,
    device_of,
    draw_seeds,
    drawn_sides,
    endpoint_of,
    engine_of,
    fake_sides,
    joined,
    verbs_side,
    works,
)
from zcactor.errors import ConnectionLost, ObjectLost, OutOfMemory, ProtocolError
from zcactor.transport.base import Connection
from zcactor.transport.bytes import RemoteRegion
from zcactor.transport.verbs.device import bounce, engine
from zcactor.transport.verbs.device.registration_cache import ExtentTable
from zcactor.transport.verbs.device.sizing import DEPTH, pinned_nbytes
from zcactor.transport.verbs.device.viability import viable_ports
from zcactor.transport.verbs.driver.base import Send
from zcactor.transport.verbs.driver.codes import CompletionStatus
from zcactor.transport.verbs.driver.fake import FakeFabric
from zcactor.transport.verbs.driver.fake_queues import FakeSharedReceiveQueue
from zcactor.transport.verbs.peer import bulk, connection, reaching
from zcactor.transport.verbs.peer import connect as joining
from zcactor.transport.verbs.peer.bootstrap import BROUGHT_NBYTES, Ask, Brought, Exported, Message
from zcactor.transport.verbs.peer.connection import LINGER, PATIENCE, VerbsConnection


class TestConformance(PullingSuite):
    @pytest.fixture(params=[pytest.param(each, marks=pytest.mark.slow if at else ()) for at, each in enumerate(SIDES)])
    def sides(self, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
        with SIDES[request.param]() as sides:
            yield sides


class TestOnDrawnCards(PullingSuite):
    """The suite on networks that seeds draw. ``--rounds N`` draws N times as many."""

    @pytest.fixture
    def sides(self, seed: int) -> Iterator[tuple[Side, Side]]:
        with drawn_sides(seed) as sides:
            yield sides


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the seeds of `TestOnDrawnCards`."""
    draw_seeds(metafunc, few=3)


def ends(pair: ConnectedPair) -> tuple[VerbsConnection, VerbsConnection]:
    assert isinstance(pair.left, VerbsConnection) and isinstance(pair.right, VerbsConnection)
    return pair.left, pair.right


def verbs(end: Connection) -> VerbsConnection:
    """An end that has to be an RDMA connection."""
    assert isinstance(end, VerbsConnection)
    return end


def queue_of(side: Side) -> FakeSharedReceiveQueue:
    """The receive queue of a side that has joined RDMA."""
    queue = engine_of(side).srq
    assert isinstance(queue, FakeSharedReceiveQueue)
    return queue


async def named(pair: ConnectedPair, offset: int = 0, nbytes: int = ARENA_NBYTES, object_id: int = 1) -> RemoteRegion:
    """A reference to bytes of the right side's arena, with seal and rkey."""
    await pair.left.pull(region(0, 1), pair.sides[0].address, None)  # this has the memory registered
    assert pair.right.export is not None
    seal, rkey = pair.right.export(object_id, offset, nbytes)
    assert seal and rkey
    return RemoteRegion(object_id, offset, nbytes, seal, rkey)


async def exact(pair: ConnectedPair, wanted: RemoteRegion, source: bytes) -> None:
    """Check that a pull of `wanted` brings its bytes."""
    side = pair.sides[0]
    side.arena[:] = bytes(ARENA_NBYTES)
    await pair.left.pull(wanted, side.address, side)
    assert bytes(side.arena[: wanted.nbytes]) == source[wanted.offset :][: wanted.nbytes]


# ---- keys


async def test_reference_with_a_key_asks_nobody(pair: ConnectedPair, source: bytes, fabric: FakeFabric) -> None:
    wanted = await named(pair)
    left = ends(pair)[0]
    asked = left._reach._asks
    before = fabric.statistics().reads
    await exact(pair, wanted, source)
    assert left._reach._asks == asked
    assert fabric.statistics().reads == before + 2, "one for the bytes, one for the seal"
    assert left.generation == 0


async def test_forged_key_is_asked_for_again(
    pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder
) -> None:
    wanted = replace(await named(pair), rkey=0x666)
    await exact(pair, wanted, source)
    assert ends(pair)[0].generation == 1
    send(pair.left, [b"frames go on"])
    await right.wait_frames(1)


async def test_revoked_key(
    pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
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


@pytest.mark.slow
async def test_a_hundred_times(
    pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    wanted = await named(pair)
    for count in range(1, 101):
        await exact(pair, replace(wanted, rkey=0x600 + count), source)
        assert ends(pair)[0].generation == count
        send(pair.left, [b"%d" % count])
    assert await right.wait_frames(100) == [b"%d" % count for count in range(1, 101)]
    assert ends(pair)[1].generation == 100
    assert fabric.statistics().rnr == 0
    assert engine_of(pair.sides[0]).connections == 1


async def test_failing_beside_others(pair: ConnectedPair, source: bytes) -> None:
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


@pytest.mark.slow
async def test_both_ends_read_while_one_fails(pair: ConnectedPair, source: bytes) -> None:
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


async def test_object_that_is_gone(pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, side = await named(pair), pair.sides[0]
    engine_of(pair.sides[1]).seals.clear(1)
    monkeypatch.setattr(ends(pair)[1]._reach, "_lookup", lambda _: None)
    for each in (wanted, region(0, 10)):
        with pytest.raises(ObjectLost, match="no such object"):
            await pair.left.pull(each, side.address, side)
    assert ends(pair)[0].generation == 0, "nothing failed as far as the device goes"


async def test_bytes_outside_the_object(pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    class Part:
        offset, nbytes = 100, 50

    part, side = Part(), pair.sides[0]
    monkeypatch.setattr(ends(pair)[1]._reach, "_lookup", lambda _: part)
    for offset, nbytes in ((99, 1), (100, 51), (150, 1)):
        with pytest.raises(ObjectLost, match="not inside the object's 50 bytes"):
            await pair.left.pull(RemoteRegion(2, offset, nbytes), side.address, side)
    await pair.left.pull(RemoteRegion(2, 100, 50), side.address, side)


async def cannot_register(side: Side) -> None:
    """Unregister all of a side's arena, and let every further registration fail."""
    extents, nic = engine_of(side).extents, device_of(side).nic
    while extents.find(0, 1) is None:
        await asyncio.sleep(0)
    for each in extents._regions.values():
        each.close()
    extents._regions.clear()
    nic.pin_limit = nic.pinned


@pytest.mark.parametrize("kind", ["fake", "sealed"])
@pytest.mark.parametrize("both", [False, True], ids=["owner", "both"])
async def test_owner_cannot_register(kind: str, both: bool) -> None:
    """The owner's bytes come by the socket, and both ends say why."""
    with SIDES[kind]() as sides:
        pair = await connect(*sides)
        left, right = sides
        pair.left.start(Recorder())
        pair.right.start(Recorder())
        right.arena[:] = random.Random(1).randbytes(ARENA_NBYTES)
        for side in sides if both else sides[1:]:
            await cannot_register(side)
        brought: list[int] = []
        engine_of(left).extents.brought = brought.append
        sizes = 1, BROUGHT_NBYTES, BROUGHT_NBYTES + 1, ARENA_NBYTES - 5
        pulls = [pair.left.pull(region(5, nbytes), left.address + 5, left) for nbytes in sizes]
        before = verbs(pair.left).puller.reads
        await asyncio.gather(*pulls)
        assert left.arena[5:] == right.arena[5:]
        assert sorted(brought) == sorted(sizes) and verbs(pair.left).puller.reads == before
        for end, text in ((pair.left, "arrays come by the socket beside"), (pair.right, "arrays go by the socket")):
            described = verbs(end).describe()
            assert text in described and "RLIMIT_MEMLOCK" in described and "ulimit -l" in described
        assert f"on {socket.gethostname()}: " in verbs(pair.left).describe()
        device_of(right).nic.pin_limit = device_of(left).nic.pin_limit = None
        await pair.left.pull(region(0, 100), left.address, left)
        assert verbs(pair.left).puller.reads > before, "by RDMA, as soon as it can be"
        await finish(pair)


async def test_bytes_by_the_socket_are_those_that_the_reader_may_have(pair: ConnectedPair, left: Recorder) -> None:
    await cannot_register(pair.sides[1])
    owner = verbs(pair.right)
    side = pair.sides[0]
    owner._reach._may_read = lambda *_: False
    with pytest.raises(ObjectLost, match="no lease"):
        await pair.left.pull(region(0, 10), side.address, side)
    owner._reach._may_read = lambda *_: True
    told: list[Message] = []
    tell = owner._tell

    def freed(message: Message) -> None:
        told.append(message)
        owner._reach._lookup = lambda _: None  # the object goes between the keys and the bytes
        tell(message)

    owner._reach._tell = freed
    with pytest.raises(ObjectLost, match="no such object any more"):
        await pair.left.pull(region(0, 10), side.address, side)
    assert [type(message) for message in told] == [Exported, Brought]
    assert not left.lost


async def test_another_number_of_bytes_by_the_socket(pair: ConnectedPair, left: Recorder) -> None:
    await cannot_register(pair.sides[1])
    owner = verbs(pair.right)
    tell = owner._tell
    owner._reach._tell = lambda one: tell(Brought(one.number, b"x" * 9) if isinstance(one, Brought) else one)
    with pytest.raises(ProtocolError, match="was asked for 10 bytes, and sent 9"):
        await pair.left.pull(region(0, 10), pair.sides[0].address, None)
    assert isinstance(await left.wait_lost(), ProtocolError)


async def test_a_connection_that_is_lost_while_bytes_come_by_the_socket(pair: ConnectedPair, left: Recorder) -> None:
    await cannot_register(pair.sides[1])
    pull = asyncio.ensure_future(pair.left.pull(region(0, 10), pair.sides[0].address, None))
    verbs(pair.right)._reach._answer_bring = lambda ask: None  # type: ignore[method-assign]
    while not any(kind is Brought for kind, _ in verbs(pair.left)._reach.asked.values()):
        await asyncio.sleep(0)
    pair.right.abort()
    with pytest.raises(ConnectionLost):
        await pull


@pytest.mark.parametrize("error", [ValueError("closed"), RuntimeError()], ids=type)
async def test_owner_cannot_register_for_whatever_reason(
    pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The reader gets the error, and does not wait."""
    extents = engine_of(pair.sides[1]).extents

    async def full(offset: int, nbytes: int) -> None:
        raise error

    monkeypatch.setattr(extents, "get", full)
    with pytest.raises(ObjectLost, match="cannot let 10 bytes be read"):
        await pair.left.pull(region(0, 10), pair.sides[0].address, None)


async def test_owner_has_no_memory_for_the_rest_of_an_extent(
    pair: ConnectedPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sides[1].arena[:10] = b"0123456789"

    async def full(offset: int, nbytes: int) -> None:
        raise OutOfMemory(10, 0, 0, 0)

    monkeypatch.setattr(engine_of(pair.sides[1]).extents, "get", full)
    await pair.left.pull(region(0, 10), pair.sides[0].address, None)
    assert bytes(pair.sides[0].arena[:10]) == b"0123456789"


async def test_an_object_of_no_bytes(pair: ConnectedPair, left: Recorder, right: Recorder) -> None:
    wanted = await named(pair)
    reads = verbs(pair.left).puller.reads
    for nothing in (
        RemoteRegion(1, 0, 0),
        RemoteRegion(1, 0, 0, 0, wanted.rkey),  # a key without a seal: there is nothing to READ here either
        RemoteRegion(1, ARENA_NBYTES, 0, wanted.seal, wanted.rkey),
    ):
        await pair.left.pull(nothing, pair.sides[0].address, None)
    assert verbs(pair.left).puller.reads == reads
    send(pair.left, [b"still here"])
    assert await right.wait_frames(1) == [b"still here"]


@pytest.mark.slow
async def test_a_peer_that_reads_with_stale_keys_starves_nobody(
    fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each READ of the other end breaks the pair for both directions, and this end begins again at once."""
    nbytes, piece = 8 << 20, 1 << 12
    for name in ("fake0", "fake1"):
        fabric.add_nic(name)
    monkeypatch.setattr(bulk, "PIECE_NBYTES", piece)  # many lists, so that some are under way at each failure
    with (
        verbs_side(lambda: fabric.binding("fake0"), nbytes) as reader,
        verbs_side(lambda: fabric.binding("fake1"), nbytes) as owner,
    ):
        async with joined((reader, owner)) as pair:
            pair.left.start(Recorder())
            pair.right.start(Recorder())
            wanted = await named(pair, 0, nbytes)
            owner.arena[:] = random.Random(1).randbytes(nbytes)

            async def stale() -> None:
                while True:  # the reader gets a good key when it asks
                    await pair.right.pull(RemoteRegion(6, 0, 64, 0, 0xDEAD), owner.address + nbytes - 64, owner)

            before = verbs(pair.left).puller.reads
            bad = asyncio.create_task(stale())
            while verbs(pair.left).generation < 20:
                await asyncio.sleep(0)
            async with asyncio.timeout(20):
                await pair.left.pull(wanted, reader.address, reader)
            assert not bad.done()
            bad.cancel()
            assert bytes(reader.arena[:-64]) == bytes(owner.arena[:-64])
            assert verbs(pair.left).puller.reads - before <= 2 * nbytes // piece


async def test_a_path_that_broke_is_left_alone_for_a_while(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections go over TCP for a time, and know why, then by RDMA again. A second break in a row doubles it."""
    with fake_sides(fabric) as sides:
        async with joined(sides) as pair:
            process = pair.sides[1].process
            left = engine_of(sides[0])
            now = left.loop.time()
            pair.left.start(Recorder())
            fabric.inject(verbs(pair.left).pairs.control.qp_num, CompletionStatus.RETRY_EXC)
            send(pair.left, [b"lost"])
            while not left.avoided(process):
                await asyncio.sleep(0)
            end = await sides[0].endpoint.connect(sides[1].endpoint.address)
            other = await pair.accepted.get()
            assert end.kind == other.kind == "tcp"
            assert "tried again 1 s after its path broke: a message failed: RETRY_EXC" in end.rejected["verbs"]
            assert "the peer cannot use RDMA" in other.rejected["verbs"]
            for one in (end, other):
                one.abort()
            left.avoid(process, "again")
            monkeypatch.setattr(left, "loop", SimpleNamespace(time=lambda: now + 1.9))
            assert "tried again 2 s after" in left.avoided(process)
            monkeypatch.setattr(left, "loop", SimpleNamespace(time=lambda: now + 1000))
            assert not left.avoided(process)
            left.avoid(process, "later")
            assert "tried again 1 s after" in left.avoided(process)
            monkeypatch.undo()


# ---- extents

EXTENT = 1 << 14
"""Bytes of each extent, where an arena has several."""


@pytest.fixture
async def many(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ConnectedPair]:
    """A connection whose arenas have many extents, and little memory for bytes that cannot be registered."""
    monkeypatch.setattr(bounce, "_PIECE", 8192)
    monkeypatch.setattr(engine, "ExtentTable", partial(ExtentTable, extent_nbytes=EXTENT))
    with fake_sides(fabric) as sides:
        pair = await connect(*sides)
        pair.left.start(Recorder())
        pair.right.start(Recorder())
        pair.sides[1].arena[:] = random.Random(1).randbytes(ARENA_NBYTES)
        yield pair
        await finish(pair)


async def brings(pair: ConnectedPair, numbers: random.Random, *, named: bool) -> RemoteRegion:
    """Check a pull of random bytes to a random place, with the keys of `export` or without; return its region."""
    left, right = pair.sides
    nbytes = numbers.randrange(1, len(right.arena))
    offset, target = (numbers.randrange(len(right.arena) - nbytes) for _ in range(2))
    seal, rkey = 0, 0
    if named:
        assert pair.right.export is not None
        seal, rkey = pair.right.export(1, offset, nbytes)
    wanted = RemoteRegion(1, offset, nbytes, seal, rkey)
    before = bytes(left.arena)
    await pair.left.pull(wanted, left.address + target, left)
    expected = before[:target] + bytes(right.arena[offset : offset + nbytes]) + before[target + nbytes :]
    assert bytes(left.arena) == expected
    return wanted


@pytest.mark.parametrize("named", [False, True])
async def test_across_extents(many: ConnectedPair, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that lies in several extents has several keys, which the reader asks for, and remembers."""
    numbers = random.Random(2)
    asked: list[Ask] = []
    tell = verbs(many.left)._tell

    def note(message: Message) -> None:
        if isinstance(message, Ask):
            asked.append(message)
        tell(message)

    monkeypatch.setattr(verbs(many.left), "_tell", note)
    for _ in range(100):
        await brings(many, numbers, named=named)
    for side in many.sides:
        assert engine_of(side).extents.nbytes == ARENA_NBYTES
    if named:
        assert len(asked) < 20, "every key is asked for once or twice: without one, and with a part of them"


async def test_many_keys_are_told_in_parts(many: ConnectedPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "MAX_KEYS", 2)
    side = many.sides[0]
    await many.left.pull(region(0, ARENA_NBYTES), side.address, side)
    assert bytes(side.arena) == bytes(many.sides[1].arena)
    assert verbs(many.left)._reach._asks == ARENA_NBYTES // EXTENT // 2


async def test_keys_that_have_become_wrong_are_asked_for_again(many: ConnectedPair) -> None:
    await brings(many, random.Random(1), named=True)
    side = many.sides[0]
    left = verbs(many.left)
    await many.left.pull(region(0, ARENA_NBYTES), side.address, side)
    left._reach.keys = {rkey ^ 0xFF: span for rkey, span in left._reach.keys.items()}
    assert many.right.export is not None
    seal, rkey = many.right.export(1, 0, ARENA_NBYTES)
    assert seal and not rkey
    await many.left.pull(RemoteRegion(1, 0, ARENA_NBYTES, seal, rkey), side.address, side)
    assert bytes(side.arena) == bytes(many.sides[1].arena)


async def test_an_answer_without_keys(many: ConnectedPair) -> None:
    left = verbs(many.left)
    task = asyncio.create_task(left.pull(region(0, 10), many.sides[0].address, None))
    while not left._reach.asked:
        await asyncio.sleep(0)
    left._take(Exported(left._reach._asks))
    with pytest.raises(ObjectLost, match="has no keys for 10 bytes"):
        await task


@pytest.mark.slow
async def test_what_may_be_pinned_is_enough(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demanded sum of pinned bytes is enough: every pull succeeds, in place, and further peers are refused.

    The arena is larger than the rest of the demanded sum, which may not be in use, and has many extents: memory that is
    registered twice does not fit.
    """
    nbytes = 4 << 20
    monkeypatch.setattr(engine, "ExtentTable", partial(ExtentTable, extent_nbytes=4 * EXTENT))
    limit = pinned_nbytes(nbytes)
    monkeypatch.setattr(joining, "viable_ports", partial(viable_ports, memlock=lambda: limit))
    with fake_sides(fabric, nbytes=nbytes) as sides:
        for nic in fabric.nics.values():
            nic.pin_limit = limit
        async with joined(sides) as pair:
            pair.left.start(Recorder())
            pair.right.start(Recorder())
            numbers = random.Random(3)
            for _ in range(100):
                await brings(pair, numbers, named=True)
            assert all(nic.pinned <= limit for nic in fabric.nics.values())
            assert "way of other" not in verbs(pair.left).describe()
            further = await sides[0].endpoint.connect(sides[1].endpoint.address)
            assert further.kind == "tcp"
            assert "RLIMIT_MEMLOCK" in further.rejected["verbs"]
            further.abort()
            (await pair.accepted.get()).abort()


async def test_a_page_less_than_what_must_be_pinned(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining is not tried where it would fail later: peers are reached over TCP, and know why."""
    limit = pinned_nbytes(ARENA_NBYTES) - mmap.PAGESIZE
    monkeypatch.setattr(joining, "viable_ports", partial(viable_ports, memlock=lambda: limit))
    with fake_sides(fabric) as sides:
        async with joined(sides) as pair:
            for end in (pair.left, pair.right):
                assert end.kind == "tcp"
                assert f"RLIMIT_MEMLOCK is {limit:,} bytes and the arena needs" in end.rejected["verbs"]
            await works(pair)
        assert not any(nic.pinned for nic in fabric.nics.values())


async def no_more_memory(pair: ConnectedPair) -> None:
    """Unregister all of the left side's arena, and let every further registration fail."""
    extents, device = engine_of(pair.sides[0]).extents, device_of(pair.sides[0])
    await extents.get(0, 1)
    for one in extents._regions.values():
        one.close()
    extents._regions.clear()
    device.nic.pin_limit = device.nic.pinned


async def test_a_destination_that_cannot_be_registered(many: ConnectedPair) -> None:
    """The bytes come by way of memory that is registered already."""
    await no_more_memory(many)
    numbers, copied = random.Random(4), [0]
    engine_of(many.sides[0]).extents.copied = copied.append
    total = sum([(await brings(many, numbers, named=number % 2 == 0)).nbytes for number in range(20)])
    assert sum(copied) == total
    assert "arrays come by way of other registered memory" in verbs(many.left).describe()
    assert "ulimit -l" in verbs(many.left).describe()


async def test_pulls_by_way_of_other_memory_take_turns_and_may_be_cancelled(
    many: ConnectedPair, fabric: FakeFabric
) -> None:
    await no_more_memory(many)
    side = many.sides[0]
    fabric.manual = True
    tasks = [
        asyncio.create_task(many.left.pull(region(number, 5000), side.address + number * 5000, side))
        for number in range(8)
    ]
    while verbs(many.left).puller.reads < 2:
        await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    await turns(20)
    assert verbs(many.left).puller.reads == 2, "what they had borrowed may still be written to"
    fabric.manual = False
    fabric.drain()
    for number, task in enumerate(tasks):
        if number < 2:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
            assert side.arena[number * 5000 : (number + 1) * 5000] == many.sides[1].arena[number : number + 5000]
    await turns(5)
    assert engine_of(side).bounce._free.qsize() == 2


# ---- the peer dies


async def test_device_dies_during_sends(
    pair: ConnectedPair, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
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
    pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
) -> None:
    wanted, side, keeper = await named(pair), pair.sides[0], PullKeeper()
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
    engine_of(pair.sides[1])._broken(OSError(5, "dead"))  # this closes the socket, as the end of the process does
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


async def test_own_device_fails_during_a_pull(
    pair: ConnectedPair, source: bytes, left: Recorder, fabric: FakeFabric
) -> None:
    wanted, side = await named(pair), pair.sides[0]
    fabric.manual = True
    pull = asyncio.ensure_future(pair.left.pull(wanted, side.address, side))
    await turns()
    engine_of(side)._broken(OSError(5, "the device is gone"))
    with pytest.raises(ConnectionLost, match="the device is gone"):
        await pull
    await left.wait_lost()


# ---- flow control


class Busy(Recorder):
    """A recorder that sends inside the batch of a frame, as inline methods do, and has both ends poll there.

    Args:
        connection: its connection.
        left: the number of frames to send in all.
        answers: whether it sends one frame for each that comes; otherwise it sends one, and more as far as credits go.
        poll: a function that is called after sending.
    """

    def __init__(self, connection: VerbsConnection, left: int, *, answers: bool, poll: Callable[[], None]) -> None:
        super().__init__()
        self.connection, self.left, self.answers, self.poll = connection, left, answers, poll

    def frames_received(self, data: memoryview) -> None:
        before = len(self.frames)
        super().frames_received(data)
        self.go_on(len(self.frames) - before if self.answers else DEPTH)
        self.poll()

    def go_on(self, most: int) -> None:
        """Send up to `most` frames, each a message of its own while there are credits."""
        for number in range(min(most, self.left)):
            if number and not self.answers and not self.connection._credits.available:
                break
            self.left -= 1
            send(self.connection, [b"message"])


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("peers", [1, 8])
async def test_no_message_meets_an_empty_queue(
    fabric: FakeFabric, entitlements: Entitlements, peers: int, nested: bool, early: bool
) -> None:
    """Windows are full, answers leave inside the batch, and the peer goes on at once with the credits in them."""
    count = 400
    with fake_sides(fabric) as sides:
        async with joined(sides) as pair:
            lefts, rights = [pair.left], [pair.right]
            for _ in range(peers - 1):
                lefts.append(await sides[0].endpoint.connect(sides[1].endpoint.address))
                rights.append(await pair.accepted.get())
            engines = [engine_of(side) for side in sides]

            depth = 0

            def poll() -> None:
                nonlocal depth
                if nested and depth < 3:
                    depth += 1
                    for engine in engines:
                        engine.poll_now()
                    depth -= 1

            callers = [Busy(verbs(end), count, answers=False, poll=poll) for end in lefts]
            answering = [Busy(verbs(end), count, answers=True, poll=poll) for end in rights]
            for end, receiver in zip((*lefts, *(() if early else rights)), (*callers, *answering), strict=False):
                end.start(receiver)
            for caller in callers:
                caller.go_on(DEPTH)
            await turns(20)
            if early:
                for end, receiver in zip(rights, answering, strict=True):
                    end.start(receiver)
            for one in (*answering, *callers):
                await one.wait_frames(count)
            assert not any(one.lost for one in (*callers, *answering))
            assert fabric.statistics().rnr == 0
            assert entitlements.posts > 2 * peers * DEPTH
            for end in (*lefts, *rights):
                end.abort()


@pytest.mark.parametrize(
    "error", [OSError(errno.EBUSY, "ibv_dereg_mr"), RuntimeError("a defect")], ids=["EBUSY", "any"]
)
async def test_one_connections_end_that_goes_wrong_is_no_other_ones(fabric: FakeFabric, error: Exception) -> None:
    """The end fails to unregister its memory, or has a defect: other connections go on, and so does the engine."""
    told: list[Exception] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    with fake_sides(fabric) as sides:
        async with joined(sides) as pair:
            other = ConnectedPair(
                await sides[0].endpoint.connect(sides[1].endpoint.address),
                await pair.accepted.get(),
                sides,
                pair.accepted,
            )
            engine = engine_of(sides[0])
            region = verbs(pair.left).pairs.send_area._region
            close = region.close

            def refuse() -> None:
                region.close = close  # type: ignore[method-assign]
                raise error

            region.close = refuse  # type: ignore[method-assign]
            pair.left.start(Recorder())
            pair.right.start(Recorder())
            pair.left.abort()
            while engine.connections == 2:
                await asyncio.sleep(0)
            await works(other)
            assert not engine.room
            assert len(queue_of(sides[0]).receives) == 2 * DEPTH
            assert told == ([] if isinstance(error, OSError) else [error])
            await other.left.aclose()


async def test_what_ends_in_a_forked_child_ends_nothing_of_the_parents(
    pair: ConnectedPair, left: Recorder, right: Recorder
) -> None:
    """The child frees its copies of objects, also by the collector, and its calls to the connection do nothing."""
    holders = [Whole(0, ARENA_NBYTES) for _ in range(8)]
    holders[0].itself = holders[0]  # type: ignore[attr-defined]  # goes by the collector only
    owner, engine = verbs(pair.right), engine_of(pair.sides[1])
    owner._reach._lookup = lambda object_id: holders[object_id] if object_id < len(holders) else None
    regions = [await named(pair, object_id=number) for number in range(8)]
    send(pair.right, [b"before"])
    put(pair.right, b"committed and not flushed")
    messages = owner._sender.messages
    pid = os.fork()
    if not pid:
        status = 1
        try:
            for side in pair.sides:  # as `zcactor.assembly.fork_guard` does
                endpoint_of(side).abandon()
            for end in (pair.left, pair.right):
                end.abort()
            holders.clear()
            gc.collect()
            with pytest.raises(ConnectionLost):
                owner.reserve(10)
            owner.flush()
            assert owner.export is not None
            assert owner.export(9, 0, 10)[0] == engine.seals.seal(98, 0, 10, Whole(0, 10)) == 0
            endpoint_of(pair.sides[1]).dispose()
            status = owner._sender.messages != messages
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for wanted in regions:
        await pair.left.pull(wanted, pair.sides[0].address, pair.sides[0])
    pair.right.flush()
    assert await left.wait_frames(2) == [b"before", b"committed and not flushed"]
    assert not engine.room


def leave(pair: ConnectedPair) -> None:
    """Leave a connection as a forked child does by `zcactor.assembly.fork_guard`, without a write."""
    for side in pair.sides:
        endpoint_of(side).abandon()
    for end in (pair.left, pair.right):
        end.abort()
    gc.collect()
    for side in pair.sides:
        endpoint_of(side).dispose()


@pytest.mark.slow
async def test_a_fork_at_every_moment_of_a_pull(pair: ConnectedPair, left: Recorder, fabric: FakeFabric) -> None:
    """The child ends in order, and touches neither the parent's pulls nor the pulls that the parent serves."""
    side, owner = pair.sides
    wanted = await named(pair)
    moments = 0
    for asked in (wanted, region(0, ARENA_NBYTES)):  # with keys, and without
        moment, ended = 0, False
        while not ended:
            owner.arena[:] = random.Random(moment).randbytes(ARENA_NBYTES)
            verbs(pair.left)._reach.keys.clear()
            keeper = PullKeeper()
            held = weakref.ref(keeper)
            fabric.manual = True
            pull = asyncio.ensure_future(pair.left.pull(asked, side.address, keeper))
            del keeper
            for _ in range(moment):
                await asyncio.sleep(0)
                fabric.step()
            ended = pull.done()
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    leave(pair)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            fabric.manual = False
            fabric.posted()
            await pull
            del pull
            assert side.arena == owner.arena
            assert held() is None
            moment += 1
        moments += moment
    assert moments > 10
    assert not left.lost


async def gone(pair: ConnectedPair) -> None:
    """Wait until the devices have nothing of the connection."""
    async with asyncio.timeout(2 * (LINGER + PATIENCE)):
        while any(engine_of(side).connections for side in pair.sides):
            await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["abort", "aclose", "peer"])
async def test_a_last_message_that_cannot_be_posted(
    pair: ConnectedPair, left: Recorder, right: Recorder, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    end = verbs(pair.left)

    def fail(_: Sequence[Send]) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOMEM, "the send queue is full")

    monkeypatch.setattr(end.pairs.control, "post_sends", fail)
    if how == "peer":
        pair.right.abort()
        await left.wait_lost()
    elif how == "abort":
        end.abort()
    async with asyncio.timeout(2 * (LINGER + PATIENCE)):
        await end.aclose()
    await right.wait_lost()
    await gone(pair)


async def test_the_end_does_not_wait_for_a_peer_that_takes_nothing(
    pair: ConnectedPair, left: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer is stopped, for example: no credits come back, and the last message waits for them."""
    monkeypatch.setattr(connection, "LINGER", 0.05)
    for i in range(100):
        send(pair.left, [b"%d" % i * 100])
    await turns(50)
    assert verbs(pair.left)._sender.pending
    async with asyncio.timeout(2 * (LINGER + PATIENCE)):
        await pair.left.aclose()
    assert left.lost == [None]
    pair.right.abort()
    await gone(pair)


@contextlib.contextmanager
def stopped(pair: ConnectedPair) -> Iterator[None]:
    """Let the right side's process take neither completions nor messages, while its device goes on by itself."""
    engine, link, loop = engine_of(pair.sides[1]), verbs(pair.right)._link, asyncio.get_running_loop()
    assert link is not None
    with pytest.MonkeyPatch.context() as patch:
        loop.remove_reader(engine.cq.fd)
        loop.remove_reader(link._sock.fileno())
        for name in ("_turn", "poll_now"):
            patch.setattr(engine, name, lambda: None)
        yield
    if not link._over:
        loop.add_reader(link._sock.fileno(), link._on_readable)
    engine._polling = False
    loop.add_reader(engine.cq.fd, engine._on_event)
    engine._on_event()


@pytest.mark.parametrize("closes", ["left", "right", "both"])
async def test_a_peer_that_is_stopped_while_it_lingers(
    pair: ConnectedPair, left: Recorder, right: Recorder, monkeypatch: pytest.MonkeyPatch, closes: str
) -> None:
    """The end that closes is done in time, and the stopped end once it goes on."""
    monkeypatch.setattr(connection, "PATIENCE", 0.05)
    send(pair.left, [b"there"])
    send(pair.right, [b"back"])
    await right.wait_frames(1)
    await left.wait_frames(1)
    if closes != "left":
        pair.right.abort()
    with stopped(pair):
        if closes != "right":
            pair.left.abort()
        async with asyncio.timeout(2 * (LINGER + PATIENCE)):
            await left.wait_lost()
            await pair.left.aclose()
            while engine_of(pair.sides[0]).connections:
                await asyncio.sleep(0)
    async with asyncio.timeout(2 * (LINGER + PATIENCE)):
        await pair.right.aclose()
    await gone(pair)
    assert len(left.lost) == len(right.lost) == 1


async def test_healthy_traffic_never_repeats_anything(
    pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder, fabric: FakeFabric
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
    pair: ConnectedPair, left: Recorder, right: Recorder, fabric: FakeFabric
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
