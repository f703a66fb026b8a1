"""Connections inside one process: for a process that calls itself, and for tests that break things.

The wire is `zcactor.transport.loopback_connection`; here are the ways to get one, as a pair or through endpoints that
find each other in a `LoopbackNetwork` the way processes find each other on a host.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

from zcactor import ids
from zcactor.errors import ConnectionLost
from zcactor.transport.base import Connection, PeerInfo
from zcactor.transport.endpoints import EndpointContext
from zcactor.transport.loopback_connection import NO_FAULTS, Arena, Faults, LoopbackConnection

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arena", "Faults", "LoopbackConnection", "LoopbackEndpoint", "LoopbackNetwork", "loopback_pair"]


def loopback_pair(
    loop: asyncio.AbstractEventLoop | None = None,
    *,
    seed: int | None = None,
    faults: Faults = NO_FAULTS,
    processes: tuple[bytes, bytes] | None = None,
    arenas: tuple[Arena, Arena] = ((0, 0), (0, 0)),
    recv_depth: int = 1024,
    eager_limit: int = 16384,
    maps: bool = True,
    pid: int = 0,
) -> tuple[LoopbackConnection, LoopbackConnection]:
    """Two connected ends. Must be called on the loop's thread.

    Args:
        loop: the loop both ends run on; the running one when None.
        seed: of the faults; None takes a new one, which no failing run can be repeated from.
        faults: what goes wrong, in each direction.
        processes: the 16-byte names of the first and the second end; random ones when None.
        arenas: the address and the bytes of the first and the second end's arena.
        recv_depth: frames either end may have outstanding.
        eager_limit: bytes of the largest payload inside a frame.
        maps: whether the ends reach each other's arena in place; False for the ways of a transport between hosts.
        pid: what both ends name as their process number; this process's when 0.

    Raises:
        RuntimeError: `loop` is None and no loop is running.
    """
    loop = loop or asyncio.get_running_loop()
    names = processes or (ids.token(), ids.token())
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
    """The endpoints that can reach each other, and the faults between them.

    Args:
        seed: of all connections; their order decides which faults each one gets.
        faults: as in `Faults`.
        maps: as in `loopback_pair`.
    """

    def __init__(self, *, seed: int | None = None, faults: Faults = NO_FAULTS, maps: bool = True) -> None:
        self.faults = faults
        self.maps = maps
        self.rng = random.Random(seed)
        self.listening: dict[str, tuple[LoopbackEndpoint, Callable[[Connection], None]]] = {}


class LoopbackEndpoint(EndpointContext):
    """One named place in a `LoopbackNetwork`. Satisfies `zcactor.transport.base.Endpoint`.

    Args:
        network: where it can be found and finds others.
        process: 16 bytes that name it.
        arena: the address and the bytes of its arena.
        recv_depth: frames it can take in; a connection uses the smaller of both sides' numbers.
        eager_limit: bytes of the largest payload inside a frame; likewise.
    """

    kind = "loopback"

    def __init__(
        self,
        network: LoopbackNetwork,
        process: bytes,
        arena: Arena = (0, 0),
        recv_depth: int = 1024,
        eager_limit: int = 16384,
    ) -> None:
        self.address = process.hex()
        self.process = process
        self.arena = arena
        self._network = network
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit

    def viability(self) -> str | None:
        """None: a process can always talk to itself."""
        return None

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """Be found under `address`; `accepted` is called on the loop with each connection, not yet started.

        Raises:
            RuntimeError: an endpoint of that name listens already.
        """
        if self.address in self._network.listening:
            raise RuntimeError(f"the endpoint {self.address} listens already")
        self._network.listening[self.address] = (self, accepted)

    async def connect(self, address: str) -> LoopbackConnection:
        """Connect to the endpoint at `address`.

        Raises:
            ConnectionLost: nobody listens there.
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

    def abandon(self) -> None:
        """In a forked child: nothing here is the parent's."""

    def dispose(self) -> None:
        """Connections share nothing."""

    async def aclose(self) -> None:
        """Be found no more. Connections stay open. Idempotent."""
        listening = self._network.listening.get(self.address)
        if listening is not None and listening[0] is self:
            del self._network.listening[self.address]
