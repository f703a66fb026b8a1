"""The failure detector: giving up silent peers on other hosts that owe an answer.

The kernel of a host whose processes are stopped (a paused virtual machine, a frozen control group) still confirms
received data, so no connection ends. A silent peer that owes an answer is asked by a frame for a sign of life; if none
comes, the head is asked whether it has heard from that node. If the head has not heard from it either, the peer is
given up: the connection ends, with all that is open on it. Otherwise calls go on waiting: a blocked loop is not dead,
and a method may run for hours. Nothing is sent while no answer is owed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ConnectionLost, ZcactorError
from zcactor.rpc.services import Services

if TYPE_CHECKING:
    import asyncio

    from zcactor.peers.head_link import HeadLink
    from zcactor.peers.requests import Requests
    from zcactor.process.sessions import Sessions
    from zcactor.process.tasks import Tasks
    from zcactor.rpc.session import Session

__all__ = ["FailureDetector"]

PING_AFTER = 3.0
"""Seconds without a byte from a peer that owes an answer, after which it is asked for a sign of life."""
ASK_AFTER = 6.0
"""Seconds of that silence after which the head is asked."""
HEARD_WITHIN = 4.5
"""Seconds within which a living node has reported to the head: it is asked each second."""
_WATCHING, _RESTING = 0.5, 1.0
"""Seconds between two checks, while answers are owed and otherwise. The longer pause and `ASK_AFTER` together are
within the eight seconds in which calls to a stopped host end."""


class _Silence:
    """The state of a peer that owes an answer."""

    __slots__ = ("asking", "heard", "pinged", "since")

    def __init__(self, heard: int, since: float) -> None:
        self.heard = heard
        self.since = since
        self.pinged = False
        self.asking = False


class FailureDetector:
    """Checks the connections to other hosts, once the first exists. Used on the loop's thread.

    Args:
        sessions: the sessions of the process, which is not a node agent: agents watch each other in another way.
        tasks: the tasks of the process.
        requests: carry the pings to peers.
        head: the link to the head, which is asked about silent peers.
    """

    def __init__(self, sessions: Sessions, tasks: Tasks, requests: Requests, head: HeadLink) -> None:
        self._sessions = sessions
        self._tasks = tasks
        self._requests = requests
        self._head = head
        self._silent: dict[Session, _Silence] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begun(self, session: Session) -> None:
        """Begin to check, when `session` is the first with another host."""
        if self._timer is None and session.connection.heard is not None:
            self._timer = self._tasks.loop.call_later(_RESTING, self.look)

    def look(self) -> None:
        """Find the peers that owe an answer, and those that were silent since the last check."""
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
            await self._requests.ask(session, Services.ping)
        except ZcactorError:  # the connection has ended, and all calls on it have failed
            return

    async def _ask(self, session: Session, silence: _Silence) -> None:
        """Ask the head about a silent peer, and give the peer up if the head has not heard from its node either."""
        peer = session.peer_process
        if peer != self._sessions.head:  # nobody else knows about the head
            try:
                ago, _ = await self._head.silence_of(peer)
            except ConnectionLost:
                ago = 0.0  # the head is silent, too: the cluster may be about to end, and nothing is known
            if self._silent.get(session) is silence and not 0.0 <= ago < HEARD_WITHIN:
                quiet = self._tasks.loop.time() - silence.since
                session.give_up(f"its host is silent: nothing has come from it for {quiet:.1f} s, nor to the head")
                return
        silence.asking = False

    def close(self) -> None:
        """Stop checking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
