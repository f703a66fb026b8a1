"""The endpoint of a simulated process: it listens and connects by process ids, with a handshake that takes its time."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING, Any, Final

from simulation.connection import SimConnection
from simulation.network import SILENCE
from zcactor.errors import ConnectionLost
from zcactor.transport.base import Endpoint
from zcactor.transport.frames import PeerInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from simulation.loop import SimLoop
    from simulation.network import Network
    from zcactor.process.place import Place
    from zcactor.transport.base import Connection

__all__ = ["SimEndpoint"]

HANDSHAKE: Final = 2
"""Round trips over the network until both ends have proven who they are."""


class SimEndpoint(Endpoint):
    """A simulated endpoint. Satisfies `zcactor.transport.base.Endpoint`. Its address is the process id, on any host.

    Args:
        network: the network in which it is found.
        loop: of its process.
        process: its process id, 16 bytes.
        place: the pid and host that its peers get.
        arena: address and bytes of its arena.
        keeps: an object that keeps the arena's memory alive.
        recv_depth: frames it can take in; a connection uses the smaller of both sides' numbers.
        eager_limit: bytes of the largest payload inside a frame; a connection uses the smaller of both sides' numbers.
        native: whether its connections are native, see `simulation.connection.SimConnection`.
    """

    kind = "sim"

    def __init__(
        self, network: Network, loop: SimLoop, process: bytes, place: Place, arena: tuple[int, int], keeps: Any = None,
        recv_depth: int = 1024, eager_limit: int = 16384, native: bool = False,
    ) -> None:  # fmt: skip
        self.network = network
        self.loop = loop
        self.process = process
        self.address = process.hex()
        self.authorize: Callable[[Any, int, int, int], object] = lambda *_: True
        self.recv_depth = recv_depth
        self.eager_limit = eager_limit
        self.native = native
        self.place = place
        self.arena = arena
        self.keeps = keeps
        self.summoned: Callable[[str, int], None] = lambda _place, _epoch: None
        """Called where a head says that it leads: its place, and its epoch; see `zcactor.transport.stream.summons`."""
        self._find: Callable[[str], Awaitable[str]] | None = None
        self._accepted: Callable[[Connection], None] | None = None

    @property
    def far_address(self) -> str:
        """The address that handles state."""
        return f"{self.address}@{self.place.host}:1"

    def find_by(self, find: Callable[[str], Awaitable[str]]) -> None:
        """See `zcactor.transport.base.Endpoint.find_by`."""
        self._find = find

    def viability(self) -> str | None:
        """None: the endpoint works on every host."""
        return None

    async def start(self, accepted: Callable[[Connection], None]) -> None:
        """See `zcactor.transport.base.Endpoint.start`."""
        if self._accepted is not None:
            raise RuntimeError(f"the endpoint {self.address} listens already")
        self._accepted = accepted
        self.network.listening[self.address] = self

    def _reached(self, name: str) -> SimEndpoint:
        """The endpoint with that process id, at this moment.

        Raises:
            ConnectionLost: no process listens there, which its host says, or its host refuses connections.
        """
        other: SimEndpoint | None = self.network.listening.get(name)
        if other is None or other.loop.dead:
            refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            raise ConnectionLost(f"process {name} cannot be reached: nobody listens there") from refused
        if other.loop.host in self.network.refusing and other.loop.host != self.loop.host:
            raise ConnectionLost(f"process {name} cannot be reached: Connection refused")
        return other

    async def connect(self, address: str) -> SimConnection:
        """See `zcactor.transport.base.Endpoint.connect`.

        Raises:
            ConnectionLost: no process listens there, or the network is cut for longer than a handshake may take.
        """
        network, loop = self.network, self.loop
        other = network.listening.get(address)
        if self._find is not None and (other is None or other.loop.host != loop.host):
            address = (await self._find(address)).partition("@")[0]
        waited, rng = 0.0, network.rng(loop.host, other.loop.host if other else "nowhere")
        patience = rng.uniform(*SILENCE)
        for _ in range(HANDSHAKE):
            found = network.listening.get(address)
            if found is None or not network.is_off(found.loop.host):
                found = self._reached(address)
            while self._is_silent(found.loop) or self._loses(found.loop):
                if waited >= patience:
                    raise ConnectionLost(f"process {address} cannot be reached: it does not answer")
                await asyncio.sleep(0.1)
                waited += 0.1
            await asyncio.sleep(network.time(loop, found.loop) + network.time(found.loop, loop))
        other = self._reached(address)
        if self._is_silent(other.loop):
            raise ConnectionLost(f"process {address} cannot be reached: it does not answer")
        ours, theirs = self._end(other), other._end(self)
        ours.join(theirs)
        theirs.join(ours)
        network.world.note(loop.label, "connect", to=other.loop.label)
        assert other._accepted is not None
        other.loop.at(network.world.now + network.time(loop, other.loop), other._accepted, theirs)
        return ours

    async def refuses(self, address: str) -> bool:
        """Whether the host of a process, by its word, has nobody that listens at the address of that process."""
        name, _, place = address.partition("@")
        here, there = self.loop.host, place.partition(":")[0]
        await asyncio.sleep(self.network.rng(here, there).uniform(0.0001, 0.001))
        if self.network.is_off(there) or self.network.is_cut(here, there) or self.network.is_cut(there, here):
            return False
        try:
            self._reached(name)
        except ConnectionLost as error:
            return isinstance(error.__cause__, ConnectionRefusedError)
        return False

    async def summon(self, address: str, place: str, epoch: int) -> None:
        """See `zcactor.transport.stream.summons.summon`.

        Raises:
            ConnectionLost: no process listens there, or it does not answer.
        """
        found = self._reached(address.partition("@")[0])
        if self._is_silent(found.loop) or self._loses(found.loop):
            await asyncio.sleep(SILENCE[0])
            raise ConnectionLost(f"process {address} does not answer")
        network, loop = self.network, self.loop
        network.world.note(loop.label, "summon", to=found.loop.label)
        found.loop.at(network.world.now + network.time(loop, found.loop), found.hear, place, epoch)

    def hear(self, place: str, epoch: int) -> None:
        """Hear of a head that says that it leads."""
        self.summoned(place, epoch)

    def _is_silent(self, other: SimLoop) -> bool:
        here, there, network = self.loop.host, other.host, self.network
        return network.is_cut(here, there) or network.is_cut(there, here) or other.stopped

    def _loses(self, other: SimLoop) -> bool:
        """Whether the messages of a handshake are lost; open connections are not affected."""
        here, there = self.loop.host, other.host
        return here != there and (here in self.network.losing or there in self.network.losing)

    def _end(self, other: SimEndpoint) -> SimConnection:
        peer = PeerInfo(other.process, other.place.pid, 0, other.arena[1])
        return SimConnection(
            self.network, self.loop, peer, other.arena, other.keeps,
            recv_depth=min(self.recv_depth, other.recv_depth), eager_limit=min(self.eager_limit, other.eager_limit),
            maps=self.loop.host == other.loop.host, native=self.native, authorize=self.authorize,
        )  # fmt: skip

    def abandon(self) -> None:
        """See `zcactor.transport.base.Endpoint.abandon`: the endpoint has no resources of the system."""

    def dispose(self) -> None:
        """See `zcactor.transport.base.Endpoint.dispose`: connections share nothing."""

    async def aclose(self) -> None:
        """See `zcactor.transport.base.Endpoint.aclose`."""
        if self.network.listening.get(self.address) is self:
            del self.network.listening[self.address]
