"""Endpoints over a real device, against a process that may be killed, blocked, or let down by its own memory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.connection import Recorder, put, send
from tests.transport.verbs.sides import device_sides, engine_of, joined, watch
from tests.vm.guest import guest_only, resources
from tests.vm.peers import (
    ALL,
    NUMBER,
    Link,
    Node,
    Peer,
    fifo,
    in_the_middle_of_reads,
    listening,
    pattern,
    pull_of,
    resident,
    same,
)
from tests.vm.phases import counters
from zcactor.errors import ConnectionLost, ObjectLost, ProtocolError
from zcactor.transport import RemoteRegion
from zcactor.transport.verbs.device.sizing import DEPTH
from zcactor.transport.verbs.driver.bindings import NAMES
from zcactor.transport.verbs.peer.connection import VerbsConnection

pytestmark = guest_only

MIB = 1 << 20
BIG = 64 * MIB
BINDINGS = [name for name in NAMES if importlib.util.find_spec(name) is not None]
"""The bindings of this interpreter."""
WARM = 20
"""Connections after which all things exist that are kept for later ones."""


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with listening(4 * MIB) as node:
        yield node


@pytest.fixture
async def large() -> AsyncIterator[Node]:
    """A node with room for arrays whose READ takes seconds in a guest."""
    async with listening(BIG) as node:
        yield node


async def settled(node: Node) -> None:
    """Wait until ended connections have given everything back."""
    engine = node.endpoint.engine
    assert engine is not None
    while engine.connections > len(node.links):
        await asyncio.sleep(0)


def open_files() -> dict[str, int]:
    """The number of this process's descriptors of each kind."""
    kinds: Counter[str] = Counter()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            kinds[os.readlink(entry.path).partition(":")[0]] += 1
    return dict(kinds)


async def works(node: Node, link: Link, peer: Peer, nbytes: int = MIB) -> None:
    """Check that frames go both ways, and that a pull brings the right bytes."""
    await peer.ask("fill", 7, nbytes)
    for number in range(100):
        send(link.connection, [NUMBER.pack(number)])
    assert await peer.ask("numbers", 100) == list(range(100))
    await peer.ask("send", 100)
    assert [NUMBER.unpack_from(frame)[0] for frame in await link.take(100)] == list(range(100))
    pull, _ = pull_of(node, link, 0, nbytes)
    await pull
    assert same(node, 7, nbytes)


@pytest.mark.parametrize("sender", ["we", "they"])
async def test_a_peer_killed_during_sends(node: Node, sender: str) -> None:
    await node.registered()
    before = resources(os.getpid())
    with Peer() as peer:
        link = await peer.connected(node)
        if sender == "we":
            await node.flood()
        else:
            await peer.ask("flood")
            await link.wait_frames(1000)
        peer.process.kill()
        assert isinstance(await link.wait_lost(), ConnectionLost)
        with pytest.raises(ConnectionLost):
            link.connection.reserve(1)
        await settled(node)
        assert resources(os.getpid()) == {**before, "mr": before["mr"] + 1}, "its receives stay, for the next one"
    with Peer() as other:
        await works(node, await other.connected(node), other)


async def test_an_owner_killed_during_a_read(large: Node) -> None:
    node = large
    with Peer(BIG) as peer:
        link = await peer.connected(node)
        in_the_middle_of_reads(link.verbs, peer.process.kill)
        pull, keeper = pull_of(node, link, 0, BIG)
        with pytest.raises(ConnectionLost):
            await pull
        assert isinstance(await link.wait_lost(), ConnectionLost)
        del pull  # the task has the error, and with its traceback all frames and their values
        while keeper() is not None:
            await asyncio.sleep(0)
        await settled(node)
    with Peer() as other:
        await works(node, await other.connected(node), other)


async def test_a_reader_killed_during_a_read(large: Node) -> None:
    before = resources(os.getpid())
    with Peer(BIG) as peer:
        link = await peer.connected(large)
        with pytest.raises((EOFError, ConnectionResetError)):
            await peer.ask("die_reading", BIG)
        assert isinstance(await link.wait_lost(), ConnectionLost)
        await settled(large)
        assert resources(os.getpid())["qp"] == before["qp"]
    with Peer() as other:
        await works(large, await other.connected(large), other)


@pytest.mark.parametrize("name", BINDINGS)
async def test_sealed_messages_and_what_is_authenticated(name: str) -> None:
    seen: list[bytes] = []
    with device_sides(name, sealing=True) as sides:
        async with joined(sides) as pair:
            ends = left, right = [end for end in (pair.left, pair.right) if isinstance(end, VerbsConnection)]
            for end in ends:
                watch(end, lambda view, nbytes: seen.append(bytes(view[:nbytes])))
            told, heard = Recorder(), Recorder()
            left.start(told)
            right.start(heard)
            for number in range(200):
                send(left, [b"easy to find %d" % number])
                send(right, [b"found easily %d" % number])
            assert await heard.wait_frames(200) == [b"easy to find %d" % number for number in range(200)]
            assert await told.wait_frames(200) == [b"found easily %d" % number for number in range(200)]
            assert len(seen) > 2 and not any(text in message for message in seen for text in (b"easy", b"easily"))
            nbytes = len(sides[1].arena)
            sides[1].arena[:] = os.urandom(nbytes)
            region = RemoteRegion(ALL, 0, nbytes, authenticate=True)
            await left.pull(region, sides[0].address, sides[0])
            assert bytes(sides[0].arena) == bytes(sides[1].arena)
            watch(right, flip)
            send(left, [b"changed"])
            assert isinstance(await heard.wait_lost(), ProtocolError)
            assert len(heard.frames) == 200


def set_link(state: str) -> None:
    """Run ``ip link set eth0 up``, or ``down``."""
    subprocess.run(["ip", "link", "set", "eth0", state], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BINDINGS)
async def test_a_port_that_goes_down_and_comes_back(name: str) -> None:
    """Runs alone and last, because it takes the device from all others."""
    with device_sides(name) as sides:
        async with joined(sides) as pair:
            left, right = Recorder(), Recorder()
            pair.left.start(left)
            pair.right.start(right)
            set_link("down")
            try:
                for recorder in (left, right):
                    assert isinstance(await recorder.wait_lost(), ConnectionLost)
                assert "rxe0 port 1 is DOWN" in f"{left.lost} {right.lost}"
                made, other = await sides[0].endpoint.connect(sides[1].endpoint.address), await pair.accepted.get()
                assert made.kind == other.kind == "tcp"
                assert "rxe0 port 1 is DOWN, not ACTIVE" in made.rejected["verbs"]
                made.abort()
                other.abort()
            finally:
                set_link("up")
            while any(engine_of(side).room for side in sides):
                await asyncio.sleep(0.01)
            made, other = await sides[0].endpoint.connect(sides[1].endpoint.address), await pair.accepted.get()
            assert made.kind == other.kind == "verbs"
            made.abort()
            other.abort()


def flip(view: memoryview, nbytes: int) -> None:
    """Flip one bit of a message in its slot."""
    view[nbytes // 2] ^= 1


class TestKeys:
    """A READ that the device refuses breaks the queue pair for READs, and nothing else."""

    PLACE = 3 * MIB, MIB
    """The place of an object beside the one that spans all of the arena."""

    async def test_a_forged_rkey_for_what_is_not_there(self, node: Node) -> None:
        with Peer(4 * MIB) as peer:
            link = await peer.connected(node)
            seal, rkey = await peer.ask("export", ALL)
            sent = asyncio.create_task(peer.ask("send", 500))
            for number, forged in enumerate((rkey ^ 0xFF, rkey + 0x100, 0xFFFFFFFF)):
                with pytest.raises(ObjectLost, match="no such object"):
                    await link.connection.pull(RemoteRegion(99, 0, MIB, seal, forged), node.arena.address, node)
                assert link.verbs.generation == number + 1
            await sent
            await link.take(500)
            await works(node, link, peer)

    async def test_a_wrong_rkey_is_asked_for_anew(self, node: Node) -> None:
        with Peer(4 * MIB) as peer:
            link = await peer.connected(node)
            await peer.ask("fill", 3, MIB)
            seal, rkey = await peer.ask("export", ALL)
            await link.connection.pull(RemoteRegion(ALL, 0, MIB, seal, rkey ^ 0xFF), node.arena.address, node)
            assert same(node, 3, MIB)
            assert link.verbs.generation == 1

    async def test_beside_others_pulls(self, large: Node) -> None:
        with Peer(BIG) as peer:
            link = await peer.connected(large)
            await peer.ask("fill", 5, BIG // 4)
            _, rkey = await peer.ask("export", ALL)
            pull, _ = pull_of(large, link, 0, BIG // 4)
            with pytest.raises(ObjectLost):
                bad = RemoteRegion(99, 0, MIB, 0, rkey ^ 0xFF)
                await link.connection.pull(bad, large.arena.address + BIG // 2, large)
            await pull
            assert same(large, 5, BIG // 4)

    async def test_a_revoked_rkey(self, node: Node) -> None:
        with Peer(2 * BIG) as peer:
            link = await peer.connected(node)
            await peer.ask("make", 2, BIG, MIB)
            seal, rkey = await peer.ask("export", 2)
            region = RemoteRegion(2, BIG, MIB, seal, rkey)
            await link.connection.pull(region, node.arena.address, node)
            await peer.ask("revoke", BIG, MIB)
            with pytest.raises(ObjectLost, match="REM_ACCESS"):
                await link.connection.pull(region, node.arena.address, node)
            await works(node, link, peer)  # through the extent that is still registered

    async def test_a_stale_seal(self, node: Node) -> None:
        with Peer(4 * MIB) as peer:
            link = await peer.connected(node)
            offset, nbytes = self.PLACE
            await peer.ask("make", 2, offset, nbytes)
            seal, rkey = await peer.ask("export", 2)
            region = RemoteRegion(2, offset, nbytes, seal, rkey)
            await link.connection.pull(region, node.arena.address, node)
            await peer.ask("free", 2)
            with pytest.raises(ObjectLost, match="no such object"):
                await link.connection.pull(region, node.arena.address, node)
            await peer.ask("make", 3, offset, nbytes)
            assert await peer.ask("export", 3) == (seal, rkey)  # another object has the place in the table now
            with pytest.raises(ObjectLost, match="no such object"):
                await link.connection.pull(region, node.arena.address, node)
            assert link.verbs.generation == 0
            await works(node, link, peer)


async def test_a_receiver_that_stands_still_loses_nothing(node: Node, tmp_path: Path) -> None:
    count = 600  # largest frames: the peer has receives for 64 messages
    before = counters()
    with Peer() as peer:
        link = await peer.connected(node)
        connection = link.verbs
        filler = bytes(connection.max_frame - NUMBER.size)
        with fifo(tmp_path) as path:
            await peer.ask("block", path)
            for number in range(count):
                put(connection, NUMBER.pack(number) + filler)
                connection.flush()
                if number % 16 == 15:
                    await asyncio.sleep(0)
            while connection._credits.available:
                await asyncio.sleep(0)
            for number in range(count, count + 5000):  # small frames, which gather behind the large ones
                send(connection, [NUMBER.pack(number)])
            assert connection._sender.pending
        assert await peer.ask("numbers", count + 5000) == list(range(count + 5000))
        await works(node, link, peer)
    after = counters()
    # These count for the whole device: tests that run beside this one lose messages to killed processes, but never for
    # lack of room.
    for name in ("send_rnr_err", "rcvd_rnr_err", "retry_rnr_exceeded_err"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("binding", BINDINGS)
async def test_a_busy_peer_that_answers_within_its_batch(binding: str) -> None:
    """The peer is sent as much as it gives credits for, and has a receive for each message."""
    count = 400  # largest frames, each of which is a message
    before = counters()
    async with listening(binding=binding) as node:
        with Peer(binding=binding) as peer:
            link = await peer.connected(node)
            connection = link.verbs
            filler = bytes(connection.max_frame - NUMBER.size)
            await peer.ask("answer")
            for number in range(count):
                while not connection._credits.available:
                    await asyncio.sleep(0)
                send(connection, [NUMBER.pack(number) + filler])
            assert [NUMBER.unpack_from(frame)[0] for frame in await link.take(count)] == list(range(count))
            assert connection._sender.messages >= count > 10 * DEPTH
    after = counters()
    for name in ("send_rnr_err", "rcvd_rnr_err", "retry_rnr_exceeded_err"):
        assert after[name] == before[name], name


@pytest.mark.parametrize("nbytes", [BIG - 4097, pytest.param(BIG, marks=pytest.mark.slow)])
async def test_many_pieces_arrive_exactly(nbytes: int) -> None:
    seed = nbytes % 1000
    async with listening(BIG) as node:
        with Peer(BIG) as peer:
            link = await peer.connected(node)
            await peer.ask("fill", seed, BIG)
            pull, _ = pull_of(node, link, BIG - nbytes, nbytes)
            await pull
            expected = pattern(seed, BIG)[BIG - nbytes :]
            assert node.arena.memory[:nbytes] == expected


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
async def test_many_connections_leave_nothing(count: int) -> None:
    with Peer() as peer:
        async with listening() as node:
            sockets, peers_files = open_files().get("socket", 0), (await peer.ask("resident"))[1]
            # One connection may still be ending when the next begins: then both have receives, in memory that is
            # registered once more and kept. These are more connections at once than that.
            for link in [await peer.connected(node) for _ in range(8)]:
                await link.connection.aclose()
            taken: dict[int, Any] = {}
            for number in range(1, count + 1):
                link = await peer.connected(node)
                await link.connection.aclose()
                if number in (WARM, count):
                    await settled(node)
                    while await peer.ask("connections"):
                        pass
                    await node.registered()  # this happens on a thread, which may still be at it
                    await peer.ask("registered")
                    async with asyncio.timeout(60):  # the last sockets are closed when both ends have said so
                        while open_files().get("socket", 0) > sockets:
                            await asyncio.sleep(0)
                        while (found := await peer.ask("resident"))[1] > peers_files:
                            pass
                    things = resources(os.getpid()), resources(peer.process.pid)
                    taken[number] = things, open_files(), (resident(), found[0])
            (before, files, memory), (after, files_after, memory_after) = taken[WARM], taken[count]
            assert after == before
            more = {kind: number for kind, number in files_after.items() if number > files.get(kind, 0)}
            assert not more, "and fewer are there only because of what the collector found of earlier tests"
            for earlier, later in zip(memory, memory_after, strict=True):
                # the send slots of a connection are 1 MiB: of all the ended ones they would be 80 MiB and more
                assert later - earlier < 32 * MIB
            await works(node, await peer.connected(node), peer)
