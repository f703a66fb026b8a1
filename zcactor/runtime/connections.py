"""How a process connects to others, and what becomes of calls when a connection ends."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from zcactor.buggify import dawdle
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.rpc.session import Session
from zcactor.transport.loopback import loopback_pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.rpc.call import Call
    from zcactor.rpc.hub import Hub
    from zcactor.runtime.sessions import Sessions, StandIn
    from zcactor.runtime.tasks import Tasks
    from zcactor.runtime.twins import Twins
    from zcactor.transport.base import Connection, Endpoint

__all__ = ["Connections"]


class Connections:
    """Opens one connection for each peer, on first use. On the loop's thread, but for `connect`.

    Args:
        hub: what the sessions belong to.
        sessions: the table of them.
        twins: settles which of two stays.
        tasks: of the process.
        endpoint: how peers are reached.
        store: the process's own, for a connection to itself.
        config: `recv_depth` and `eager_limit` of that connection.
        pid: of the process, which it tells itself.
    """

    def __init__(
        self, hub: Hub, sessions: Sessions, twins: Twins, tasks: Tasks, endpoint: Endpoint, store: Store,
        config: Config, pid: int,
    ) -> None:  # fmt: skip
        self.on_opened: list[Callable[[Session], None]] = []
        """Told of each session that has begun."""
        self.on_left: list[Callable[[Session, Session | None], None]] = []
        """Told of each session that is lost, and of another one to the same peer, before calls that were open fail."""
        self.on_lost: Callable[[Session], None] | None = None
        """Told of each session that is lost, when all else is done."""
        self._hub = hub
        self._sessions = sessions
        self._twins = twins
        self._tasks = tasks
        self._endpoint = endpoint
        self._store = store
        self._config = config
        self._pid = pid
        self._connecting: dict[bytes, asyncio.Task[Session]] = {}
        self._numbers = count(1)

    def accepted(self, connection: Connection) -> None:
        """A peer has connected."""
        session = self._start(connection, connection.peer.process)
        self._sessions.used.setdefault(session.peer_process, session)
        self._twins.settle(session)

    def _start(self, connection: Connection, opener: bytes) -> Session:
        twin = self._twins.other(connection.peer.process, opener)
        session = Session(self._hub, connection, self._tasks.loop, opener=opener, twin=twin, number=next(self._numbers))
        self._sessions.add(session)
        session.start()
        for told in self.on_opened:
            told(session)
        return session

    async def connect(self, process: bytes) -> Session:
        """The connection to `process`, opened on first use and shared by all callers. From any thread's loop.

        Raises:
            ConnectionLost: it does not answer.
        """
        if threading.get_ident() != self._tasks.thread:
            return await self._tasks.elsewhere(self.connect(process))
        session = self._sessions.used.get(process)
        if session is not None and session.closed is None:
            return session
        task = self._connecting.get(process)
        if task is None:
            task = self._connecting[process] = self._tasks.loop.create_task(self._open(process))
            task.add_done_callback(partial(self._connected, process))
        return await asyncio.shield(task)

    def _connected(self, process: bytes, task: asyncio.Task[Session]) -> None:
        self._connecting.pop(process, None)
        if not task.cancelled():
            task.exception()  # seen: those who have waited for it may all have been cancelled

    async def _open(self, process: bytes) -> Session:
        used = self._sessions.used
        if process == self._sessions.process:
            session = self._to_itself(process)
        else:
            try:
                await dawdle("connect")
                connection = await self._endpoint.connect(process.hex())
            except (ConnectionLost, ProtocolError) as error:
                theirs = used.get(process)  # the peer may have connected meanwhile
                if isinstance(error, ProtocolError) or theirs is None or theirs.closed is not None:
                    error.args = (self._sessions.named(str(error.args[0])), *error.args[1:])
                    raise
                return theirs
            session = self._start(connection, self._sessions.process)
        if session.twin is None:
            used[process] = session
        self._twins.settle(session)
        return used[process]

    def _to_itself(self, process: bytes) -> Session:
        arena = (self._store.arena.address, self._store.arena.nbytes)
        ours, others = loopback_pair(
            self._tasks.loop, processes=(process, process), arenas=(arena, arena), recv_depth=self._config.recv_depth,
            eager_limit=self._config.eager_limit, pid=self._pid,
        )  # fmt: skip
        self._start(others, process)
        return self._start(ours, process)

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        """See `zcactor.rpc.hub.Hub`: the actors at its other end say what becomes of calls to them."""
        another = self._sessions.remove(session)
        for told in self.on_left:
            told(session, another)
        # Of a ConnectionLost the bare message: what is raised for the calls says by itself whether they may have run.
        text = str(cause.args[0] if isinstance(cause, ConnectionLost) else cause or "the connection was closed")
        text = session.given_up or text
        by_actor: dict[StandIn, list[Call]] = {actor: [] for actor in self._sessions.unwatch(session)}
        for call in calls:
            if call.target is not None:
                by_actor.setdefault(call.target, []).append(call)
            else:
                call.fail(ConnectionLost(text, call.state.name != "QUEUED"))
        for actor, lost in by_actor.items():
            actor.session = None
            if self._tasks.closing:
                actor.die("the runtime was shut down")
                for call in lost:
                    call.fail(ConnectionLost("the runtime was shut down", True))
            elif session.given_up:
                actor.given_up(lost, text)
            else:
                self._tasks.start(actor.lost(lost, text))
        if self.on_lost is not None:
            self.on_lost(session)
