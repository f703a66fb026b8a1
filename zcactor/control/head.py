"""The head, the node agent of a cluster: places and supervises actors, knows their names, the nodes and their
resources.

It is an actor like any other (index 1 of its process), so every request to it is a call. Calls between actors and their
data do not pass through it. An embedded node's agent is the head of a cluster of one node. The head that others join is
a process without workers, whose end takes no actor with it: the agents of nodes (`zcactor.control.node_agent`), also of
the one on its host, start workers at its word.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.buggify import dawdle
from zcactor.control.actor_record import ActorRecord
from zcactor.control.actor_table import ActorTable
from zcactor.control.console import Console
from zcactor.control.drain import end_workers
from zcactor.control.draining import Draining
from zcactor.control.entries import actor_change, closed_change
from zcactor.control.first_answers import FirstAnswers
from zcactor.control.forcing import force
from zcactor.control.handle_grants import HandleGrant, HandleGrants
from zcactor.control.hanging import watch
from zcactor.control.head_log import Candidate, Deposed
from zcactor.control.heads import Heads
from zcactor.control.membership import Membership
from zcactor.control.node_table import NodeRecord, NodeTable
from zcactor.control.placing import Placing
from zcactor.control.recipes import Recipes, is_at_hand, lack
from zcactor.control.recorder import HeadRecorder
from zcactor.control.reservations import Reservations
from zcactor.control.restoring import restored
from zcactor.control.take_over import Decisions, TakeOver
from zcactor.errors import (
    ActorDied,
    ConnectionLost,
    HeadUnavailable,
    InsufficientResources,
    NameTaken,
    RemoteError,
    ZcactorError,
    remote_of,
)
from zcactor.execution.actor_runner import current_call
from zcactor.execution.closing import OF_AN_END
from zcactor.ids import ProcessId
from zcactor.interface import Interface, shown
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence

    from zcactor.control.entries import Entries
    from zcactor.control.head_log import HeadLog
    from zcactor.control.node_table import OwnWorkers
    from zcactor.ids import ActorId
    from zcactor.marshal.packed import Packed
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["Head", "agent_interface"]

_LAST_RECORD = 1.0
"""Seconds that the log has at the end to take in that the cluster has ended in order."""


class Head(Placing):
    """The actor that places actors. Its callers are drivers, workers and the agents of other nodes.

    Args:
        process: the head's process.
        exports: the promises of the process; held actors are listed among them.
        pool: starts workers on its node; None where the head is no node's agent.
        facts: the facts about its process, and its node; see `zcactor.control.node_table.facts_of`.
        total: its node's resources.
        log: takes its decisions, before it acts on them.
        heartbeat: seconds between two pings of another node, and of an actor with ``on_hang="kill"``.
        hang_after: seconds without an answer after which either counts as hung.

    Attributes:
        driver: the process id of the program to which an embedded node belongs, and with which it ends; empty for a
            cluster.
    """

    def __init__(
        self, process: LocalProcess, exports: MutableMapping[int, Any], pool: OwnWorkers | None,
        facts: Mapping[str, Any], total: Mapping[str, float], log: HeadLog, heartbeat: float = 1.0,
        hang_after: float = 10.0,
    ) -> None:  # fmt: skip
        self.process = process
        self._pool = pool
        self._facts = facts
        own = None if pool is None else NodeRecord(ids.ProcessId(process.process), pool, facts)
        self._nodes = NodeTable(own, total, facts["machine"])
        self._ledger = self._nodes.ledger
        me = Candidate(facts["address"], facts["host"], facts["pid"])
        self.recorder = HeadRecorder(process.loop, log, me)
        self._reservations = Reservations(process.loop, self._nodes)
        self.recipes = Recipes(process, self.recorder, self._nodes)
        self._actors = ActorTable[ActorRecord]()
        self.console = Console(process)
        self.heads = Heads(process, self._nodes)
        self.members = Membership(self, self._nodes, self.console, heartbeat, hang_after)
        self.grants = HandleGrants(process, exports, self._nodes.addresses, self._actors, self._unheld, self.recorder)
        self.draining = Draining(
            process, self.recorder, self._nodes, self._reservations, self._actors.all, self._restart, self.end_owned,
            self.members, self.console.show,
        )  # fmt: skip
        self._answers = FirstAnswers[tuple[ActorRecord, bool]](process.loop)
        self._heartbeat = heartbeat
        self._hang_after = hang_after
        self.closing, self.driver = False, b""
        self.resign: Callable[[], Awaitable[bool]] = _stays
        """Ends this head where another one stands by, and returns whether that is so."""
        self._ending: asyncio.Task[None] | None = None
        self.finished: asyncio.Future[None] = process.loop.create_future()

    # ---------------------------------------------------------------- workers

    async def worker_ready(self, process: ProcessId, pid: int, address: str) -> None:
        """Note that a worker has started and listens, at `address` for peers of other hosts."""
        found = self._nodes.worker(process)
        if found is not None and not found[1].ready.done():
            found[1].pid = pid
            self._nodes.addresses[process] = address
            found[1].ready.set_result(None)

    async def worker_broken(self, cause: str) -> None:
        """End the calling worker, a process of this node which asks for it because it cannot go on.

        Args:
            cause: the cause of its end, for its actors' callers.
        """
        found = self._nodes.worker(current_call.get().session.peer_process)
        if found is not None:
            found[1].kill(cause)

    def worker_ended(self, record: WorkerRecord) -> None:
        """Note the end of a worker's process, as its node's pool reports it."""
        self._nodes.forget(record)
        cause = record.ended.result()
        for actor in list(record.actors):
            self._actor_lost(actor, cause)
        self.end_owned(record.process)

    def session_lost(self, session: Session) -> None:
        peer = ids.ProcessId(session.peer_process)
        self.console.forget(peer)
        if self.process.sessions.used.get(peer) is not None:  # another connection to that process is open
            return
        self.members.session_lost(session)
        if self.closing:
            return
        if peer == self.driver:
            self.process.tasks.start(self.shutdown(0.0))
        found = self._nodes.worker(peer)
        if found is not None and not found[1].leaving:
            found[1].kill()  # the worker has ended, or cannot be reached; its node reports its end

    def stop_owned(self, driver: ProcessId, grace: float) -> list[asyncio.Task[None]]:
        """Begin to stop the actors that were made for a program that is about to go, in `grace` seconds. Returns the
        tasks that stop them."""
        ending = []
        makers = [driver, *(process for process in self._nodes.workers_for(driver) if self._nodes.worker(process))]
        for actor in self._actors.made_by(*makers):
            if actor.state == "alive" and not actor.detached:
                self._begin_stop(actor, "its program has ended", seconds=grace * OF_AN_END)
                if actor.ending is not None:
                    ending.append(actor.ending)
        return ending

    def end_owned(self, owner: ProcessId) -> None:
        """Retire the actors that the process `owner` made, because it has ended."""
        for actor in self._actors.made_by(owner):
            # A detached actor outlives its spawner, but a spawn that is not finished does not: no process is left to
            # construct it.
            if actor.state == "pending" or not actor.detached:
                self._retire(actor, "its owner's process ended")

    # ---------------------------------------------------------------- spawning

    async def reserve(
        self, options: dict[str, Any], class_name: str, interface: Any, recipe: Packed | None, request: bytes,
        actor_id: ActorId, object_id: int, spawner: bytes = b"",
    ) -> tuple[Any, bool]:  # fmt: skip
        """Reserve an actor's name, its resources and its process. A repeated request gets the first one's answer.

        Args:
            options: of the actor.
            class_name: of its class.
            interface: the result of `Interface.wire`.
            recipe: its class and arguments, of an actor that may restart.
            request, actor_id, object_id: the ids that the spawner has made; see `zcactor.ids.SpawnIds`.
            spawner: the asking worker, when its node's agent asks for it.

        Returns:
            The handle; whether the actor existed already (``get_if_exists``). The caller constructs a new actor in the
            worker, and reports that by `constructed`.

        Raises:
            NameTaken: another actor has the name.
            ActorDied: the actor has ended meanwhile.
            InsufficientResources: the request fits into no node, or no process could be started.
            ConnectionLost: the node is shutting down.
            HeadUnavailable: the head's log does not take the actor.
            ValueError: the node is unknown, or another actor has one of the ids.
        """
        asked = ids.SpawnIds(request, actor_id, object_id)
        owner = self._asking(spawner)
        reserve = functools.partial(self._reserve, options, class_name, interface, recipe, asked, owner)
        actor, existed = await self._answers.once(owner + request, reserve)
        return HandleGrant(self.grants, actor), existed

    async def _reserve(
        self, options: dict[str, Any], class_name: str, interface: Any, recipe: Packed | None, asked: ids.SpawnIds,
        owner: ProcessId,
    ) -> tuple[ActorRecord, bool]:  # fmt: skip
        await self.members.some_node()
        await self.members.taken_over()
        known = self._actors.answered(asked.actor, asked.object_id, owner)
        if known is not None:
            if known.state == "pending" and known.worker is not None:  # it was placed by an earlier head
                await known.worker.started(self.process.config.spawn_timeout, known.label)
            return known, False
        existing = self._actors.holder_of(options["namespace"], options.get("name"))
        if existing is not None:
            if not options.get("get_if_exists"):
                raise NameTaken(
                    f"an actor named {existing.name!r} lives in namespace {existing.namespace!r} already; stop it, "
                    "choose another name, or pass get_if_exists=True to get its handle"
                )
            await existing.settled()
            if existing.state == "alive":
                return existing, True
            return await self._reserve(options, class_name, interface, recipe, asked, owner)
        if self.closing:
            raise ConnectionLost("the node is shutting down")
        self._nodes.check(options.get("node"), shown(class_name))
        actor = ActorRecord(options, class_name, interface, owner, asked.object_id, asked.actor)
        actor.recipe, actor.asked = recipe, asked.request
        self._actors.add(actor)
        in_doubt = False
        try:
            await self._reservations.acquire(actor)
            self._plan(actor)
            changes = await self.recipes.reserve(actor)
            if actor.state == "dead":  # its maker has ended meanwhile
                raise ActorDied(actor.label, actor.cause, False)
            actor.recorded = True
            timeout = self.process.config.head_timeout
            in_doubt = not await self.recorder.record_within(timeout, *changes)
            if in_doubt:
                raise HeadUnavailable(self.members.log, timeout)
            await self._start(actor)
            if actor.state == "dead":
                raise ActorDied(actor.label, actor.cause, False)
        except BaseException as error:
            actor.withdrawn = isinstance(error, asyncio.CancelledError)
            actor.recorded = actor.recorded and (in_doubt or not isinstance(error, HeadUnavailable))
            self._retire(actor, f"it could not be placed: {str(error) or type(error).__name__}")
            raise
        return actor, False

    async def constructed(self, actor_id: ActorId, failure: str | None) -> None:
        """Note that the constructor has returned. `failure` is the cause where the actor could not be constructed,
        empty when its process was lost. A repeated report changes nothing.

        Raises:
            ActorDied: it was constructed, and its process has ended before that was recorded, or a head that has taken
                the cluster over had given the spawn up.
            HeadUnavailable: the head's log does not take that the actor lives. The spawner gives it up.
        """
        await dawdle("constructed")
        if failure is None:  # a take-over decides first whether the process is still there
            await self.members.taken_over()
        actor = self._actors.get(actor_id)
        if failure is None and (actor is None or (actor.state == "dead" and actor.withdrawn)):
            label = f"actor {actor_id.hex()[:8]}" if actor is None else actor.label
            raise ActorDied(label, "the cluster's head does not know it" if actor is None else actor.cause, True)
        if failure is None:
            if actor is not None and actor.state == "pending":  # not so where the report is repeated
                timeout = self.process.config.head_timeout
                if not await self.recorder.record_within(timeout, actor_change(actor, "alive")):
                    raise HeadUnavailable(self.members.log, timeout)
                if actor.state == "dead":
                    raise ActorDied(actor.label, actor.cause, True)
                if actor.state == "pending":
                    self._alive(actor)
            return
        if actor is not None and actor.state != "dead":
            if not failure and actor.worker is not None:
                await asyncio.wait([actor.worker.ended], timeout=self.end_report)
            self._retire(actor, failure or "its process could not be reached")
        # Its spawner reports it once, and a head that has not recorded it may be killed.
        await self.recorder.noted()

    def _alive(self, actor: ActorRecord) -> None:
        if actor.worker is not None:
            actor.location = (actor.worker.process, actor.index)
        actor.note_life(self.process.loop.time())
        actor.set_state("alive")
        self.recipes.lives(actor)
        if actor.displaced:
            actor.displaced = False
            if not self.closing:
                self.grants.tell_holders(actor)
        if actor.options.get("on_hang") == "kill":
            self.process.tasks.start(watch(actor, self.process, self._heartbeat, self._hang_after))

    # ---------------------------------------------------------------- an earlier head's cluster

    def take_over(self, entries: Entries) -> TakeOver:
        """Go on with the cluster of an earlier head, before anybody is answered. The caller runs `TakeOver.finish`."""
        decisions = Decisions(
            self._alive, self._actor_lost,
            lambda actor, ends: self.process.tasks.start(self._restart_after(actor, ends)),
            lambda actor: self._begin_stop(actor, "it was being stopped", decided=True),
            self._retire, self._discard_others, self.end_owned, self._unheld, self.members.forget,
        )  # fmt: skip
        actors = restored(entries)
        for actor in actors:
            self._actors.add(actor)
        members = {ProcessId(bytes.fromhex(key)): entry.facts for key, entry in entries.members.items()}
        drivers = [ProcessId(bytes.fromhex(key)) for key in entries.drivers]
        taking = TakeOver(self.process.loop, decisions, self._nodes, actors, members, drivers)
        self.members.taking_over = taking
        self.recipes.take_over(actors, taking.done)
        return taking

    async def give_way(self, epoch: int) -> bool:
        """End this head where its term has that epoch and another head stands by, which leads then. Returns whether
        that is so, unless the answer is lost with this head: a later one returns False."""
        return epoch == self.recorder.epoch and await self.resign()

    async def force(self) -> list[str]:
        """Have this head act that waits for nodes; see `zcactor.control.forcing.force`."""
        return await force(self.members)

    # ---------------------------------------------------------------- ends and restarts

    def _actor_lost(self, actor: ActorRecord, cause: str) -> None:
        """Restart or bury an actor whose process has ended."""
        if actor.state == "dead":
            return
        if actor.worker is not None:
            actor.worker.actors.pop(actor, None)
        if actor.starting and not self.closing and (not self._nodes.has(actor.node) or _has_not_started(actor)):
            return  # it is placed on another node, or its spawn fails
        actor.displaced = actor.node is not None and not self._nodes.has(actor.node)
        if self.closing or not actor.may_restart(is_held=is_at_hand(actor, self._nodes)):
            lacks = lack(actor, self._nodes)
            cause = cause.removesuffix(lacks) + lacks
            stopped = actor.ending is not None or actor.doomed
            self._bury(actor, f"{cause} while it was being stopped" if stopped else cause)
            return
        delay = actor.note_death(self.process.loop.time())
        if delay is None:
            self._bury(actor, f"{cause}; each time before its constructor had returned, so it is not restarted again")
            return
        actor.restarts += 1
        cause = f"{cause}; it is being restarted, after a pause of {delay:g} s"
        logger.warning("%s: %s", actor.label, cause)
        actor.set_state("restarting", cause)
        self.recorder.note(actor_change(actor, "restarting"))
        if actor.displaced:
            self.grants.tell_holders(actor)
        self.process.tasks.start(self._restart(actor, actor.restarts, delay))

    async def _restart_after(self, actor: ActorRecord, ends: Sequence[asyncio.Future[Any]]) -> None:
        """Start the actor again when nothing lives any more that it may be."""
        if ends:
            await asyncio.wait(ends)
        await self._restart(actor, actor.restarts, 0.0)

    async def _restart(self, actor: ActorRecord, turn: int, delay: float) -> None:
        """Start the actor again, for the `turn`-th time."""
        failure = None
        try:
            await self.recorder.noted()
            await asyncio.sleep(delay)
            if actor.restarts != turn or actor.state != "restarting":
                return
            if not self._nodes.has(actor.node) or self.draining.is_drained(actor.node):
                self._reservations.give_back(actor)
                await self._reservations.acquire(actor)
                await actor.decided()
                if actor.state == "restarting":
                    await self.recorder.noted(actor_change(actor, "restarting"))
                if actor.restarts != turn or actor.state != "restarting":
                    return
            recipe = await self.recipes.get(actor)
            if actor.restarts != turn or actor.state != "restarting":
                return
            worker = await self._worker_for(actor)
            session = await self.process.connections.connect(worker.process)
            if actor.restarts != turn or actor.state != "restarting":
                return
            declared = actor.interface
            assert declared is not None  # as the actor is not dead
            made = (actor.index, actor.actor_id, actor.object_id, turn, actor.options, declared.wire(), recipe)
            await self.recorder.order(self.process.requests, session, "create", *made)
            await actor.decided()
            if actor.restarts == turn and actor.state == "restarting":
                await self.recorder.noted(actor_change(actor, "alive"))
        except Deposed:
            return
        except RemoteError as error:
            remote = remote_of(error)
            failure = f"its constructor raised {remote.type_name} when it was restarted: {remote.message}"
        except (ConnectionLost, InsufficientResources) as error:
            if actor.worker is not None and not actor.worker.ended.done() and actor.restarts == turn:
                actor.worker.kill()
            if actor.worker is not None and actor in actor.worker.actors:
                return  # the worker is about to end, and `_actor_lost` decides the rest
            failure = f"it could not be restarted: {error}"
        except ZcactorError as error:
            failure = f"it could not be restarted: {error}"
        if actor.restarts != turn or actor.state != "restarting":
            return  # the actor was killed or lost meanwhile
        if failure is None:
            self._alive(actor)
        else:
            self._retire(actor, failure)

    # ---------------------------------------------------------------- the end

    def output(self, stream: str, worker: WorkerRecord, lines: list[str]) -> None:
        """Take the output of a worker on this node."""
        self.console.output(stream, worker, lines)

    async def shutdown(self, grace: float) -> None:
        """End every actor and then the node, within `grace` seconds. An embedded node's actors are stopped in order, as
        those of a program that leaves a cluster are. Otherwise idle actors are closed, and actors with running calls
        are killed. Cancelling ends only the wait; a second call without grace ends the first one's grace."""
        if self._ending is None:
            self.closing = not (self.driver and grace > 0)
            self._ending = self.process.loop.create_task(self._shutdown(grace))
        elif grace <= 0:  # the driver died while it waited for an orderly end
            self.closing = True
            self.members.tell_end(0.0)
            if self._pool is not None:
                self._pool.kill_all("the node was shut down")
        await asyncio.shield(self._ending)

    async def _shutdown(self, grace: float) -> None:
        orderly = grace > 0
        if not self.closing:
            grace = await self._stop_all(grace)
            self.closing = True
        try:
            async with asyncio.timeout(_LAST_RECORD):
                await self.recorder.record(closed_change())
        except (TimeoutError, HeadUnavailable, Deposed) as error:
            logger.warning("the head's log was not told that the cluster has ended: %s", str(error) or "it is silent")
        await asyncio.gather(self.members.end(grace), self._end_workers(grace))
        if orderly:
            await self.console.show_all()
        self.process.loop.call_soon(self.finish)

    async def _stop_all(self, grace: float) -> float:
        """Stop every actor in order, within `grace` seconds. Returns those that are left."""
        until = self.process.loop.time() + grace
        for actor in self._actors.all():
            if actor.state == "alive":
                self._begin_stop(actor, "its program has ended", seconds=grace * OF_AN_END)
        ending = [actor.ending for actor in self._actors.all() if actor.ending is not None and not actor.ending.done()]
        if ending:
            await asyncio.wait(ending, timeout=grace)
        return max(until - self.process.loop.time(), 0.0)

    async def _end_workers(self, grace: float) -> None:
        if self._pool is not None:
            cause = "the node was shut down"
            await end_workers(self.process.sessions, self.process.requests, self._pool, grace, cause)

    def zygote_lost(self) -> None:
        """End the node: its workers have ended with the zygote, and no further worker can be started."""
        self.closing = True
        self.process.loop.call_soon(self.finish)

    def finish(self) -> None:
        """End the agent's process."""
        if not self.finished.done():
            self.finished.set_result(None)


def _has_not_started(actor: ActorRecord) -> bool:
    """Whether the process of an actor has ended before it had started."""
    return actor.worker is not None and actor.worker.ready.exception() is not None


async def _stays() -> bool:
    return False


@functools.cache
def agent_interface() -> Interface:
    """The interface of the head."""
    return Interface.of(Head)
