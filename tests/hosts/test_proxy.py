"""The proxy that other tests put between two processes: it passes bytes on, and ends connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from tests.hosts.proxy import Proxy, Way

PATIENCE = 20.0


@contextlib.asynccontextmanager
async def through(there: Way, back: Way) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Proxy]]:
    """A connection, through a proxy, to a server that sends everything back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with asyncio.timeout(PATIENCE), server, Proxy(server.sockets[0].getsockname(), there, back) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        yield reader, writer, proxy
        writer.close()
        while proxy.open:
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "way",
    [Way(), Way(slices=7, seed=3), Way(delay=0.002, jitter=0.002, seed=1), Way(rate=1e6), Way(delay=0.001, slices=999)],
    ids=str,
)
async def test_all_bytes_arrive_in_order(way: Way) -> None:
    async with through(way, way) as (reader, writer, proxy):
        data = os.urandom(3000)
        for at in range(0, len(data), 100):
            writer.write(data[at : at + 100])
            await asyncio.sleep(0)
        assert await reader.readexactly(len(data)) == data
        writer.write_eof()
        assert await reader.read() == b""
        assert proxy.passed == [(3000, 3000)]


@pytest.mark.parametrize("limit", [0, 1, 10])
async def test_connections_are_cut_and_reset_after_so_many_bytes(limit: int) -> None:
    async with through(Way(), Way(limit=limit)) as (reader, writer, proxy):
        writer.write(b"0123456789abcdef")
        assert await reader.read() == b"0123456789abcdef"[:limit]
        assert proxy.passed == [(16 if limit else proxy.passed[0][0], limit)]
    async with through(Way(limit=limit, ending="reset"), Way()) as (reader, writer, proxy):
        writer.write(b"0123456789abcdef")
        with pytest.raises(ConnectionResetError):
            while await reader.read(1):
                pass
    async with through(Way(), Way()) as (reader, writer, proxy):
        writer.write(b"0")
        await reader.readexactly(1)
        proxy.end("reset")
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_stalled_connection_stays() -> None:
    async with through(Way(), Way(limit=3, ending="stall")) as (reader, writer, proxy):
        writer.write(b"012345")
        assert await reader.readexactly(3) == b"012"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        assert proxy.open == 1
        proxy.end("cut")
        assert await reader.read() == b""


async def test_nobody_at_the_other_side() -> None:
    async with through(Way(), Way()) as (_, _, proxy):
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            proxy.place = deaf.getsockname()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
