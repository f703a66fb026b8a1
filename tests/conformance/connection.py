"""The suite that every `Connection` and its `Endpoint` must pass.

A transport joins by a subclass of `MappingSuite` or `PullingSuite`, as the attribute `maps` of its connections says,
with the fixture ``sides``: two `Side` objects, as a tuple, that can reach each other and whose endpoints are not
started. The suite closes the endpoints.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import weakref
from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.conformance.ends import (
    ARENA_NBYTES,
    ConnectedPair,
    PullKeeper,
    Recorder,
    Sender,
    Side,
    connect,
    finish,
    put,
    region,
    send,
    turns,
)
from tests.conformance.frames import ConnectionSuite
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.transport.tcp.flow import take_flows

if TYPE_CHECKING:
    from zcactor.transport.bytes import Flow

__all__ = [
    "ARENA_NBYTES",
    "ConnectedPair",
    "ConnectionSuite",
    "MappingSuite",
    "PullKeeper",
    "PullingSuite",
    "Recorder",
    "Sender",
    "Side",
    "connect",
    "finish",
    "put",
    "region",
    "send",
    "turns",
]  # fmt: skip


class MappingSuite(ConnectionSuite):
    """For connections that map the peer's arena."""

    async def test_maps(self, pair: ConnectedPair) -> None:
        assert pair.left.maps and pair.right.maps

    async def test_map_reads_in_place(self, pair: ConnectedPair) -> None:
        arena = pair.sides[1].arena
        arena[100:105] = b"hello"
        mapped = pair.left.map(100, 5)
        assert ctypes.string_at(mapped.address, mapped.nbytes) == b"hello"
        arena[100:105] = b"later"
        assert ctypes.string_at(mapped.address, 5) == b"later"

    @pytest.mark.parametrize("writable", [False, True])
    async def test_mapped_bytes_outlive_the_connection(self, pair: ConnectedPair, writable: bool) -> None:
        """The object owns the validity of the address: the owner of the connection may let go of all else."""
        await pair.left.open_writable()
        pair.sides[1].arena[100:105] = b"owned"
        mapped = pair.left.map(100, 5, writable=writable)
        pair.left.abort()
        pair.left.mapping = pair.left.writable_mapping = None
        await turns()
        gc.collect()
        assert ctypes.string_at(mapped.address, 5) == b"owned"
        if writable:
            ctypes.memmove(mapped.address, b"wrote", 5)
            assert bytes(pair.sides[1].arena[100:105]) == b"wrote"

    async def test_map_bounds(self, pair: ConnectedPair) -> None:
        whole = pair.left.map(0, ARENA_NBYTES)
        base = whole.address
        assert base and whole.nbytes == ARENA_NBYTES
        assert pair.left.map(0, 0).address == base
        assert pair.left.map(ARENA_NBYTES - 1, 1).address == base + ARENA_NBYTES - 1
        assert pair.left.map(ARENA_NBYTES, 0).address == base + ARENA_NBYTES
        wrong = [(0, ARENA_NBYTES + 1), (1, ARENA_NBYTES), (ARENA_NBYTES, 1), (ARENA_NBYTES + 1, 0), (-1, 1), (0, -1)]
        wrong += [(2**64 - 1, 1), (2**64 - 1, 2**64 - 1), (1, 2**64 - 1), (2**64 - 8, 16)]
        for offset, nbytes in wrong:
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes)
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes, writable=True)

    async def test_map_writable(self, pair: ConnectedPair) -> None:
        with pytest.raises(LookupError):
            pair.left.map(0, 10, writable=True)
        await asyncio.gather(pair.left.open_writable(), pair.left.open_writable())
        await pair.left.open_writable()
        ctypes.memmove(pair.left.map(8, 5, writable=True).address, b"moved", 5)
        assert bytes(pair.sides[1].arena[8:13]) == b"moved"
        with pytest.raises(LookupError):
            pair.right.map(0, 10, writable=True)
        await pair.right.open_writable()
        ctypes.memmove(pair.right.map(0, 4, writable=True).address, b"back", 4)
        assert bytes(pair.sides[0].arena[:4]) == b"back"

    async def test_open_writable_when_closed(self, pair: ConnectedPair) -> None:
        await pair.left.aclose()
        with pytest.raises(ConnectionLost):
            await pair.left.open_writable()


def begun_pull(pair: ConnectedPair) -> tuple[asyncio.Task[None], weakref.ref[PullKeeper]]:
    """A pull of the whole arena, and the keeper of its target, which the pull alone has."""
    keeper = PullKeeper()
    pull = pair.left.pull(region(0, ARENA_NBYTES), pair.sides[0].address, keeper)
    return asyncio.ensure_future(pull), weakref.ref(keeper)


class PullingSuite(ConnectionSuite):
    """For connections through which the peer's bytes are pulled.

    Attributes:
        flows: whether a thread may take the bytes as they arrive.
    """

    flows: ClassVar[bool] = False

    @pytest.fixture
    def source(self, pair: ConnectedPair) -> bytes:
        """Fill the right side's arena with random bytes, and return them."""
        data = random.Random(1).randbytes(ARENA_NBYTES)
        pair.sides[1].arena[:] = data
        return data

    async def test_pulls(self, pair: ConnectedPair) -> None:
        assert not pair.left.maps and not pair.right.maps
        assert pair.left.mapping is pair.left.writable_mapping is None

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 1), (1, 1), (ARENA_NBYTES - 1, 1), (4095, 2), (64, 4096), (3, 20_001), (0, ARENA_NBYTES)],
    )
    async def test_bytes_arrive_exactly(self, pair: ConnectedPair, source: bytes, offset: int, nbytes: int) -> None:
        side = pair.sides[0]
        start = min(offset // 2, ARENA_NBYTES - nbytes)  # other places than at the owner
        side.arena[:] = b"\xee" * ARENA_NBYTES
        await pair.left.pull(region(offset, nbytes), side.address + start, side)
        expected = b"\xee" * start + source[offset : offset + nbytes] + b"\xee" * (ARENA_NBYTES - start - nbytes)
        assert bytes(side.arena) == expected

    async def test_pulls_both_ways(self, pair: ConnectedPair) -> None:
        for side, byte in zip(pair.sides, b"lr", strict=True):
            side.arena[:100] = bytes((byte,)) * 100
        left, right = pair.sides
        await asyncio.gather(
            pair.left.pull(region(0, 100), left.address + 1000, left),
            pair.right.pull(region(0, 100), right.address + 1000, right),
        )
        assert bytes(left.arena[1000:1100]) == b"r" * 100
        assert bytes(right.arena[1000:1100]) == b"l" * 100

    async def test_later_bytes(self, pair: ConnectedPair) -> None:
        left, right = pair.sides
        for word in (b"first", b"later"):
            right.arena[100:105] = word
            await pair.left.pull(region(100, 5), left.address, left)
            assert bytes(left.arena[:5]) == word

    async def test_many_at_once(self, pair: ConnectedPair, source: bytes) -> None:
        side, count = pair.sides[0], 64
        nbytes = ARENA_NBYTES // count
        order = random.Random(2).sample(range(count), count)
        await asyncio.gather(
            *(
                pair.left.pull(region(there * nbytes, nbytes), side.address + here * nbytes, side)
                for here, there in enumerate(order)
            )
        )
        assert bytes(side.arena) == b"".join(source[there * nbytes : (there + 1) * nbytes] for there in order)

    async def test_frames_go_on_beside_pulls(
        self, pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder
    ) -> None:
        side, count = pair.sides[0], 50
        for i in range(count):
            send(pair.right, [b"%d" % i])
            send(pair.left, [b"%d" % i])
            await pair.left.pull(region(i, 1000), side.address, side)
            assert bytes(side.arena[:1000]) == source[i : i + 1000]
        assert await left.wait_frames(count) == await right.wait_frames(count) == [b"%d" % i for i in range(count)]

    async def test_a_flow_brings_the_same_bytes_to_a_thread(self, pair: ConnectedPair, source: bytes) -> None:
        wanted = region(3, 20_001)
        for _ in range(2):
            flow = await pair.left.flow(wanted)
            assert (flow is not None) == self.flows
            if flow is None:
                return
            into = bytearray(wanted.nbytes)

            def take(flow: Flow = flow, into: bytearray = into) -> None:
                flow.begin()
                for at in range(0, len(into), 777):
                    flow.take(memoryview(into)[at : at + 777])

            assert await take_flows([flow], take)
            assert into == source[3 : 3 + wanted.nbytes]

    async def test_flow_bounds(self, pair: ConnectedPair) -> None:
        if self.flows:
            for offset, nbytes in [(0, ARENA_NBYTES + 1), (ARENA_NBYTES, 1), (-1, 1), (2**64 - 1, 1)]:
                with pytest.raises(ProtocolError):
                    await pair.left.flow(region(offset, nbytes))
        await pair.left.aclose()
        assert await pair.left.flow(region(0, 10)) is None

    async def test_pull_bounds(self, pair: ConnectedPair, source: bytes) -> None:
        side = pair.sides[0]
        wrong = [(0, ARENA_NBYTES + 1), (1, ARENA_NBYTES), (ARENA_NBYTES, 1), (-1, 1), (2**64 - 1, 1), (2**64 - 8, 16)]
        for offset, nbytes in wrong:
            with pytest.raises(ProtocolError):
                await pair.left.pull(region(offset, nbytes), side.address, side)
        await pair.left.pull(region(0, 10), side.address, side)
        assert bytes(side.arena[:10]) == source[:10]

    async def test_map_gives_nothing_beyond_bounds(self, pair: ConnectedPair) -> None:
        for offset, nbytes in [(0, ARENA_NBYTES + 1), (ARENA_NBYTES, 1), (-1, 1), (0, -1), (2**64 - 1, 1)]:
            with pytest.raises(ProtocolError):
                pair.left.map(offset, nbytes)

    async def test_pull_from_a_closed_connection(self, pair: ConnectedPair, left: Recorder) -> None:
        await pair.left.aclose()
        side = pair.sides[0]
        with pytest.raises(ConnectionLost):
            await pair.left.pull(region(0, 10), side.address, side)

    async def test_keep_is_let_go_of(self, pair: ConnectedPair, source: bytes) -> None:
        keeper = PullKeeper()
        held = weakref.ref(keeper)
        side = pair.sides[0]
        await pair.left.pull(region(0, 10), side.address, keeper)
        del keeper
        while held() is not None:
            await asyncio.sleep(0)

    @pytest.mark.parametrize("waited", [0, 1, 2, 5, 20])
    async def test_cancelled_pull_writes_nothing_once_it_let_go(
        self, pair: ConnectedPair, source: bytes, waited: int
    ) -> None:
        side = pair.sides[0]
        pull, held = begun_pull(pair)
        await turns(waited)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        del pull
        while held() is not None:
            await asyncio.sleep(0)
        side.arena[:] = bytes(ARENA_NBYTES)
        await turns(50)
        assert not any(side.arena)
        await pair.left.pull(region(0, ARENA_NBYTES), side.address, side)
        assert bytes(side.arena) == source

    @pytest.mark.parametrize("waited", [0, 1, 2, 5, 20])
    @pytest.mark.parametrize("end", ["left", "right"])
    async def test_connection_lost_during_a_pull(
        self, pair: ConnectedPair, source: bytes, left: Recorder, right: Recorder, waited: int, end: str
    ) -> None:
        side = pair.sides[0]
        pull, held = begun_pull(pair)
        await turns(waited)
        (pair.left if end == "left" else pair.right).abort()
        (outcome,) = await asyncio.gather(pull, return_exceptions=True)
        if outcome is None:
            assert bytes(side.arena) == source
        else:
            assert isinstance(outcome, ConnectionLost)
        await left.wait_lost()
        with pytest.raises(ConnectionLost):
            await pair.left.pull(region(0, 10), side.address, side)
        del pull, outcome
        while held() is not None:
            await asyncio.sleep(0)
