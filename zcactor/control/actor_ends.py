"""The ends of actors: those that somebody asks for, and those of actors that nobody holds."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from zcactor.control.drain import decide_end, discard, discard_others
from zcactor.control.entries import gone_changes, stopping_changes
from zcactor.control.head_log import Deposed
from zcactor.control.questions import Questions
from zcactor.errors import ConnectionLost, HeadUnavailable, RemoteError, ZcactorError
from zcactor.execution.closing import TAKEN_IN
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.head_log import Change
    from zcactor.control.recipes import Recipes
    from zcactor.control.reservations import Reservations
    from zcactor.ids import ActorId
    from zcactor.process.context import LocalProcess
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["ActorEnds"]


class ActorEnds(Questions):
    """The requests to the head that end actors.

    Attributes:
        process: the head's process.
        closing: whether the head is shutting down, so that nothing is recorded any more.
        recipes: the classes and arguments of actors that agents hold.
    """

    process: LocalProcess
    closing: bool
    recipes: Recipes
    _reservations: Reservations

    def _retire(self, actor: ActorRecord, cause: str, *, closed: bool = False) -> None:
        """End an actor: its process, or its place in a shared process. A process whose last actor was `closed` gets
        `shutdown_timeout` seconds for its exit functions."""
        worker = actor.worker
        self._bury(actor, cause)
        if worker is None or worker.ended.done():
            return
        worker.actors.pop(actor, None)
        if not worker.actors:
            worker.leaving = True
            self._nodes.unshare(worker)
            if closed:
                self.process.tasks.start(self._dismiss(worker))
            else:
                worker.kill()
        elif worker.shared:
            self.process.tasks.start(discard(self.process, self.recorder, worker, actor.index))

    async def _dismiss(self, worker: WorkerRecord) -> None:
        """Have a process without actors end by itself; kill it, and what it has started, where it does not in time."""
        grace = self.process.config.shutdown_timeout
        try:
            async with asyncio.timeout(grace):
                session = await self.process.connections.connect(worker.process)
                await self.process.requests.ask(session, "leave", grace)
                await asyncio.shield(worker.ended)
        except (TimeoutError, ZcactorError) as error:
            logger.debug("worker %d did not end by itself: %s", worker.pid, error)
        finally:
            worker.kill()

    def _discard_others(self, worker: WorkerRecord) -> asyncio.Task[None]:
        """End all that is in a shared process, but the actors that this head has there. The task ends when that is
        done."""
        indices = [actor.index for actor in worker.actors]
        return self.process.tasks.begin(discard_others(self.process, self.recorder, worker, indices))

    def _bury(self, actor: ActorRecord, cause: str) -> None:
        if actor.state == "dead":
            return
        if actor.recorded and not self.closing:
            self.recorder.note(*gone_changes(actor))
        actor.set_state("dead", cause)
        if actor.displaced and not self.closing:
            self.grants.tell_holders(actor)
        if actor.withdraw is not None:
            actor.withdraw()
        self._reservations.give_back(actor)
        self.recipes.release(actor)
        self._actors.bury(actor)

    async def kill(self, actor_id: ActorId) -> None:
        """End an actor at once. Returns when its process has ended, also where the request is repeated.

        Raises:
            NoSuchActor: the actor is unknown.
            HeadUnavailable: the head's log does not take it, and the actor lives on; or it does not answer, and the
                actor ends once the log has taken it.
        """
        actor = self._actors.known(actor_id)
        if self.members.taking_over is not None:
            await self.members.taking_over.settled(actor)
        await self._decide_end(actor, gone_changes(actor), lambda: self._retire(actor, "it was killed by zc.kill"))
        if actor.gone is not None:
            await asyncio.shield(actor.gone)

    async def stop(self, actor_id: ActorId) -> None:
        """End an actor after its queued calls. Returns when its process has ended; cancelling ends only the wait.

        Raises:
            NoSuchActor: the actor is unknown.
            HeadUnavailable: the head's log does not take it, and the actor lives on; or it does not answer, and the
                actor ends once the log has taken it.
        """
        actor = self._actors.known(actor_id)
        if self.members.taking_over is not None:
            await self.members.taking_over.settled(actor)
        if actor.ending is None:
            stop = functools.partial(self._begin_stop, actor, "it was stopped by zc.stop", decided=True)
            await self._decide_end(actor, stopping_changes(actor), stop)
        if actor.ending is not None:
            await asyncio.shield(actor.ending)

    async def _decide_end(self, actor: ActorRecord, changes: Sequence[Change], end: Callable[[], None]) -> None:
        if not actor.recorded or self.closing:
            end()
            return
        timeout = self.process.config.head_timeout
        if not await decide_end(self.recorder, self.process.tasks, actor, changes, end, timeout):
            raise HeadUnavailable(self.members.log, timeout)

    def _begin_stop(self, actor: ActorRecord, cause: str, *, decided: bool = False, seconds: float = TAKEN_IN) -> None:
        """Stop an actor in a task of its own, because the caller may go away meanwhile; `decided` where that is
        recorded. Peers have `seconds` to receive its last answers."""
        if actor.state != "dead" and actor.ending is None:
            actor.ending = self.process.loop.create_task(self._stop(actor, cause, seconds, decided=decided))

    async def _stop(self, actor: ActorRecord, cause: str, seconds: float, *, decided: bool) -> None:
        if actor.moving is not None:
            await asyncio.shield(actor.moving)
            decided = False  # the move is recorded, as a new life
        if not decided and actor.recorded and not self.closing:
            try:
                await self.recorder.noted(*stopping_changes(actor))
            except Deposed:
                return
        worker, closed = actor.worker, False
        if worker is not None and actor.state == "alive":
            try:
                session = await self.process.connections.connect(worker.process)
                await self.recorder.order(self.process.requests, session, "stop", actor.index, seconds)
                closed = True
            except Deposed:
                return
            except (ConnectionLost, RemoteError) as error:
                logger.debug("%s ended while it was being stopped: %s", actor.label, error)
        self._retire(actor, cause, closed=closed)
        if actor.gone is not None:
            await asyncio.shield(actor.gone)

    def _unheld(self, actor: ActorRecord) -> None:
        """Stop an actor whose last handle was dropped. Before a take-over is done, further holders may return; only its
        spawner holds one that is pending."""
        if self.closing or actor.state == "dead" or (self.members.is_taking_over and actor.state != "pending"):
            return
        if actor.token is not None and actor.token() is not None:
            return
        if actor.state == "pending":  # even a named one: the spawn was given up before the handle arrived
            actor.withdrawn = True
            self._retire(actor, "its spawn was cancelled")
        elif actor.name is None and not actor.detached:
            self._begin_stop(actor, "its last handle was dropped")
