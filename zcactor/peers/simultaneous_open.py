"""Twins: two connections of processes that connect to each other at the same moment, one of which stays.

Each side may have calls under way by its own connection when it learns of the other. The connection that the process
with the smaller id has opened stays, which both sides know without asking. Messages written to the other connection
stay there; later calls to the same actor wait until the peer has received those, and go into the same lane there
(`zcactor.execution.mailbox`), so no call overtakes another. Leases belong to the pair: both connections share one
table, and either can release. The other connection is closed, by agreement, once nothing is open on it. A connection
that is about to be closed for idleness can have a twin, too: then neither end closes it, because it is needed again.

A connection that was lost at one end, as by a cut of the network, is open at the other end until that notices, and has
no twin. Greetings tell the two cases apart: see `SimultaneousOpens.greeted`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor.buggify import dawdle
from zcactor.errors import ZcactorError
from zcactor.rpc.services import caller, remote

if TYPE_CHECKING:
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["SimultaneousOpens"]

_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0
"""Seconds between two checks whether a connection can be closed, at first and at last: calls on it may run for long."""


class SimultaneousOpens:
    """The choice of one connection for each peer. Used on the loop's thread.

    Args:
        sessions: the sessions of the process.
        tasks: the tasks of the process.
        requests: ask peers whether a connection may be closed.
    """

    def __init__(self, sessions: Sessions, tasks: Tasks, requests: Requests) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests

    def other(self, peer: bytes, opener: bytes) -> Session | None:
        """The living session with `peer` that the other end than `opener` opened, or None. The session may be about to
        be closed by agreement: the peer may not know that yet, and takes the two for twins."""
        found = self._sessions.living(peer)
        return None if found is None or found.opener == opener or peer == self._sessions.process else found

    def greeted(self, session: Session) -> None:
        """Take the peer's greeting on `session`: settle which of two twins stays, and drop each earlier connection that
        the peer has lost, of whose end nothing has come here. The peer's greeting on one of two twins names the other,
        as it has both; otherwise it had no other connection when it began the later one."""
        peer, ours = session.peer_process, session.peer_hello
        if ours is None or peer == self._sessions.process:
            return
        for other in [each for each in self._sessions.all() if each.peer_process == peer and each is not session]:
            theirs = other.peer_hello
            if other.closed is not None or theirs is None:
                continue
            if ours.twin == theirs.session or theirs.twin == ours.session:
                continue
            lost, living = (session, other) if ours.session < theirs.session else (other, session)
            if self._sessions.used.get(peer) is lost:
                self._sessions.used[peer] = living
            # The earlier one here has leases in a shared table, unless it had none when this process stopped using it.
            # The later one was not used before its greeting came.
            leased = lost.number < living.number and not (lost.parted or self._sessions.is_leaving(lost))
            cause = f"{self._sessions.describe(peer)} has lost the connection"
            lost.disown(cause, leases=leased or lost.leases is not living.leases)
        self.settle(session)

    def settle(self, session: Session) -> None:
        """Use one of `session` and its twin from now on; without a twin nothing changes. If the peer may close one of
        the two by agreement, the other is used until we have taken the agreement back."""
        twin = session.twin
        if twin is None or twin.closed is not None or twin.peer_hello is None or session.peer_hello is None:
            return  # the greetings show whether they are twins
        stays, goes = (session, twin) if session.opener < twin.opener else (twin, session)
        if stays.parted:
            stays, goes = goes, stays
        if goes.successor is stays:
            return
        self._sessions.used[stays.peer_process] = stays
        for each in (stays, goes):
            self._sessions.stay(each)
        stays.successor, goes.successor = None, stays
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
                    agreed = await self._requests.ask(session, SimultaneousOpens.retire)
                except ZcactorError:  # the session has ended meanwhile
                    return
                if agreed and not session.pending:
                    await session.aclose()
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)

    @remote(10)
    async def retire(self) -> bool:
        """Take the caller's wish to close this connection, beside which another one is open. Returns whether we agree,
        because nothing of ours needs it or will."""
        session = caller()
        return session.is_replaced and self._is_unused(session, serving=1)
