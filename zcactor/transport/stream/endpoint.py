"""The common part of endpoints that peers reach through a socket: the facts about this process that a handshake sends,
and the listener."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, TypeVar

from zcactor.transport.base import Endpoint
from zcactor.transport.stream.handshake import Handshake, Introduction, Purpose
from zcactor.transport.stream.handshake_io import UNDER_WAY, admitted, introduce, shake_hands

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from zcactor.transport.base import Connection
    from zcactor.transport.stream.listener import Listener

__all__ = ["ListeningEndpoint"]

T = TypeVar("T")


class ListeningEndpoint(Endpoint):
    """An endpoint that authenticates peers over a socket. A subclass adds `start`, which sets `_listener` and
    `_accepted`.

    Args:
        process: 16 random bytes that name this process.
        token: the cluster's secret, 32 bytes.
        arena_fd: the memfd of this process's arena; stays the caller's. None for a process without an arena.
        arena_nbytes: bytes of the arena; 0 without one.
        recv_depth: frames that this process can receive before it returns credits.
        eager_limit: bytes of the largest payload inside a frame.

    Raises:
        ValueError: `process` has not 16 bytes, or one of `arena_fd` and `arena_nbytes` is given without the other.
    """

    def __init__(
        self, process: bytes, token: bytes, arena_fd: int | None, arena_nbytes: int, recv_depth: int, eager_limit: int
    ) -> None:
        if len(process) != 16:
            raise ValueError(f"a process's name has 16 bytes, this one has {len(process)}")
        if (arena_fd is None) != (arena_nbytes == 0):
            raise ValueError(f"an arena has a descriptor and a size: got {arena_fd} and {arena_nbytes}")
        self.address = ""
        """The address that a peer passes to `connect`; empty before `start`."""
        self.process = process
        self._token = token
        self._arena_fd = arena_fd
        self._arena_nbytes = arena_nbytes
        self._recv_depth = recv_depth
        self._eager_limit = eager_limit
        self._listener: Listener | None = None
        self._under_way = asyncio.Semaphore(UNDER_WAY)
        self._accepted: Callable[[Connection], None] | None = None
        self.summoned: Callable[[str, int], None] = lambda _place, _epoch: None
        """Called where another process says that a head leads: with its place ``host:port``, and the epoch of its
        term."""
        self.term: Callable[[], int] = lambda: 0
        """The epoch of the term in which this process leads its cluster; 0 where it leads none."""

    @property
    def pending(self) -> int:
        """Connections that have not finished their handshake yet."""
        return 0 if self._listener is None else self._listener.pending

    def abandon(self) -> None:
        """Close this process's copy of the listening socket, in a forked child. Files belong to the parent, and
        stay."""
        if self._listener is not None:
            self._listener.abandon()

    async def aclose(self) -> None:
        """Stop listening. Connections stay open. Idempotent."""
        if self._listener is not None:
            await self._listener.aclose()

    # ---- for subclasses

    async def _admitted(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run ``attempt()``, a handshake that this side begins, in its turn, and again while the peer has no place for
        it. Returns its result."""

        async def in_turn() -> T:
            async with self._under_way:
                return await attempt()

        return await admitted(in_turn)

    def _refuse_second_start(self) -> None:
        """Raise `RuntimeError` when the endpoint was started before, also when it has been closed since."""
        if self._listener is not None:
            raise RuntimeError(f"the endpoint {self.address} listens already")

    def _hand_on(self, connection: Connection) -> None:
        """Pass an accepted connection to the callback of `start`."""
        if self._accepted is not None:
            self._accepted(connection)

    def _hello(self, purpose: Purpose) -> Introduction:
        return Introduction(self.process, os.getpid(), self._arena_nbytes, self._recv_depth, self._eager_limit, purpose)

    async def _say_hello(self, sock: socket.socket, purpose: Purpose, process: str) -> Introduction:
        """Do the connecting side of the handshake; see `zcactor.transport.stream.handshake_io.introduce`."""
        return await introduce(sock, Handshake(self._token, self._hello(purpose), accepting=False), process)

    async def _hear_hello(self, sock: socket.socket) -> Introduction:
        """Do the accepting side of the handshake. The caller decides about the peer's purpose."""
        handshake = Handshake(self._token, self._hello(Purpose.PEER), accepting=True)
        await shake_hands(sock, handshake)
        return handshake.peer

    def _agreed(self, hello: Introduction) -> tuple[int, int]:
        """Return the receive depth and the eager limit that both ends use."""
        return min(hello.recv_depth, self._recv_depth), min(hello.eager_limit, self._eager_limit)
