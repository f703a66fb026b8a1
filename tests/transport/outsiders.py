"""Outsiders at the other end of a connection under test: a bare socket, a relay, or a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from tests.conformance.connection import Recorder, Side, send, turns
from zcactor.transport.base import Connection
from zcactor.transport.stream.handshake import HELLO_NBYTES, HandshakeStatus, preamble, refusal

STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "tls": bytes.fromhex("1603010200010001fc0303") + os.urandom(500),
    "random": os.urandom(100_000),
    "zeros": bytes(8),
    "bad hello": preamble() + b"\xff" * HELLO_NBYTES,
}
"""The first bytes of peers that do not speak zcactor's protocol."""
ANSWERS = (b"", refusal(HandshakeStatus.TLS))
"""The answers to them: none, or that there is no TLS."""


async def rest(sock: socket.socket) -> bytes:
    """The bytes up to the other end's close. Bytes that it left unread make the system report a reset."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.get_running_loop().sock_recv(sock, 100):
            received += part
    return received


@contextlib.asynccontextmanager
async def server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that runs `answer` for each connection; yields its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    found = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{found.sockets[0].getsockname()[1]}"
    found.close()
    await turns()


class Relay:
    """A relay between a connector and the endpoint that listens at `port`, for one connection at a time.

    Direction 0 is from the connector to the acceptor, 1 the other.
    """

    def __init__(self, port: int) -> None:
        self.seen = [bytearray(), bytearray()]
        """The bytes that came from either side, before any change."""
        self.change: Callable[[int, int, bytes], bytes] = lambda _direction, _at, data: data
        """``change(direction, at, data)``: the bytes to pass on for `data`, at offset `at` of its direction."""
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    @property
    def connections(self) -> int:
        """The number of connections that have come."""
        return len(self._writers) // 2

    def address(self, process: bytes) -> str:
        """The address by which the connector reaches `process` through the relay."""
        assert self._server is not None
        return f"{process.hex()}@127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def inject(self, direction: int, data: bytes) -> None:
        """Send further bytes in a direction."""
        self._writers[-1 - direction].write(data)

    def hang_up(self) -> None:
        """Close both connections, after the bytes that `change` got last."""
        for writer in self._writers:
            asyncio.get_running_loop().call_soon(writer.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for direction, source, sink in ((0, reader, far_writer), (1, far_reader, writer)):
            self._tasks.add(asyncio.get_running_loop().create_task(self._carry(direction, source, sink)))

    async def _carry(self, direction: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                at = len(self.seen[direction])
                self.seen[direction] += data
                sink.write(self.change(direction, at, data))
        sink.close()


async def await_death(side: Side) -> None:
    """The life of a victim: print the address, and send a frame on every incoming connection, until killed."""

    def accepted(connection: Connection) -> None:
        connection.start(Recorder())
        send(connection, [b"hello"])

    await side.endpoint.start(accepted)
    print(side.endpoint.address, flush=True)
    await asyncio.get_running_loop().create_future()


@contextlib.contextmanager
def victim(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a process that runs `program`, which calls `await_death`; yield it with the address that it has printed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()
