"""Opening connections to other processes, and ending calls when a connection ends."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from zcactor.buggify import dawdle
from zcactor.errors import ConnectionLost, ProtocolError
from zcactor.logs import logger
from zcactor.rpc.session import Session
from zcactor.transport.loopback.endpoint import loopback_pair

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zcactor.config import Config
    from zcactor.objectstore.store import Store
    from zcactor.peers.simultaneous_open import SimultaneousOpens
    from zcactor.process.places import Places
    from zcactor.process.sessions import Sessions, StandIn
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.call import Call
    from zcactor.rpc.hub import Hub
    from zcactor.transport.base import Connection, Endpoint

__all__ = ["Connections"]


class Connections:
    """The connections of one process, one for each peer, opened on first use. Used on the loop's thread, but for
    `connect`.

    Args:
        hub: the hub of the sessions.
        sessions: the table of sessions.
        simultaneous_opens: settles which of two connections stays.
        places: the addresses of peers, as handles state them.
        tasks: the tasks of the process.
        endpoint: the endpoint that reaches peers.
        store: the store of the process, for a connection to itself.
        config: has `recv_depth` and `eager_limit` of that connection.
        pid: process id of the process, for that connection.
    """

    def __init__(
        self, hub: Hub, sessions: Sessions, simultaneous_opens: SimultaneousOpens, places: Places, tasks: Tasks,
        endpoint: Endpoint, store: Store, config: Config, pid: int,
    ) -> None:  # fmt: skip
        self.on_opened: list[Callable[[Session], None]] = []
        """Called with each session that has begun."""
        self.on_left: list[Callable[[Session, Session | None], None]] = []
        """Called with each session that is lost, and another session with the same peer or None, before open calls
        fail."""
        self.on_lost: Callable[[Session], None] | None = None
        """Called with each session that is lost, after all else."""
        self.called_back: Callable[[bytes], Awaitable[bool]] | None = None
        """Has a process that cannot be reached connect to this one, if it can; see
        `zcactor.peers.head_link.HeadLink.call_back`."""
        self._hub = hub
        self._sessions = sessions
        self._simultaneous_opens = simultaneous_opens
        self._places = places
        self._tasks = tasks
        self._endpoint = endpoint
        self._store = store
        self._config = config
        self._pid = pid
        self._connecting: dict[bytes, asyncio.Task[Session]] = {}
        self._numbers = count(1)

    def accepted(self, connection: Connection) -> None:
        """Take a connection that a peer has opened."""
        session = self._start(connection, connection.peer.process)
        self._sessions.used.setdefault(session.peer_process, session)
        self._simultaneous_opens.settle(session)

    def _start(self, connection: Connection, opener: bytes) -> Session:
        twin = self._simultaneous_opens.other(connection.peer.process, opener)
        session = Session(self._hub, connection, self._tasks.loop, opener=opener, twin=twin, number=next(self._numbers))
        self._sessions.add(session)
        session.start()
        for told in self.on_opened:
            told(session)
        return session

    async def connect(self, process: bytes) -> Session:
        """Return the session with `process`, which is opened on first use and shared by all callers. Any thread's loop
        may await this.

        Raises:
            ConnectionLost: the process does not answer.
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
        try:
            session = await asyncio.shield(task)
        finally:
            del task  # an error has this frame in its traceback, and the task has the error
        # Since the task was done the loop has turned: the peer may close it by now, as we have agreed.
        if session.is_replaced or self._sessions.is_leaving(session):
            return await self.connect(process)
        return session

    def _connected(self, process: bytes, task: asyncio.Task[Session]) -> None:
        self._connecting.pop(process, None)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: all waiters may have been cancelled

    async def _open(self, process: bytes) -> Session:
        used = self._sessions.used
        await self._sessions.left(process)
        session = used.get(process)
        if session is not None and session.closed is None:
            return session
        if process == self._sessions.process:
            session = self._to_itself(process)
        else:
            try:
                await dawdle("connect")
                connection = await self._reach(process)
            except (ConnectionLost, ProtocolError) as error:
                if self.called_back is not None and isinstance(error, ConnectionLost):
                    await self.called_back(process)
                theirs = used.get(process)  # the peer may have connected meanwhile
                if isinstance(error, ProtocolError) or theirs is None or theirs.closed is not None:
                    error.args = (self._sessions.named(str(error.args[0])), *error.args[1:])
                    raise
                return theirs
            session = self._start(connection, self._sessions.process)
        if session.twin is None:
            used[process] = session
        self._simultaneous_opens.settle(session)
        return used.setdefault(process, session)

    async def _reach(self, process: bytes) -> Connection:
        try:
            connection = await self._endpoint.connect(process.hex())
        except (ConnectionLost, ProtocolError):
            if not self._places.refuted(process):
                raise
            connection = await self._endpoint.connect(process.hex())
        self._places.reached(process)
        return connection

    def _to_itself(self, process: bytes) -> Session:
        arena = (self._store.arena.address, self._store.arena.nbytes, self._store.arena)
        ours, others = loopback_pair(
            self._tasks.loop, processes=(process, process), arenas=(arena, arena), recv_depth=self._config.recv_depth,
            eager_limit=self._config.eager_limit, pid=self._pid,
        )  # fmt: skip
        self._start(others, process)
        return self._start(ours, process)

    def session_lost(self, session: Session, cause: Exception | None, calls: list[Call]) -> None:
        """Fail or move the calls of a lost session; see `zcactor.rpc.hub.Hub`. The stand-ins of actors at its other end
        decide about calls to these actors."""
        another = self._sessions.remove(session)
        for told in self.on_left:
            told(session, another)
        # Of a ConnectionLost only the message is used: the errors raised for calls state whether they may have run.
        text = str(cause.args[0] if isinstance(cause, ConnectionLost) else cause or "the connection was closed")
        text = session.given_up or text
        if isinstance(cause, ProtocolError):  # the peer sees a closed connection only, and nothing here may wait for it
            logger.error("dropped the connection to %s: %s", self._sessions.describe(session.peer_process), cause)
        by_actor: dict[StandIn, list[Call]] = {actor: [] for actor in self._sessions.unwatch(session)}
        for call in calls:
            if call.target is not None:
                by_actor.setdefault(call.target, []).append(call)
            else:
                call.fail(ConnectionLost(text, call.state.name != "QUEUED"))
        for actor, lost in by_actor.items():
            actor.route = None
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
