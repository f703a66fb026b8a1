"""Connections between simulated processes: the shared suites, on one host and between two, and their ends."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import weakref
from typing import Any

import pytest

from simulation.endpoint import SimEndpoint
from simulation.network import Network
from tests.conformance.connection import (
    ARENA_NBYTES,
    MappingSuite,
    PullingSuite,
    Recorder,
    Side,
    connect,
    send,
)
from tests.simulation.loops import LOOPS as LOOP_FACTORIES
from tests.simulation.loops import MainLoop
from zcactor.errors import ConnectionLost, ObjectLost
from zcactor.process.place import Place
from zcactor.transport import RemoteRegion

__all__ = ["LOOP_FACTORIES"]


def two_sides(*hosts: str, native: bool = False) -> tuple[Side, Side]:
    main = asyncio.get_running_loop()
    assert isinstance(main, MainLoop)
    network = Network(main.world)

    def side(number: int, host: str) -> Side:
        process, arena = bytes([number]) * 16, bytearray(ARENA_NBYTES)
        loop = main.world.process(host, f"process{number}")
        given: Any = loop  # exceptions of a receiver go to the loop that the suite looks at
        given.call_exception_handler = main.call_exception_handler
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        endpoint = SimEndpoint(
            network, loop, process, Place(number, host), (address, ARENA_NBYTES), arena, native=native
        )
        return Side(endpoint, process, arena)

    return side(1, hosts[0]), side(2, hosts[1])


class TestOneHost(MappingSuite):
    @pytest.fixture
    async def sides(self) -> tuple[Side, Side]:
        return two_sides("h1", "h1")


class TestOneHostNative(MappingSuite):
    @pytest.fixture
    async def sides(self) -> tuple[Side, Side]:
        return two_sides("h1", "h1", native=True)


class TestTwoHosts(PullingSuite):
    @pytest.fixture
    async def sides(self) -> tuple[Side, Side]:
        return two_sides("h1", "h2")


def network_of(side: Side) -> Network:
    endpoint = side.endpoint
    assert isinstance(endpoint, SimEndpoint)
    return endpoint.network


@pytest.mark.parametrize("ways", [[("h1", "h2")], [("h2", "h1")], [("h1", "h2"), ("h2", "h1")]])
async def test_a_cut_that_lasts_ends_both_ends(ways: list[tuple[str, str]]) -> None:
    pair = await connect(*two_sides("h1", "h2"))
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    network, world = network_of(pair.sides[0]), network_of(pair.sides[0]).world
    begun = world.now
    for way in ways:
        network.cut(*way)
    send(pair.left, [b"behind the cut"])
    for end in (left, right):
        cause = await end.wait_lost()
        assert isinstance(cause, ConnectionLost)
        assert 0 < world.now - begun < 7
    assert right.frames in ([], [b"behind the cut"])
    with pytest.raises(ConnectionLost):
        await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)
    network.heal_all()
    await pair.sides[0].endpoint.connect(pair.sides[1].endpoint.address)


async def test_a_short_cut_loses_nothing() -> None:
    pair = await connect(*two_sides("h1", "h2"))
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    network = network_of(pair.sides[0])
    send(pair.left, [b"1"])
    network.cut("h1", "h2")
    send(pair.left, [b"2"])
    await asyncio.sleep(3)
    send(pair.left, [b"3"])
    assert right.frames in ([], [b"1"])
    network.heal("h1", "h2")
    send(pair.left, [b"4"])
    assert await right.wait_frames(4) == [b"1", b"2", b"3", b"4"]
    await asyncio.sleep(20)
    assert not left.lost and not right.lost


async def test_a_close_behind_a_cut_is_heard_of() -> None:
    pair = await connect(*two_sides("h1", "h2"))
    right = Recorder()
    pair.left.start(Recorder())
    pair.right.start(right)
    network = network_of(pair.sides[0])
    network.cut("h1", "h2")
    send(pair.left, [b"the last"])
    await pair.left.aclose()
    await asyncio.sleep(1)
    network.heal_all()
    assert await right.wait_frames(1) == [b"the last"]
    await right.wait_lost()


async def test_a_host_that_is_off_says_nothing_and_resets_when_it_is_back() -> None:
    pair = await connect(*two_sides("h1", "h2"))
    left = Recorder()
    pair.left.start(left)
    network = network_of(pair.sides[0])
    network.world.end(pair.right.loop, "its host is off")  # type: ignore[attr-defined]
    pair.right.vanish(silently=True)  # type: ignore[attr-defined]
    network.switch_off("h2")
    await asyncio.sleep(3)
    assert not left.lost
    network.switch_on("h2")
    cause = await left.wait_lost()
    assert cause is not None
    assert isinstance(cause.__cause__, ConnectionResetError)


async def test_a_process_that_ends_is_heard_of_and_takes_no_further_step() -> None:
    pair = await connect(*two_sides("h1", "h2"))
    left, right = Recorder(), Recorder()
    pair.left.start(left)
    pair.right.start(right)
    world = network_of(pair.sides[0]).world
    world.end(pair.right.loop, "killed")  # type: ignore[attr-defined]
    pair.right.vanish(silently=False)  # type: ignore[attr-defined]
    send(pair.left, [b"too late"])
    cause = await left.wait_lost()
    assert isinstance(cause, ConnectionLost)
    assert cause.__cause__ is None
    await asyncio.sleep(5)
    assert not right.frames and not right.lost


async def test_bytes_without_a_lease_are_refused() -> None:
    one, other = two_sides("h1", "h2")
    assert isinstance(other.endpoint, SimEndpoint)
    other.endpoint.authorize = lambda *_: None
    pair = await connect(one, other)
    pair.left.start(Recorder())
    pair.right.start(Recorder())
    with pytest.raises(ObjectLost):
        await pair.left.pull(RemoteRegion(1, 0, 16), one.address, None)


async def test_a_process_that_ends_while_it_pulls_keeps_nothing_of_its_peer() -> None:
    class Held:
        pass

    one, other = two_sides("h1", "h2")
    held = Held()
    kept = weakref.ref(held)
    lent = [held]
    assert isinstance(other.endpoint, SimEndpoint)
    other.endpoint.authorize = lambda *_: lent.pop()
    del held
    pair = await connect(one, other)
    pair.left.start(Recorder())
    pair.right.start(Recorder())
    network = network_of(one)
    pulling = asyncio.ensure_future(pair.left.pull(RemoteRegion(1, 0, 16), one.address, None))
    while lent:  # the owner's side has no event for tests
        await asyncio.sleep(1e-6)
    network.cut("h1", "h2")
    network.world.end(pair.left.loop, "killed")  # type: ignore[attr-defined]
    pair.left.vanish(silently=True)  # type: ignore[attr-defined]
    gc.collect()
    assert kept() is None
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
