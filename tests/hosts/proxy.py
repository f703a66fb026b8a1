"""A TCP proxy that treats a connection as networks do: it delays, splits, slows down and ends the stream of bytes.

`Proxy` listens on the running event loop and passes the bytes of each connection on to one place. `Way` describes the
treatment of one direction, with a seed for random parts. Delays keep the order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

__all__ = ["Proxy", "Way"]

CHUNK = 1 << 16
"""Bytes of one read."""
_RESET_ON_CLOSE = struct.pack("@ii", 1, 0)


@dataclass(frozen=True)
class Way:
    """The treatment of the bytes of one direction.

    Attributes:
        delay: seconds by which the bytes are late.
        jitter: the largest difference from `delay`, in seconds, either way; evenly distributed.
        slices: the largest size of the pieces that are passed on, whose sizes are drawn from 1 on; 0 for no splitting.
        rate: bytes per second; 0 for no limit.
        limit: the bytes after which a connection ends; None for no limit.
        ending: the way in which it ends, towards both ends: ``"cut"`` is an orderly end of the stream, ``"reset"`` an
            RST,
            and ``"stall"`` leaves it open without further bytes.
        seed: the seed of all random parts.
    """

    delay: float = 0
    jitter: float = 0
    slices: int = 0
    rate: float = 0
    limit: int | None = None
    ending: Literal["cut", "reset", "stall"] = "cut"
    seed: int = 0


AS_IS = Way()


class _Flow:
    """One direction of one connection."""

    def __init__(self, way: Way, source: socket.socket, target: socket.socket) -> None:
        self._way = way
        self._source = source
        self._target = target
        self._random = random.Random(way.seed)
        self.ending = way.ending
        self.passed = 0
        """Bytes that were passed on."""

    def finish(self) -> None:
        """Pass the source's end on."""
        with contextlib.suppress(OSError):  # the target may have ended as well
            self._target.shutdown(socket.SHUT_WR)

    async def run(self) -> bool:
        """Pass bytes on until the source ends or the limit is reached; return whether it was the limit."""
        loop = asyncio.get_running_loop()
        way = self._way
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = loop.create_task(self._late(queue)) if way.delay or way.jitter else None
        try:
            while way.limit is None or self.passed < way.limit:
                room = CHUNK if way.limit is None else min(CHUNK, way.limit - self.passed)
                data = await loop.sock_recv(self._source, room)
                if not data:
                    break
                self.passed += len(data)
                if sending is None:
                    await self._send(data)
                else:
                    late = max(0.0, way.delay + self._random.uniform(-way.jitter, way.jitter))
                    queue.put_nowait((loop.time() + late, data))
            if sending is not None:
                queue.put_nowait((0, b""))
                await sending
        finally:
            if sending is not None:
                sending.cancel()
        return way.limit is not None and self.passed >= way.limit

    async def _late(self, queue: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            when, data = await queue.get()
            if not data:
                return
            await asyncio.sleep(when - loop.time())
            await self._send(data)

    async def _send(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        way, at = self._way, 0
        while at < len(data):
            piece = data[at : at + self._random.randint(1, way.slices)] if way.slices else data
            await loop.sock_sendall(self._target, piece)
            at += len(piece)
            if way.rate:
                await asyncio.sleep(len(piece) / way.rate)
            elif way.slices:
                await asyncio.sleep(0)  # otherwise the next piece might join this one


class Proxy:
    """A proxy that passes connections on to `place`, for the length of the block.

    Args:
        place: host and port.
        there: the treatment of bytes on their way to `place`.
        back: the treatment of bytes on their way back.

    Attributes:
        place: the target of new connections.
        there, back: the treatment of bytes of new connections.
    """

    def __init__(self, place: tuple[str, int], there: Way = AS_IS, back: Way = AS_IS) -> None:
        self.place = place
        self.there = there
        self.back = back
        self._flows: list[tuple[_Flow, _Flow]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, tuple[tuple[socket.socket, socket.socket], asyncio.Task[None]]] = {}
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listening.setblocking(False)

    @property
    def port(self) -> int:
        """The port at which it listens, on 127.0.0.1."""
        found: int = self._listening.getsockname()[1]
        return found

    @property
    def passed(self) -> list[tuple[int, int]]:
        """Bytes that each connection has carried, there and back, in the order of the connections."""
        return [(there.passed, back.passed) for there, back in self._flows]

    @property
    def open(self) -> int:
        """The number of connections that have not ended."""
        return len(self._open)

    async def __aenter__(self) -> Self:
        self._start(self._accept())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._listening.close()

    def end(self, ending: Literal["cut", "reset"]) -> None:
        """End all connections, at both ends."""
        for sockets, task in self._open.values():
            if ending == "reset":
                _reset(sockets)
            task.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listening)
            self._start(self._pass_on(sock))

    async def _pass_on(self, near: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with near, socket.socket() as far:
            for sock in (near, far):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                await loop.sock_connect(far, self.place)
            except ConnectionRefusedError:
                _reset((near,))
                return
            flows = _Flow(self.there, near, far), _Flow(self.back, far, near)
            self._flows.append(flows)
            number = len(self._flows)
            task = asyncio.current_task()
            assert task is not None
            self._open[number] = (near, far), task
            try:
                await self._until_ended(flows, (near, far))
            finally:
                del self._open[number]

    async def _until_ended(self, flows: tuple[_Flow, _Flow], sockets: tuple[socket.socket, socket.socket]) -> None:
        running = {asyncio.ensure_future(flow.run()): flow for flow in flows}
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    flow = running.pop(task)
                    if task.exception() is not None:  # one end has broken, so the other is reset as well
                        _reset(sockets)
                        return
                    if not task.result():
                        flow.finish()
                    elif flow.ending == "stall":
                        await asyncio.Event().wait()
                    else:
                        if flow.ending == "reset":
                            _reset(sockets)
                        return  # leaving the block of both sockets closes them
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)


def _reset(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
