"""The places of actors: a process on a node, and for a new actor another one where its node is lost before the process
has started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from zcactor import ids
from zcactor.control.actor_ends import ActorEnds
from zcactor.control.entries import actor_change
from zcactor.errors import InsufficientResources
from zcactor.interface import shown
from zcactor.logs import logger
from zcactor.workers.worker_table import FIRST_INDEX

if TYPE_CHECKING:
    from zcactor.control.actor_record import ActorRecord
    from zcactor.ids import ProcessId
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["Placing"]


class Placing(ActorEnds):
    """The steps by which the head gives actors their processes."""

    async def _worker_for(self, actor: ActorRecord) -> WorkerRecord:
        """Give an actor a process, and wait until that has started."""
        worker = self._worker_of(actor)
        await worker.started(self.process.config.spawn_timeout, actor.label)
        return worker

    def _worker_of(self, actor: ActorRecord) -> WorkerRecord:
        """Give an actor a process, which is about to start or has started."""
        label = actor.class_name if actor.name is None else f"{actor.class_name} {shown(actor.name)}"
        assert actor.node is not None
        root = self._root(actor)
        worker = self._nodes.worker_for(actor.node, label, actor.options, root, actor.gpus, actor.planned)
        actor.worker, actor.planned = worker, None
        actor.index = worker.take_index()
        worker.actors[actor] = None
        return worker

    def _root(self, actor: ActorRecord) -> ProcessId:
        """The program for which the actor was made, directly or through other actors."""
        found = self._nodes.worker(actor.owner)
        return actor.owner if found is None else found[1].driver

    def _plan(self, actor: ActorRecord) -> None:
        """Choose the process of an actor that has a node, and have it start: it does so while the log takes the actor,
        whose constructor has to wait for that. A head which takes over ends a process that the log does not explain. No
        process is started in vain as long as the log is silent; a shared one is no actor's own."""
        actor.starting = True
        if actor.options.get("process") == "shared" or not self.recorder.is_silent:
            self._worker_of(actor)
        else:
            actor.planned, actor.index = ids.new_process(), FIRST_INDEX

    async def _start(self, actor: ActorRecord) -> None:
        """Wait until the process of a new actor, which is planned and recorded, has started; on another node where its
        own is lost before. Its spawner does not know the process yet, so that nothing was constructed there.

        Raises:
            InsufficientResources: no process could be started, or no other node may be taken.
            Deposed: another head decides now.
        """
        while actor.state != "dead" and not await self._starts(actor):
            await self._plan_anew(actor)
        actor.starting = False

    async def _starts(self, actor: ActorRecord) -> bool:
        """Wait until the process of an actor has started. Returns False where its node is lost before."""
        node, loop = actor.node, self.process.loop
        assert node is not None
        worker = actor.worker or self._worker_of(actor)
        if worker.ready.done() and self._nodes.has(node):  # as a shared one mostly has
            await worker.started(self.process.config.spawn_timeout, actor.label)
            return True
        started = loop.create_task(worker.started(self.process.config.spawn_timeout, actor.label))
        removed = loop.create_task(node.removed.wait())
        try:
            await asyncio.wait((started, removed), return_when=asyncio.FIRST_COMPLETED)
            if self._nodes.has(node):
                started.result()
            return self._nodes.has(node) or actor.state == "dead"
        finally:
            for task in (started, removed):
                task.cancel()
            await asyncio.gather(started, removed, return_exceptions=True)

    async def _plan_anew(self, actor: ActorRecord) -> None:
        """Take another node for an actor, in the place of one that is lost."""
        lost, worker = actor.node, actor.worker
        assert lost is not None
        if actor.options.get("node") not in (None, "spread", "pack"):
            raise InsufficientResources(
                f"no process could be started for {actor.label}: {lost.label} cannot be reached"
            )
        logger.warning("%s is placed elsewhere, because %s cannot be reached", actor.label, lost.label)
        if worker is not None:
            worker.actors.pop(actor, None)
            actor.worker = None
        self._reservations.give_back(actor)
        await self._reservations.acquire(actor)
        if actor.state != "dead":
            self._plan(actor)
            await self.recorder.noted(actor_change(actor, "pending"))
