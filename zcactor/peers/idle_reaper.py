"""Closing unused connections by agreement of both ends, so that no message is lost.

An idle connection takes descriptors and buffers at both ends. By RDMA its queue pairs take memory of the card, which
gets slower with thousands of them ("FaSST: Fast, Scalable and Simple Distributed Transactions", OSDI 2016, section
3.1). A connection is opened again when it is needed: a handle does not keep a connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost, ZcactorError
from zcactor.process.alarm import Alarm
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from zcactor.config import Config
    from zcactor.peers.requests import Requests
    from zcactor.peers.simultaneous_open import SimultaneousOpens
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["IdleReaper"]


class IdleReaper:
    """Checks the connections from time to time. Used on the loop's thread.

    Args:
        sessions: the sessions of the process.
        tasks: the tasks of the process.
        requests: carry the proposals to peers.
        simultaneous_opens: settles connections that peers have opened meanwhile.
        config: has `idle_timeout`.
        keeps: whether the process keeps all its connections open, as the agent of a node does.
    """

    def __init__(
        self, sessions: Sessions, tasks: Tasks, requests: Requests, simultaneous_opens: SimultaneousOpens,
        config: Config, *, keeps: bool,
    ) -> None:  # fmt: skip
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests
        self._simultaneous_opens = simultaneous_opens
        self._config = config
        self._keeps = keeps
        self._seen: dict[Session, tuple[int, float]] = {}
        """Number of calls that had been sent by a session at the last check, and the time since when it has been the
        same."""
        self._proposed: dict[Session, bool] = {}
        """Sessions that we have proposed to close; the value is whether we have agreed meanwhile that the peer closes
        it."""
        self._agreed: dict[Session, int] = {}
        """Sessions that the peer closes by agreement, with the number of calls that had been sent by then."""
        self._pause = 0.0 if keeps else config.idle_timeout / 2
        self._alarm = Alarm(tasks.loop, self._pause, self.look) if self._pause else None

    def look(self) -> None:
        """Propose to close each session by which nothing was sent for long enough."""
        before, now = self._seen, self._tasks.loop.time()
        self._seen = seen = {}
        if self._agreed:
            self._agreed = {session: sent for session, sent in self._agreed.items() if session.closed is None}
        for session in self._sessions.all():
            timeout = session.connection.idle_timeout(self._config)
            if timeout and session.closed is None:
                sent, last = session.sent, before.get(session)
                if last is None or last[0] != sent:
                    last = sent, now
                seen[session] = last
                if now - last[1] >= timeout and session not in self._agreed and self.is_idle(session):
                    self._tasks.start(self._propose(session))

    def is_idle(self, session: Session, asking: int = 0, serving: int = 0) -> bool:
        """Whether `session` is unused on our side, except for `asking` calls of ours and `serving` calls of the
        peer."""
        return (
            session.closed is None
            and len(session.pending) <= asking
            and len(session.incoming) <= serving
            and session.leases.total == 0
            and session.peer_process not in self._sessions.kept
            and (session.twin is None or session.twin.closed is not None)
            and session.peer_process not in (self._sessions.head, self._sessions.node)
            and self._sessions.process != self._sessions.head
        )

    async def _propose(self, session: Session) -> None:
        """Stop using `session`, ask the peer to do the same, and close it; use it again if the peer needs it."""
        # Since the look the peer may be about to close it, or may have got a lease, which it could not give back then.
        if session in self._agreed or not self.is_idle(session):
            return
        self._leave(session)
        self._proposed[session] = False
        try:
            agreed, idle = True, False
            while agreed and not idle:
                # Asked twice: another thread may be about to send by the session; it has sent by the time of the second
                # answer.
                part = IdleReaper.part
                agreed = await self._requests.ask(session, part) and await self._requests.ask(session, part)
                idle = self.is_idle(session)
        except ZcactorError:  # the session has ended meanwhile
            return
        finally:
            peer_parts = self._proposed.pop(session)
        if agreed:
            session.parted = True
            await session.aclose(ConnectionLost("the connection was closed, as nobody used it", maybe_executed=False))
        elif not peer_parts:
            self._sessions.stay(session)

    @remote(9)
    async def part(self) -> bool:
        """Whether the caller may close its connection to us, which this process does not need either."""
        return not self._keeps and self.close_if_idle(caller())

    def close_if_idle(self, session: Session) -> bool:
        """Take the peer's proposal to close `session`. Returns whether we agree; then this side stops using it. Where
        both sides propose at once, the process with the smaller id closes it."""
        both = session in self._proposed
        seen, since = self._seen.get(session, (-1, 0.0))
        sent = self._agreed.pop(session, seen + both)
        young = self._tasks.loop.time() - since < self._pause  # the side that opened it may be about to send
        if young or sent != session.sent or not self.is_idle(session, asking=both, serving=1):
            session.parted = False
            if both:
                self._proposed[session] = False  # we had agreed to the peer's first question
            else:
                self._sessions.stay(session)
            self._simultaneous_opens.settle(session)
            return False
        if both:
            if self._sessions.process < session.peer_process:
                return False
            self._proposed[session] = True
        self._agreed[session] = sent
        session.parted = True
        self._leave(session)
        return True

    def _leave(self, session: Session) -> None:
        """Stop using `session`: calls of this process wait until it is closed, or used again."""
        self._sessions.leave(session)
        for actor in self._sessions.unwatch(session):
            actor.leave(session)

    def close(self) -> None:
        """Stop checking. Idempotent."""
        if self._alarm is not None:
            self._alarm.close()
