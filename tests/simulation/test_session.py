"""Sessions over simulated connections: the shared suite, on one host and between two."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from simulation.endpoint import SimEndpoint
from simulation.loop import SimLoop
from simulation.network import Network
from tests.conformance.session import MappingSessionSuite, SessionSuite
from tests.conformance.talk import DEPTH
from tests.simulation.loops import LOOPS as LOOP_FACTORIES
from tests.simulation.loops import MainLoop
from zcactor.objectstore.store import Store
from zcactor.process.place import Place

__all__ = ["LOOP_FACTORIES"]


async def two_ends(
    hosts: tuple[str, str], names: tuple[bytes, bytes], arenas: Any, *, native: bool = False
) -> tuple[Any, Any]:
    """Two connected ends in processes of these names, which serve their sessions on the loop of the test."""
    main = asyncio.get_running_loop()
    assert isinstance(main, MainLoop)
    network = Network(main.world)
    accepted: list[Any] = []
    endpoints = []
    for number, (host, name, arena) in enumerate(zip(hosts, names, arenas, strict=True)):
        loop = SimLoop(main.world, host, f"process{number}")
        endpoint = SimEndpoint(network, loop, name, Place(number, host), arena, recv_depth=DEPTH, native=native)
        await endpoint.start(accepted.append)
        endpoints.append(endpoint)
    near = await endpoints[0].connect(endpoints[1].address)
    while not accepted:
        await asyncio.sleep(0)
    return near, accepted.pop()


class TestOneHost(MappingSessionSuite):
    native = False

    @pytest.fixture
    async def connections(self, stores: tuple[Store, Store]) -> tuple[Any, Any]:
        arenas = [(store.arena.address, store.arena.nbytes) for store in stores]
        return await two_ends(("h1", "h1"), (stores[0].process, stores[1].process), arenas, native=self.native)


class TestTwoHosts(SessionSuite):
    native = False

    @pytest.fixture
    async def connections(self) -> tuple[Any, Any]:
        names = secrets.token_bytes(16), secrets.token_bytes(16)
        return await two_ends(("h1", "h2"), names, [(0, 0)] * 2, native=self.native)


class TestOneHostNative(TestOneHost):
    native = True


class TestTwoHostsNative(TestTwoHosts):
    native = True
