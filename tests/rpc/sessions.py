"""Two sessions that talk over a connection, with hubs that record and holders that count."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tests.conformance.connection import turns
from tests.conformance.talk import RecordingHub
from zcactor.errors import ObjectLost
from zcactor.objectstore.ref import Region
from zcactor.rpc.call import Call
from zcactor.rpc.incoming import Incoming
from zcactor.rpc.messages import Status
from zcactor.rpc.parts import Part
from zcactor.rpc.session import Session
from zcactor.transport.frames import PeerInfo
from zcactor.transport.local.endpoint import LocalConnection
from zcactor.transport.loopback.endpoint import LoopbackFaults, loopback_pair

__all__ = ["DEPTH", "Held", "Hub", "Pair", "echo", "echo_all", "echo_plain", "until"]

DEPTH = 16


class Held:
    """An object that can be leased."""

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


class Hub(RecordingHub):
    """A hub that records the calls and events of its session."""

    def __init__(self, process: bytes) -> None:
        super().__init__(process)
        self.dtype_codes: dict[Any, Any] = {}
        self.dtypes: dict[str, Any] = {}
        self.store: Any = None
        self.lost: list[tuple[Exception | None, list[Call]]] = []
        self.imported: list[Region] = []
        self.late: list[asyncio.Future[Part]] = []
        self.late_releases = 0

    def share(self, array: Any, address: int, nbytes: int) -> None:
        raise AssertionError(f"{type(array)} is no array of the store")

    share_copied = share

    def import_region(self, session: Session, region: Region, unread: bool, sealed: bool) -> tuple[Part, Any]:
        self.imported.append(region)
        part = Part(region.kind, ("lease", region.id), region.offset, region.nbytes, region.authenticate)
        if region.owner == session.peer_process:
            return part, None
        future: asyncio.Future[Part] = session.loop.create_future()
        self.late.append(future)
        return Part(0, None, 0, 0), future

    def outlived(self, session: Session) -> None:
        self.late_releases += 1

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        self.lost.append((cause, calls))


class Pair:
    """Two sessions: `a` calls `b`."""

    def __init__(
        self, kind: str = "loopback", depth: int = DEPTH, faults: LoopbackFaults | None = None, *, lost: bool = False
    ) -> None:
        loop = asyncio.get_running_loop()
        names = secrets.token_bytes(16), secrets.token_bytes(16)
        connections: Sequence[Any]
        if kind == "loopback":
            connections = loopback_pair(processes=names, recv_depth=depth, seed=1, faults=faults or LoopbackFaults())
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
        if lost:  # before the sessions begin
            for each in connections:
                each.abort()
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
    """Run turns of the loop, with a `turn` in each, until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            turn()
            await asyncio.sleep(0)


def echo_all(pair: Pair) -> None:
    """Answer all calls that have come."""
    for incoming in list(pair.b.incoming.values()):
        echo(incoming)
