"""Who is at the other end of a connection under test: a bare socket, or a process that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.conformance.connection import Recorder, Side, send
from zcactor.transport.base import Connection


async def rest(sock: socket.socket) -> bytes:
    """What comes until the other end closes. Bytes it left unread make the system report a reset."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.get_running_loop().sock_recv(sock, 100):
            received += part
    return received


async def await_death(side: Side) -> None:
    """What a victim does: print its address, and send a frame to everybody who connects, until it is killed."""

    def accepted(connection: Connection) -> None:
        connection.start(Recorder())
        send(connection, [b"hello"])

    await side.endpoint.start(accepted)
    print(side.endpoint.address, flush=True)
    await asyncio.get_running_loop().create_future()


@contextlib.contextmanager
def victim(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that runs `program`, which calls `await_death`, and the address it has printed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()
