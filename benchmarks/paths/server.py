"""The other end of all paths: an actor, whose process also serves the paths without zcactor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

import zcactor as zc
from benchmarks.paths.carriers import MappedSlots, ReadSlots, SentSlots, Stream
from benchmarks.paths.messages import WAYS, Array

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.paths.carriers import Carrier
    from benchmarks.paths.messages import Messages

__all__ = ["Server", "connect"]

_BY_STREAM: Final[Mapping[str, Callable[[socket.socket], Carrier]]] = {"encode": Stream, "private buffers": SentSlots}


@zc.actor
class Server:
    """A parameter server, of one worker."""

    def __init__(self) -> None:
        self._parameters: list[Array] = []
        self._folder = tempfile.TemporaryDirectory(prefix="zcthesis-")

    @zc.method
    async def take(self, array: Array) -> float:
        """Receive an array; its first element."""
        return float(array[0])

    @zc.method
    def step(self, gradients: list[Array]) -> list[Array]:
        """Subtract the gradients from the parameters; the new parameters."""
        return self._stepped(gradients)

    @zc.method
    async def forget(self) -> None:
        """Drop the parameters: those of the next step may have other sizes."""
        self._parameters = []

    @zc.method
    async def listen(self, medium: str, way: str, host: str, binding: str) -> str:
        """Serve one connection in a thread of its own.

        Args:
            medium: see `benchmarks.thesis.MEDIA`.
            way: see `benchmarks.paths.messages.WAYS`.
            host: the IP address to listen at, where the medium has addresses.
            binding: of RDMA.

        Returns:
            The address for `connect`.
        """
        if medium == "local":
            address = str(Path(self._folder.name) / way.replace(" ", "-"))
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(address)
            listening.listen()
        else:
            listening = socket.create_server((host, 0))
            address = f"{host}:{listening.getsockname()[1]}"

        async def serve() -> None:
            with contextlib.ExitStack() as stack:
                sock, _ = await asyncio.to_thread(listening.accept)
                listening.close()
                carrier = await _carrier(medium, way, sock, 0, binding, stack)
                with contextlib.suppress(ConnectionResetError, asyncio.IncompleteReadError):  # the worker has ended
                    await self._serve(WAYS[way](carrier))

        threading.Thread(target=asyncio.run, args=(serve(),), daemon=True, name=f"{way} over {medium}").start()
        return address

    async def _serve(self, messages: Messages) -> None:
        """Answer a message of one array by its first element, and one of several by the parameters."""
        while True:
            arrays = await messages.receive()
            if len(arrays) == 1:
                await messages.send([arrays[0][:1].copy()])
            else:
                await messages.send(self._stepped(arrays))
            del arrays

    def _stepped(self, gradients: Sequence[Array]) -> list[Array]:
        if not self._parameters:
            self._parameters = [np.zeros(len(gradient), np.float32) for gradient in gradients]
        self._parameters = [old - gradient for old, gradient in zip(self._parameters, gradients, strict=True)]
        return self._parameters


async def _carrier(
    medium: str, way: str, sock: socket.socket, number: int, binding: str, stack: contextlib.ExitStack
) -> Carrier:
    """The carrier of a way over a medium, at the end with this number."""
    sock.setblocking(True)
    stack.callback(sock.close)
    if medium != "local":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if medium == "rxe":
        reader, writer = await asyncio.open_connection(sock=sock)
        return await ReadSlots.connect(reader, writer, binding, stack)
    if medium == "local" and way == "private buffers":
        if number:
            fd = os.memfd_create("slots")
            os.posix_fallocate(fd, 0, MappedSlots.NBYTES)
            socket.send_fds(sock, [b"+"], [fd])
        else:
            _, (fd,), *_ = socket.recv_fds(sock, 1, 1)
        try:
            return MappedSlots(sock, fd, number)
        finally:
            os.close(fd)
    return _BY_STREAM[way](sock)


async def connect(medium: str, way: str, address: str, binding: str, stack: contextlib.ExitStack) -> Messages:
    """Connect to a `Server` that listens.

    Args:
        medium, way, binding: as of `Server.listen`.
        address: the address that it returned.
        stack: closes the connection.
    """
    if medium == "local":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
    else:
        host, port = address.rsplit(":", 1)
        sock = socket.create_connection((host, int(port)))
    return WAYS[way](await _carrier(medium, way, sock, 1, binding, stack))
