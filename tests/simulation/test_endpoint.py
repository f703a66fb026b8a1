"""Listening and connecting; the suites are in test_connection.py."""

from __future__ import annotations

import asyncio

import pytest

from simulation.endpoint import SimEndpoint
from simulation.network import Network
from simulation.world import World
from tests.simulation.loops import LOOPS as LOOP_FACTORIES
from zcactor.errors import ConnectionLost
from zcactor.process.place import Place

__all__ = ["LOOP_FACTORIES"]


def endpoints(*hosts: str) -> tuple[Network, list[SimEndpoint]]:
    world: World = asyncio.get_running_loop().world  # type: ignore[attr-defined]
    network = Network(world)
    made = []
    for number, host in enumerate(hosts):
        loop = world.process(host, f"p{number}")
        made.append(SimEndpoint(network, loop, bytes([number]) * 16, Place(number, host), (0, 0), None))
    return network, made


async def test_addresses_of_other_hosts_are_asked_for() -> None:
    _, (one, near, far) = endpoints("h0", "h0", "h1")
    asked: list[str] = []

    async def find(name: str) -> str:
        asked.append(name)
        return name

    one.find_by(find)
    for other in (near, far):
        await other.start(lambda _: None)
        assert other.far_address == f"{other.address}@{other.loop.host}:1"
        await one.connect(other.address)
    assert asked == [far.address]


async def test_a_host_may_take_no_connections() -> None:
    network, (one, other) = endpoints("h0", "h1")
    await other.start(lambda _: None)
    with pytest.raises(RuntimeError):
        await other.start(lambda _: None)
    network.refusing["h1"] = None
    with pytest.raises(ConnectionLost, match="refused"):
        await one.connect(other.address)
    del network.refusing["h1"]
    await one.connect(other.address)
    await other.aclose()
    await other.aclose()
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await one.connect(other.address)


async def test_calls_of_a_head() -> None:
    network, (one, other, gone) = endpoints("h0", "h1", "h2")
    await other.start(lambda _: None)
    heard: list[tuple[str, int]] = []
    other.summoned = lambda place, epoch: heard.append((place, epoch))
    await one.summon(other.far_address, one.address, 7)
    await asyncio.sleep(1)
    assert heard == [(one.address, 7)]
    with pytest.raises(ConnectionLost, match="nobody listens"):
        await one.summon(gone.far_address, one.address, 7)
    assert await one.refuses(gone.far_address) and not await one.refuses(other.far_address)
    network.refusing["h1"] = None  # as a firewall does: it says nothing of the process
    assert not await one.refuses(other.far_address)
    network.cut("h0", "h1")
    network.cut("h0", "h2")
    assert not await one.refuses(gone.far_address)
    del network.refusing["h1"]
    with pytest.raises(ConnectionLost, match="does not answer"):
        await one.summon(other.far_address, one.address, 8)
    assert len(heard) == 1
