"""Processes that are peers without a node agent: a test tells each of them the others' addresses.

Without an agent, a call ends with `ActorDied` when its connection ends: no process knows another place of the actor.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import zcactor as zc
from zcactor.api.future import ObjectRef
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.endpoints import may_read
from zcactor.assembly.process import Process
from zcactor.errors import ConnectionLost
from zcactor.ids import new_actor
from zcactor.interface import Interface
from zcactor.objectstore.store import Store
from zcactor.process import context
from zcactor.rpc.session import Session
from zcactor.transport.base import Connection
from zcactor.transport.stream.record_layer import Integrity
from zcactor.transport.stream.tls import Tls
from zcactor.transport.tcp.endpoint import TcpEndpoint

__all__ = ["MIB", "Member", "Probe", "call", "checksum", "pattern"]

MIB: Final = 1 << 20
TOKEN: Final = bytes(range(32))
EAGER_LIMIT: Final = 4096
RECV_DEPTH: Final = 64

Array = npt.NDArray[np.float64]


def pattern(seed: int, nbytes: int) -> Array:
    """Random numbers, the same for the same seed."""
    return np.random.default_rng(seed).random(nbytes // 8)


def checksum(array: npt.NDArray[Any]) -> int:
    """A checksum of an array's bytes."""
    plain: Any = np.ascontiguousarray(array).view(np.uint8)
    return zlib.crc32(plain)


class Probe:
    """The actor that every member has."""

    def __init__(self) -> None:
        self.noted: list[int] = []
        self.waiting = 0
        self.cancelled = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers in the actor's thread."""
        return a + b

    async def note(self, number: int) -> int:
        """Remember a number."""
        self.noted.append(number)
        return number

    async def numbers(self) -> list[int]:
        """The noted numbers, in order."""
        return self.noted

    async def wait(self) -> None:
        """Wait for ever."""
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1

    async def received(self, array: Array) -> int:
        """The checksum of an array."""
        return checksum(array)

    async def made(self, seed: int, nbytes: int) -> Array:
        """An array that is made in the actor's store."""
        array = zc.empty(nbytes // 8)
        array[:] = pattern(seed, nbytes)
        return array

    async def doubled(self, array: Array) -> Array:
        """Twice the array."""
        result = zc.empty(len(array))
        np.multiply(array, 2, out=result)
        return result


_INTERFACE: Final = Interface.of(Probe)


class _ByName:
    """An endpoint that finds processes in a table of addresses, as a run directory does for the processes of a node."""

    def __init__(self, endpoint: TcpEndpoint, addresses: dict[str, str]) -> None:
        self._endpoint = endpoint
        self._addresses = addresses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def connect(self, process: str) -> Connection:
        """Connect to the process of that name."""
        if process not in self._addresses:
            raise ConnectionLost(f"nobody knows process {process!r}")
        return await self._endpoint.connect(self._addresses[process])


class Member:
    """A process with the actor `Probe`, reached over TCP.

    Args:
        host: its IP address.
        capacity: bytes of its store.
        endpoint: the class of its endpoint.
        sealing: whether its frames are sealed.
        integrity: the data that is authenticated besides sealed frames.
        tls: its certificates, where all connections use TLS.

    Attributes:
        addresses: the other members' addresses by name in hexadecimal; the test fills them in.
        probe: the actor.
        lost: for each session that ended, the time of the end, by `time.monotonic`, and its cause.
    """

    def __init__(
        self, host: str = "127.0.0.1", capacity: int = 8 * MIB, endpoint: type[TcpEndpoint] = TcpEndpoint, *,
        sealing: bool = False, integrity: Integrity = Integrity.AUTO, tls: Tls | None = None,
    ) -> None:  # fmt: skip
        self.name = os.urandom(16)
        self.addresses: dict[str, str] = {}
        store = Store(capacity, self.name)
        arena = store.arena
        self.endpoint = endpoint(
            host, self.name, TOKEN, arena.fd, arena.nbytes, RECV_DEPTH, EAGER_LIMIT, sealing=sealing,
            integrity=integrity, tls=tls,
        )  # fmt: skip
        self.endpoint.authorize = may_read
        config = zc.Config(eager_limit=EAGER_LIMIT, recv_depth=RECV_DEPTH)
        by_name: Any = _ByName(self.endpoint, self.addresses)
        self.process = Process(self.name, "worker", config, asyncio.get_running_loop(), store, by_name)
        self.process.connections.on_lost = self._session_lost
        self.probe = Probe()
        self.index = self.process.hosts.take_index()
        self.process.hosts.add(self.index, Probe, "Probe").adopt(self.probe)
        self.lost: list[tuple[float, str]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        await self.endpoint.start(self.process.connections.accepted)

    def be_current(self) -> None:
        """Make this the process that unpacked values of this context belong to."""
        context.set_current(self.process)

    async def close(self) -> None:
        """Close the process."""
        await self.process.close()

    def probe_at(self, process: bytes, index: int) -> RemoteActor:
        """A new `RemoteActor` for the actor of another member, without a connection yet."""
        place = process, index
        return RemoteActor(self.process, new_actor(), _INTERFACE, place, None, "default", 100_000, 0)

    async def alone(self) -> None:
        """Return when no session is left."""
        while list(self.process.sessions.all()):
            self._changed.clear()
            await self._changed.wait()

    def _session_lost(self, session: Session) -> None:
        self.lost.append((time.monotonic(), str(session.closed)))
        self._changed.set()


def call(actor: RemoteActor, method: str, *args: Any) -> ObjectRef[Any]:
    """Call a method of the actor; the call is sent at once."""
    return ObjectRef(actor.call(actor.interface.by_name[method], args, {}, None, 0))


def outcome_of(error: BaseException | None) -> Sequence[Any]:
    """The end of a call as plain values: its kind, and whether the call may have run."""
    return (type(error).__name__, getattr(error, "maybe_executed", None)) if error is not None else ("value", True)
