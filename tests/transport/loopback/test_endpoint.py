"""Loopback endpoints: the shared suite."""

from __future__ import annotations

import ctypes
import secrets

import pytest

from tests.conformance.connection import ARENA_NBYTES, MappingSuite, PullingSuite, Side
from zcactor.transport.loopback.endpoint import LoopbackEndpoint, LoopbackNetwork


def two_sides(*, maps: bool) -> tuple[Side, Side]:
    network = LoopbackNetwork(seed=1, maps=maps)

    def side() -> Side:
        process, arena = secrets.token_bytes(16), bytearray(ARENA_NBYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        return Side(LoopbackEndpoint(network, process, (address, ARENA_NBYTES, arena)), process, arena)

    return side(), side()


class TestLoopback(MappingSuite):
    @pytest.fixture
    def sides(self) -> tuple[Side, Side]:
        return two_sides(maps=True)


class TestLoopbackBetweenHosts(PullingSuite):
    @pytest.fixture
    def sides(self) -> tuple[Side, Side]:
        return two_sides(maps=False)


async def test_name_in_use() -> None:
    network, process = LoopbackNetwork(), bytes(16)
    async with LoopbackEndpoint(network, process) as endpoint:
        await endpoint.start(print)
        with pytest.raises(RuntimeError):
            await LoopbackEndpoint(network, process).start(print)
    await LoopbackEndpoint(network, process).start(print)
