"""What endpoints have in common, whatever way they lead to a peer.

`EndpointContext` is the ``async with`` of all of them. `ListeningEndpoint` is one that peers reach through a socket: it
holds what this process says about itself in a handshake, and the listener once there is one.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self, TypeVar

from zcactor.transport.auth import Handshake, Hello, Purpose
from zcactor.transport.greeting import UNDER_WAY, admitted, introduce, shake_hands

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from zcactor.transport.base import Connection
    from zcactor.transport.listener import Listener

__all__ = ["EndpointContext", "ListeningEndpoint"]

T = TypeVar("T")


class EndpointContext(ABC):
    """An endpoint as a context manager: leaving it closes it, whether or not something was raised."""

    seals_payloads = False
    """See `zcactor.transport.base.Endpoint`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def far_address(self) -> str:
        """See `zcactor.transport.base.Endpoint.far_address`: empty, unless a subclass leads to other hosts."""
        return ""

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """See `zcactor.transport.base.Endpoint.find_by`: an endpoint that is given addresses has nothing to find."""
        del find

    @abstractmethod
    async def aclose(self) -> None:
        """See `zcactor.transport.base.Endpoint.aclose`."""


class ListeningEndpoint(EndpointContext):
    """One that authenticates its peers over a socket. A subclass adds `start`, which sets `_listener` and `_accepted`.

    Args:
        process: 16 random bytes that name this process.
        token: the cluster's secret, 32 bytes.
        arena_fd: this process's memfd; stays the caller's. None for a process without an arena.
        arena_nbytes: its size; 0 without one.
        recv_depth: frames this process can take in.
        eager_limit: bytes of the largest payload inside a frame.

    Raises:
        ValueError: `process` has not 16 bytes, or an arena is given without its size or the other way round.
    """

    def __init__(
        self, process: bytes, token: bytes, arena_fd: int | None, arena_nbytes: int, recv_depth: int, eager_limit: int
    ) -> None:
        if len(process) != 16:
            raise ValueError(f"a process's name has 16 bytes, this one has {len(process)}")
        if (arena_fd is None) != (arena_nbytes == 0):
            raise ValueError(f"an arena has a descriptor and a size: got {arena_fd} and {arena_nbytes}")
        self.address = ""
        """What a peer passes to `connect`; empty as long as nobody can know it."""
        self.process = process
        self._token = token
        self._arena_fd = arena_fd
        self._arena_nbytes = arena_nbytes
        self._recv_depth = recv_depth
        self._eager_limit = eager_limit
        self._listener: Listener | None = None
        self._under_way = asyncio.Semaphore(UNDER_WAY)
        self._accepted: Callable[[Connection], None] | None = None

    @property
    def pending(self) -> int:
        """Peers that have connected and not authenticated themselves yet."""
        return 0 if self._listener is None else self._listener.pending

    def abandon(self) -> None:
        """In a forked child: let go of the listening socket. What lies in the file system is the parent's."""
        if self._listener is not None:
            self._listener.abandon()

    async def aclose(self) -> None:
        """Stop listening. Connections stay open. Idempotent."""
        if self._listener is not None:
            await self._listener.aclose()

    def dispose(self) -> None:
        """Connections share nothing."""

    # ---- for subclasses

    async def _admitted(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt()`` gives, a handshake that we begin: made again where the peer is full, and in its turn."""

        async def in_turn() -> T:
            async with self._under_way:
                return await attempt()

        return await admitted(in_turn)

    def _refuse_second_start(self) -> None:
        """Raises `RuntimeError` when the endpoint was started before, also when it has been closed since."""
        if self._listener is not None:
            raise RuntimeError(f"the endpoint {self.address} listens already")

    def _hand_on(self, connection: Connection) -> None:
        """Give an accepted connection to whoever started the endpoint."""
        if self._accepted is not None:
            self._accepted(connection)

    def _hello(self, purpose: Purpose) -> Hello:
        return Hello(self.process, os.getpid(), self._arena_nbytes, self._recv_depth, self._eager_limit, purpose)

    async def _say_hello(self, sock: socket.socket, purpose: Purpose, process: str) -> Hello:
        """The connecting side of the handshake; see `zcactor.transport.greeting.introduce`."""
        return await introduce(sock, Handshake(self._token, self._hello(purpose), accepting=False), process)

    async def _hear_hello(self, sock: socket.socket) -> Hello:
        """The accepting side; what the peer wants is for the caller to judge."""
        handshake = Handshake(self._token, self._hello(Purpose.PEER), accepting=True)
        await shake_hands(sock, handshake)
        return handshake.peer

    def _agreed(self, hello: Hello) -> tuple[int, int]:
        """The receive depth and the eager limit that hold for both ends."""
        return min(hello.recv_depth, self._recv_depth), min(hello.eager_limit, self._eager_limit)
