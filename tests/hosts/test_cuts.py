"""Connections that end after each number of bytes, and bytes that come late and in pieces: two processes in this one.

One proxy is between the two for frames, and one for the sockets of arrays.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pytest

import zcactor as zc
from tests.conftest import LOOPS
from tests.hosts.members import Member, call, checksum, outcome_of
from tests.hosts.proxy import AS_IS, Proxy, Way
from zcactor.errors import ConnectionLost, ZcactorError
from zcactor.observe.stats import stats_of
from zcactor.process import context
from zcactor.transport.stream import handshake_io
from zcactor.transport.tcp import pull as tcp_pull
from zcactor.transport.tcp.connection import TcpConnection
from zcactor.transport.tcp.endpoint import TcpEndpoint, parse_address

PATIENCE = 40.0
"""Seconds after which a test counts as hanging: a watchdog, no statement about speed."""

Ending = Literal["cut", "reset"]


class Behind(TcpEndpoint):
    """An endpoint behind a proxy, which gives its peers the proxy's port as its own."""

    seen_port = 0

    def _link(self, key: bytes) -> bytes:
        port, self._port = self._port, self.seen_port or self._port
        try:
            return super()._link(key)
        finally:
            self._port = port


class Two:
    """A caller, an owner of the actor `Probe`, and the proxies in front of them, as a context.

    Attributes:
        frames: the proxy that the caller connects through.
        data: the proxy of data sockets to the caller, whose arrays the owner pulls.
    """

    async def __aenter__(self) -> Two:
        self.caller, self.owner = Member(endpoint=Behind), Member(endpoint=Behind)
        for member in (self.caller, self.owner):
            await member.start()
        self.frames, self.data = Proxy(_place(self.owner)), Proxy(_place(self.caller))
        for proxy in (self.frames, self.data):
            await proxy.__aenter__()
        self.caller.addresses[self.owner.name.hex()] = f"{self.owner.name.hex()}@127.0.0.1:{self.frames.port}"
        assert isinstance(self.caller.endpoint, Behind)
        self.caller.endpoint.seen_port = self.data.port
        self.caller.be_current()  # for both processes: unpacking does not ask to which of them a value belongs
        return self

    async def __aexit__(self, *_: object) -> None:
        context.clear_current()
        for member in (self.caller, self.owner):
            await member.close()
        for proxy in (self.frames, self.data):
            await proxy.__aexit__(None, None, None)

    async def outcome(self, method: str, *args: Any) -> Sequence[Any]:
        """Make a call by a handle without a connection; return the end of the call as plain values."""
        try:
            result = await call(self.caller.probe_at(self.owner.name, self.owner.index), method, *args)
        except ZcactorError as error:
            return outcome_of(error)
        return (*outcome_of(None), result)

    async def parted(self) -> None:
        """Return when no connection is left, and nothing that belongs to a connection."""
        for member in (self.caller, self.owner):
            await member.alone()
            while member.endpoint.pending:
                await asyncio.sleep(0)
        while self.frames.open or self.data.open:
            await asyncio.sleep(0)

    async def part(self) -> None:
        """End the connection, and wait until nothing of it is left."""
        for session in list(self.caller.process.sessions.all()):
            await session.aclose()
        await self.parted()

    async def settled(self) -> None:
        """Return when no lease is left, and no memory is in use."""
        for member in (self.caller, self.owner):
            while (found := stats_of(member.process)).leases or found.store_used:
                gc.collect()
                await asyncio.sleep(0)


def _place(member: Member) -> tuple[str, int]:
    _, host, port = parse_address(member.endpoint.address)
    return host, port


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with asyncio.timeout(PATIENCE), Two() as two:
        yield two


def ways(direction: str, limit: int, ending: Ending) -> tuple[Way, Way]:
    """The treatments there and back, one of which ends after `limit` bytes."""
    way = Way(limit=limit, ending=ending)
    return (way, AS_IS) if direction == "there" else (AS_IS, way)


CASES: list[tuple[str, Ending, str]] = [
    ("there", "cut", "uvloop"),
    ("there", "reset", "asyncio"),
    ("back", "cut", "asyncio"),
    ("back", "reset", "uvloop"),
]
"""Each case runs on one loop only, because there are many bytes."""


@contextlib.contextmanager
def running(loop: str) -> Iterator[asyncio.Runner]:
    """A runner of coroutines on a loop of that kind."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        yield runner


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "ending", "loop"), CASES)
def test_a_connection_ends_after_each_byte(direction: str, ending: Ending, loop: str) -> None:
    async def test() -> None:
        async with asyncio.timeout(PATIENCE), Two() as two:
            await _end_after_each_byte(two, direction, ending)

    with running(loop) as runner:
        runner.run(test())


async def _end_after_each_byte(two: Two, direction: str, ending: Ending) -> None:
    # The end moves through the handshake, both processes' introductions, the call's frame and its answer's.
    side = 0 if direction == "there" else 1
    descriptors: list[int] = []
    kinds = set()
    limit = 0
    while True:
        two.frames.there, two.frames.back = ways(direction, limit, ending)
        kind, maybe_executed, *result = await two.outcome("note", limit)
        kinds.add((kind, maybe_executed))
        noted = two.owner.probe.noted.count(limit)
        assert noted <= 1
        assert noted == 1 or maybe_executed or kind != "value"
        assert noted == 0 or maybe_executed
        assert result == ([limit] if kind == "value" else [])
        if two.frames.passed[-1][side] < limit:
            break
        await two.parted()
        two.frames.there = two.frames.back = AS_IS
        if limit % 32 == 0:
            assert await two.outcome("add", limit, 1) == ("value", True, limit + 1)
            await two.part()
            descriptors.append(len(os.listdir("/proc/self/fd")))
        limit += 1
    assert limit > 200
    assert kinds == {("ActorDied", False), ("ActorDied", True), ("value", True)}
    assert max(descriptors[1:]) == descriptors[1]  # fewer when leftovers of earlier tests end meanwhile


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["there", "back"])
async def test_a_handshake_that_stalls_at_each_byte(two: Two, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = two.caller.addresses[two.owner.name.hex()]
    (await two.caller.endpoint.connect(address)).abort()
    total = two.frames.passed[0][0]  # the whole handshake; the way back is longer by the acceptor's verdict
    await two.parted()
    monkeypatch.setattr(handshake_io, "HANDSHAKE_TIMEOUT", 0.3)

    async def connect(limit: int) -> None:
        async with order:  # a connection takes the treatment that is set when it comes
            way = Way(limit=limit, ending="stall")
            two.frames.there, two.frames.back = (way, AS_IS) if direction == "there" else (AS_IS, way)
            before = two.frames.open
            task = asyncio.create_task(two.caller.endpoint.connect(address))
            while two.frames.open == before:
                await asyncio.sleep(0)
        with pytest.raises(ConnectionLost):
            await task

    order = asyncio.Lock()
    for start in range(0, total, 64):
        await asyncio.gather(*(connect(limit) for limit in range(start, min(start + 64, total))))
        two.frames.end("cut")
        await two.parted()
    two.frames.there = two.frames.back = AS_IS
    assert await two.outcome("add", 1, 1) == ("value", True, 2)


ELEMENTS = 1024


@pytest.mark.slow
@pytest.mark.parametrize(("direction", "ending", "loop"), CASES)
def test_a_data_socket_ends_after_each_byte(
    direction: str, ending: Ending, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_pull, "PAUSE", 0.0)
    # A socket that the peer opens on request does not pass the proxy, and replaces the one that ends.
    monkeypatch.setattr(TcpConnection, "ask_to_dial", lambda _: None)
    monkeypatch.setattr(tcp_pull, "COMES_WITHIN", 0.0)

    async def test() -> None:
        async with asyncio.timeout(PATIENCE), Two() as two:
            await _end_data_after_each_byte(two, direction, ending)

    with running(loop) as runner:
        runner.run(test())


async def _end_data_after_each_byte(two: Two, direction: str, ending: Ending) -> None:
    # The end moves through the handshake, the request and its answer, and at some places through the array's bytes.
    array = zc.empty(ELEMENTS)
    array[:] = np.arange(ELEMENTS)
    whole = ("value", True, checksum(array))
    assert await two.outcome("received", array) == whole
    around = sum(two.data.passed[0]) - 8 * ELEMENTS  # more bytes than either way has around the array
    limits = [*range(around), *range(around, around + 8 * ELEMENTS, 1009), around + 8 * ELEMENTS]
    two.data.end("cut")
    kinds = set()
    for limit in limits:
        two.data.there, two.data.back = ways(direction, limit, ending)
        found = await two.outcome("received", array)
        kinds.add(found[:2])
        assert found == whole or found[0] != "value"
        two.data.there = two.data.back = AS_IS
        assert len(two.frames.passed) == 1, "the connection itself has lasted"
        if limit % 32 == 0:  # the next pull opens a socket without a limit
            assert await two.outcome("received", array) == whole
        two.data.end("cut")
    assert kinds == {("ObjectLost", None), ("value", True)}
    del array
    await two.settled()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "numbers"),
    [(Way(delay=0.05, jitter=0.02, seed=1), 200), (Way(slices=9, seed=2), 200), (Way(rate=1e6), 200)],
    ids=["late", "in pieces", "slow"],
)
async def test_bytes_that_come_late_or_in_pieces(two: Two, way: Way, numbers: int) -> None:
    for proxy in (two.frames, two.data):
        proxy.there = proxy.back = way
    actor = two.caller.probe_at(two.owner.name, two.owner.index)
    array = zc.empty(ELEMENTS)
    array[:] = np.arange(ELEMENTS)
    refs = [call(actor, "note", number) for number in range(numbers)]
    arrays = [call(actor, "received", array) for _ in range(4)]
    assert await asyncio.gather(*refs) == two.owner.probe.noted == list(range(numbers))
    assert await asyncio.gather(*arrays) == [checksum(array)] * 4
    assert np.array_equal(await call(actor, "doubled", array), 2 * array)
    del array, arrays
    await two.settled()
    assert len(two.frames.passed) == 1
