"""Two processes that connect to each other at the same moment: of both connections one stays.

Each side may have calls under way on its own by the time it learns of the other's. The one stays that the process with
the smaller id has opened, which both know without asking. What was written to the other one stays there; later calls to
the same actor wait until the peer has taken that in, and go into the same lane there (`zcactor.runtime.mailbox`), so
none overtakes another. Leases belong to the pair: both connections share one table, and either can release. The other
connection is closed, by agreement, once nothing is open on it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor.buggify import dawdle
from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    from zcactor.rpc.session import Session
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = ["Twins"]

_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two looks whether a connection can be closed, at first and at last: calls on it may run for long."""


class Twins:
    """Keeps one connection for each peer. On the loop's thread.

    Args:
        sessions: of the process.
        tasks: its own.
        requests: ask peers whether a connection can go.
    """

    def __init__(self, sessions: Sessions, tasks: Tasks, requests: Requests) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests

    def other(self, peer: bytes, opener: bytes) -> Session | None:
        """The connection to `peer` that lives already and was opened by the other end than `opener`; None without."""
        found = self._sessions.used.get(peer)
        if found is None or found.closed is not None or found.opener == opener or peer == self._sessions.process:
            return None
        return found

    def settle(self, session: Session) -> None:
        """`session` has begun beside its twin: use one of them from now on."""
        twin = session.twin
        if twin is None or twin.closed is not None:
            return
        stays, goes = (session, twin) if session.opener < twin.opener else (twin, session)
        self._sessions.used[stays.peer_process] = stays
        goes.successor = stays
        for actor in self._sessions.unwatch(goes):
            self._tasks.start(actor.change(goes, stays))
        if goes.opener == self._sessions.process:
            self._tasks.start(self._close(goes))

    def _is_unused(self, session: Session, serving: int = 0) -> bool:
        return not session.pending and len(session.incoming) <= serving and not self._sessions.watched(session)

    async def _close(self, session: Session) -> None:
        """Close `session` once neither side needs it."""
        pause = _FIRST_LOOK
        while session.closed is None and session.is_replaced:
            if self._is_unused(session):
                await dawdle("retire")
                try:
                    agreed = await self._requests.ask(session, "retire")
                except ZcactorError:  # it has ended meanwhile
                    return
                if agreed and not session.pending:
                    await session.aclose()
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    def agree(self, session: Session) -> bool:
        """The peer wants to close `session`: whether nothing of ours needs it, or will."""
        return session.is_replaced and self._is_unused(session, serving=1)
