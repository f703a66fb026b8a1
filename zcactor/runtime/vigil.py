"""Peers on other hosts that owe an answer and say nothing: a host that is stopped still confirms what it is sent.

The kernel of a host whose processes are stopped (a paused virtual machine, all of a group frozen) goes on answering for
them, so no connection ends. A peer that owes an answer and is silent is asked for a sign of life by a frame; if none
comes, the head is asked whether it has heard from that node. A node that the head does not hear either is given up:
the connection ends, and what is open on it. Otherwise calls go on waiting: a loop that is blocked is no death, and a
method may run for hours. Nothing is sent while nothing is owed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost, ZcactorError

if TYPE_CHECKING:
    import asyncio

    from zcactor.rpc.session import Session
    from zcactor.runtime.head import HeadLink
    from zcactor.runtime.requests import Requests
    from zcactor.runtime.sessions import Sessions
    from zcactor.runtime.tasks import Tasks

__all__ = ["Vigil"]

PING_AFTER = 3.0
"""Seconds without a byte from a peer that owes an answer, until it is asked for a sign of life."""
ASK_AFTER = 6.0
"""Seconds of that silence until the head is asked."""
HEARD_WITHIN = 4.5
"""Seconds in which a node that lives has told the head so: it is asked each second."""
_WATCHING, _RESTING = 0.5, 1.0
"""Seconds between two looks while answers are owed, and while none is. The longer one and `ASK_AFTER` are within the
eight seconds in which calls to a stopped host end."""


class _Silence:
    """What is known of a peer that owes an answer."""

    __slots__ = ("asking", "heard", "pinged", "since")

    def __init__(self, heard: int, since: float) -> None:
        self.heard = heard
        self.since = since
        self.pinged = False
        self.asking = False


class Vigil:
    """Looks at the connections to other hosts, once there are any. On the loop's thread.

    Args:
        sessions: of the process, which is no node agent: those watch each other in their own way.
        tasks: its own.
        requests: ask peers for a sign of life.
        head: is asked of those who give none.
    """

    def __init__(self, sessions: Sessions, tasks: Tasks, requests: Requests, head: HeadLink) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests
        self._head = head
        self._silent: dict[Session, _Silence] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begun(self, session: Session) -> None:
        """There is a new connection."""
        if self._timer is None and session.connection.heard is not None:
            self._timer = self._tasks.loop.call_later(_RESTING, self.look)

    def look(self) -> None:
        """See who owes an answer, and what has come from them since the last look."""
        before, loop = self._silent, self._tasks.loop
        now = loop.time()
        self._silent = {}
        far = False
        for session in self._sessions.all():
            heard = session.connection.heard if session.closed is None else None
            if heard is None:
                continue
            far = True
            if not session.pending:
                continue
            silence = before.get(session)
            if silence is None or silence.heard != heard:
                silence = _Silence(heard, now)
            self._silent[session] = silence
            if now - silence.since >= PING_AFTER and not silence.pinged:
                silence.pinged = True
                self._tasks.start(self._ping(session))
            if now - silence.since >= ASK_AFTER and not silence.asking:
                silence.asking = True
                self._tasks.start(self._ask(session, silence))
        pause = _WATCHING if self._silent else _RESTING
        self._timer = loop.call_later(pause, self.look) if far else None

    async def _ping(self, session: Session) -> None:
        try:
            await self._requests.ask(session, "ping")
        except ZcactorError:  # the connection has ended, and all that was open on it
            return

    async def _ask(self, session: Session, silence: _Silence) -> None:
        """Ask the head of a peer that is silent, and give it up if the head has not heard from its node either."""
        peer = session.peer_process
        if peer != self._sessions.head:  # of which nobody else knows
            try:
                ago, _ = await self._head.silence_of(peer)
            except ConnectionLost:
                ago = 0.0  # the head is silent as well: the cluster may be about to end, and nothing is known
            if self._silent.get(session) is silence and not 0.0 <= ago < HEARD_WITHIN:
                quiet = self._tasks.loop.time() - silence.since
                session.give_up(f"its host is silent: nothing has come from it for {quiet:.1f} s, nor to the head")
                return
        silence.asking = False

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
