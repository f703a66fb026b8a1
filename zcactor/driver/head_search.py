"""The search of a program for its cluster's head, which was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.peers.losses import silence_before
from zcactor.process.cluster import MembershipService

if TYPE_CHECKING:
    import asyncio

    from zcactor.api.handle import ActorHold
    from zcactor.assembly.process import Process
    from zcactor.rpc.session import Session

__all__ = ["HeadSearch"]


class HeadSearch:
    """The search of one program that has joined a cluster. It begins whenever the connection to the head is lost.

    Args:
        process: the program's, which has joined.
        machine: the machine that it has told the head; see `zcactor.control.node_table.machine_of`.
    """

    def __init__(self, process: Process, machine: str) -> None:
        self._process = process
        self._machine = machine
        self._seeking: asyncio.Task[None] | None = None

    def session_lost(self, session: Session) -> None:
        """Look for the head, where the connection to it was lost."""
        process = self._process
        sessions, tasks = process.sessions, process.tasks
        lost = session.peer_process == sessions.head and sessions.used.get(sessions.head) is None
        patient = process.head.outage.patience > 0
        if lost and patient and not tasks.closing and (self._seeking is None or self._seeking.done()):
            process.head.outage.begin(silence_before(session.closed))
            self._seeking = tasks.begin(self._seek())

    async def _seek(self) -> None:
        process = self._process
        while await process.head.outage.seek(self._return):
            if process.sessions.living(process.sessions.head) is not None:
                return

    async def _return(self) -> bool:
        """Join a head that is back, as the program of before, and lease the actors anew of which this process has
        handles."""
        process = self._process
        session, held = await process.head.rejoin(
            process.news.known.epoch,
            MembershipService.return_driver,
            process.address,
            self._machine,
            list(self._holds()),
        )
        holds = self._holds()
        for object_id in held:
            if object_id in holds:
                holds[object_id].renew(session.release)
            else:
                session.release(object_id)
        return True

    def _holds(self) -> dict[int, ActorHold]:
        """The leases on actors of which this process has handles, by object id. A frame that waits must not keep them:
        where the wait fails, the error's traceback keeps the frame."""
        remotes = list(self._process.sessions.remotes.values())
        return {remote.hold.id: remote.hold for remote in remotes if remote.hold is not None}
