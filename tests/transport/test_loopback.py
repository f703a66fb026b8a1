"""Loopback endpoints: the shared suite."""

from __future__ import annotations

import ctypes
import secrets

import pytest

from tests.conformance.connection import ARENA_NBYTES, ConnectionSuite, Side
from zcactor.transport.loopback import LoopbackEndpoint, LoopbackNetwork


class TestLoopback(ConnectionSuite):
    @pytest.fixture
    def sides(self) -> tuple[Side, Side]:
        network = LoopbackNetwork(seed=1)

        def side() -> Side:
            process, arena = secrets.token_bytes(16), bytearray(ARENA_NBYTES)
            address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
            return Side(LoopbackEndpoint(network, process, (address, ARENA_NBYTES)), process, arena)

        return side(), side()


async def test_name_in_use() -> None:
    network, process = LoopbackNetwork(), bytes(16)
    async with LoopbackEndpoint(network, process) as endpoint:
        await endpoint.start(print)
        with pytest.raises(RuntimeError):
            await LoopbackEndpoint(network, process).start(print)
    await LoopbackEndpoint(network, process).start(print)
