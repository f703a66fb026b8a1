"""Closing connections that nobody uses, by agreement, so that no message is ever lost to it.

Every queue pair takes memory of the card, which gets slower with thousands of them ("FaSST: Fast, Scalable and Simple
Distributed Transactions", OSDI 2016, section 3.1). A connection is opened again when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    import asyncio

    from zcactor.rpc.session import Session
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = ["Parting"]


class Parting:
    """Looks at the connections by RDMA from time to time. On the loop's thread.

    Args:
        sessions: of the process.
        tasks: its own.
        requests: propose to peers to part.
        timeout: seconds without a message until one is idle.
    """

    def __init__(self, sessions: Sessions, tasks: Tasks, requests: Requests, timeout: float) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests
        self._timeout = timeout
        self._seen: dict[Session, int] = {}
        self._timer: asyncio.TimerHandle = tasks.loop.call_later(timeout, self.look)

    def look(self) -> None:
        """Propose to part where nothing has happened since the last look."""
        before = self._seen
        self._seen = {}
        for session in self._sessions.all():
            if session.connection.kind == "verbs" and session.closed is None:
                activity = self._seen[session] = session.connection.activity
                if before.get(session) == activity and self.is_idle(session):
                    self._tasks.start(self._propose(session))
        self._timer = self._tasks.loop.call_later(self._timeout, self.look)

    def is_idle(self, session: Session, serving: int = 0) -> bool:
        """Whether nothing of ours needs `session`, but for `serving` calls of the peer's."""
        return (
            session.closed is None
            and not session.pending
            and len(session.incoming) <= serving
            and session.leases.total == 0
            and not self._sessions.watched(session)
            and self._sessions.head not in (session.peer_process, self._sessions.process)
        )

    async def _propose(self, session: Session) -> None:
        """Stop using `session`, ask the peer to do the same, and close it; use it again if the peer needs it."""
        used = self._sessions.used
        if used.get(session.peer_process) is session:
            del used[session.peer_process]  # whoever needs the peer now gets a connection of its own
        try:
            agreed = await self._requests.ask(session, "part")
        except ZcactorError:  # it has ended meanwhile
            return
        if agreed:
            await session.aclose()
        else:
            used.setdefault(session.peer_process, session)

    def agree(self, session: Session) -> bool:
        """The peer proposes to part: whether we do, too. Then `session` is not used from here any more."""
        if not self.is_idle(session, serving=1):
            return False
        used = self._sessions.used
        if used.get(session.peer_process) is session:
            del used[session.peer_process]
        return True

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._timer.cancel()
