"""Two sessions talking over a connection, with hubs that record and holders that count."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.conformance.connection import turns
from zcactor.errors import ObjectLost
from zcactor.objectstore.ref import Region
from zcactor.objectstore.store import Block
from zcactor.rpc.call import Call
from zcactor.rpc.counters import new_counters
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import PROTOCOL_VERSION, Hello, Status
from zcactor.rpc.parts import Part
from zcactor.rpc.session import Session
from zcactor.transport.base import PeerInfo
from zcactor.transport.local_connection import LocalConnection
from zcactor.transport.loopback import Faults, loopback_pair
from zcactor.transport.os_process import OsProcess

__all__ = ["DEPTH", "Held", "Hub", "Pair", "echo", "echo_all", "echo_plain", "until"]

DEPTH = 16


class Held:
    """Something that can be leased."""

    def __init__(self, object_id: int = 7) -> None:
        self.object_id = object_id
        self.grants = 0
        self.lost = False

    def grant(self, session: Session) -> tuple[bytes, int, int]:
        if self.lost:
            raise ObjectLost("its owner is gone")
        self.grants += 1
        session.leases.grant(self.object_id, self)
        return session.process, self.object_id, 0


class Hub:
    """Records what a session tells it."""

    def __init__(self, process: bytes) -> None:
        self.process = process
        self.counters = new_counters()
        self.hosts: dict[int, Any] = {}
        self.dtype_codes: dict[Any, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.store: Any = None
        self.received: list[Incoming] = []
        self.cancelled: list[Incoming] = []
        self.lost: list[tuple[Exception | None, list[Call]]] = []
        self.imported: list[Region] = []
        self.late: list[asyncio.Future[Part]] = []
        self.late_releases = 0
        self.answer: Callable[[Incoming], None] | None = None

    def share(self, array: Any, address: int, nbytes: int) -> None:
        raise AssertionError(f"{type(array)} is no array of the store")

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self.process, os.getpid(), "host", "3.11.0", "worker")

    def call_received(self, incoming: Incoming) -> None:
        self.received.append(incoming)
        if self.answer is not None:
            self.answer(incoming)

    def cancel_received(self, incoming: Incoming) -> None:
        self.cancelled.append(incoming)

    def import_region(self, session: Session, region: Region, unread: bool, sealed: bool) -> tuple[Part, Any]:
        self.imported.append(region)
        part = Part(region.kind, ("lease", region.id), region.offset, region.nbytes, region.authenticate)
        if region.owner == session.peer_process:
            return part, None
        future: asyncio.Future[Part] = session.loop.create_future()
        self.late.append(future)
        return Part(0, None, 0, 0), future

    def read_result(self, call: Call) -> None:
        raise AssertionError("nothing here is unread")

    def park(self, reader: OsProcess, session: Session, blocks: Mapping[int, Block]) -> None:
        raise AssertionError(f"{reader} maps nothing: {blocks}")

    def outlived(self, session: Session) -> None:
        self.late_releases += 1

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        self.lost.append((cause, calls))


class Pair:
    """Two sessions; `a` calls, `b` is called."""

    def __init__(self, kind: str = "loopback", depth: int = DEPTH, faults: Faults | None = None) -> None:
        loop = asyncio.get_running_loop()
        names = secrets.token_bytes(16), secrets.token_bytes(16)
        connections: Sequence[Any]
        if kind == "loopback":
            connections = loopback_pair(processes=names, recv_depth=depth, seed=1, faults=faults or Faults())
        else:
            ends = socket.socketpair()
            for end in ends:
                end.setblocking(False)
            connections = [
                LocalConnection(
                    end,
                    PeerInfo(names[1 - i], os.getpid(), os.getuid(), 0),
                    recv_depth=depth,
                    eager_limit=16384,
                    mapping=None,
                    map_writable=no_arena,
                )
                for i, end in enumerate(ends)
            ]
        self.hubs = Hub(names[0]), Hub(names[1])
        self.a, self.b = (Session(hub, end, loop) for hub, end in zip(self.hubs, connections, strict=True))
        self.a.start()
        self.b.start()

    def call(self, payload: bytes = b"", parts: Sequence[Part] = (), *, code: int = 0) -> Call:
        call = Call(self.hubs[0].process, self.a.loop, self.a.thread)
        call.refs = 1
        self.a.send_call(call, 2, code, 0, 0, payload, parts)
        return call

    async def settle(self) -> None:
        await turns(30)

    async def close(self) -> None:
        self.a.connection.abort()
        self.b.connection.abort()
        await self.settle()


async def no_arena() -> None:
    return None


def echo(incoming: Incoming) -> None:
    incoming.session.respond(incoming, Status.OK, incoming.payload, incoming.parts, 0)


def echo_plain(incoming: Incoming) -> None:
    incoming.session.respond(incoming, Status.OK, b"\xc0", (), 0)


async def until(condition: Callable[[], bool], turn: Callable[[], object] = lambda: None) -> None:
    """Let the loop go round, with a `turn` in each round, until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            turn()
            await asyncio.sleep(0)


def echo_all(pair: Pair) -> None:
    """Answer the calls that have come."""
    for incoming in list(pair.b.incoming.values()):
        echo(incoming)
