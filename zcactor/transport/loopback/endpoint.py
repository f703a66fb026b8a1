"""Connections inside one process, for a process that calls itself, and for tests with faults.

This module makes ends of `zcactor.transport.loopback.connection`: as a pair, or through endpoints that find each other
in a `LoopbackNetwork` as processes find each other on a host.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

from zcactor import ids
from zcactor.errors import ConnectionLost
from zcactor.transport.base import Connection, Endpoint
from zcactor.transport.frames import PeerInfo
from zcactor.transport.loopback.connection import NO_ARENA, NO_FAULTS, Arena, LoopbackConnection, LoopbackFaults

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arena", "LoopbackConnection", "LoopbackEndpoint", "LoopbackFaults", "LoopbackNetwork", "loopback_pair"]


def loopback_pair(
    loop: asyncio.AbstractEventLoop | None = None,
    *,
    seed: int | None = None,
    faults: LoopbackFaults = NO_FAULTS,
    processes: tuple[bytes, bytes] | None = None,
    arenas: tuple[Arena, Arena] = (NO_ARENA, NO_ARENA),
    recv_depth: int = 1024,
    eager_limit: int = 16384,
    maps: bool = True,
    pid: int = 0,
) -> tuple[LoopbackConnection, LoopbackConnection]:
    """Make two connected ends. Must be called on the loop's thread.

    Args:
        loop: the loop that both ends run on; the running one when None.
        seed: seed of the faults. With None it is random, and a failing run cannot be repeated.
        faults: the faults in each direction.
        processes: the 16-byte names of the first and the second end; random ones when None.
        arenas: those of the first and the second end.
        recv_depth: frames that each end may have outstanding.
        eager_limit: bytes of the largest payload inside a frame.
        maps: whether the ends map each other's arena. False for pulls, as of a transport between hosts.
        pid: the process number of both ends; that of this process when 0.

    Raises:
        RuntimeError: `loop` is None and no loop is running.
    """
    loop = loop or asyncio.get_running_loop()
    names = processes or (ids.new_process(), ids.new_process())
    root = random.Random(seed)

    def end(other: int) -> LoopbackConnection:
        peer = PeerInfo(names[other], pid or os.getpid(), os.getuid(), arenas[other][1])
        rng = random.Random(root.getrandbits(64))
        return LoopbackConnection(
            peer, arenas[other], loop=loop, recv_depth=recv_depth, eager_limit=eager_limit, faults=faults, rng=rng,
            maps=maps,
        )  # fmt: skip

    first, second = end(1), end(0)
    first.join(second)
    second.join(first)
    return first, second


class LoopbackNetwork:
    """Endpoints that can reach each other, and the faults between them.

    Args:
        seed: seed of all connections. Their order decides about the faults of each one.
        faults: as in `LoopbackFaults`.
        maps: as in `loopback_pair`.
    """

    def __init__(self, *, seed: int | None = None, faults: LoopbackFaults = NO_FAULTS, maps: bool = True) -> None:
        self.faults = faults
        self.maps = maps
        self.rng = random.Random(seed)
        self.listening: dict[str, tuple[LoopbackEndpoint, Callable[[Connection], None]]] = {}


class LoopbackEndpoint(Endpoint):
    """A named endpoint of a `LoopbackNetwork`. Satisfies `zcactor.transport.base.Endpoint`.

    Args:
        network: the network with the other endpoints.
        process: 16 bytes that name it.
        arena: its arena.
        recv_depth: frames that it can receive before it returns credits. A connection uses the smaller number of both
            sides.
        eager_limit: bytes of the largest payload inside a frame. A connection uses the smaller number of both sides.
    """

    kind = "loopback"

    def __init__(
        self,
        network: LoopbackNetwork,
        process: bytes,
        arena: Arena = NO_ARENA,
        recv_depth: int = 1024,
        eager_limit: int = 16384,
    ) -> None:
        self.address = process.hex()
        self.process = process
        self.arena = arena
        self._network = network
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Listen at `address`, and call `accepted` on the loop with each connection, which is not started yet.

        Raises:
            RuntimeError: an endpoint of that name listens already.
        """
        if self.address in self._network.listening:
            raise RuntimeError(f"the endpoint {self.address} listens already")
        self._network.listening[self.address] = (self, accepted)

    async def connect(self, address: str) -> LoopbackConnection:
        """Connect to the endpoint at `address`.

        Raises:
            ConnectionLost: no endpoint listens there.
        """
        if address not in self._network.listening:
            raise ConnectionLost(f"no endpoint listens at {address} in this network")
        other, accepted = self._network.listening[address]
        ours, theirs = loopback_pair(
            seed=self._network.rng.getrandbits(64),
            faults=self._network.faults,
            processes=(self.process, other.process),
            arenas=(self.arena, other.arena),
            recv_depth=min(self.recv_depth, other.recv_depth),
            eager_limit=min(self.eager_limit, other.eager_limit),
            maps=self._network.maps,
        )
        asyncio.get_running_loop().call_soon(accepted, theirs)
        return ours

    async def aclose(self) -> None:
        """Stop listening. Connections stay open. Idempotent."""
        listening = self._network.listening.get(self.address)
        if listening is not None and listening[0] is self:
            del self._network.listening[self.address]
