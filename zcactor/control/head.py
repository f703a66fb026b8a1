"""The head, the node agent of a cluster: places and supervises actors, knows their names, the nodes and their
resources.

It is an actor like any other (index 1 of its process), so every request to it is a call. Calls between actors and their
data do not pass through it. An embedded node's agent is the head of a cluster of one node. The head that others join is
a process without workers, whose end takes no actor with it: the agents of nodes (`zcactor.control.node_agent`), also of
the one on its host, start workers at its word.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from zcactor import ids
from zcactor.buggify import dawdle
from zcactor.control.actor_record import ActorRecord
from zcactor.control.actor_table import ActorTable
from zcactor.control.drain import decide_end, discard, discard_others, end_workers
from zcactor.control.draining import Draining
from zcactor.control.entries import actor_change, closed_change, gone_changes, stopping_changes
from zcactor.control.failover import Decisions, Failover
from zcactor.control.forcing import force, waited_for
from zcactor.control.handle_grants import HandleGrant, HandleGrants
from zcactor.control.head_log import Candidate, Deposed
from zcactor.control.heads import Heads
from zcactor.control.membership import Membership
from zcactor.control.node_table import NodeRecord, NodeTable
from zcactor.control.recipes import Recipes, is_at_hand, lack
from zcactor.control.recorder import HeadRecorder
from zcactor.control.reservations import Reservations
from zcactor.control.shortage import waits
from zcactor.errors import (
    ActorDied,
    ActorError,
    AuthenticationError,
    ConnectionLost,
    HeadUnavailable,
    InsufficientResources,
    NameTaken,
    NoSuchActor,
    ProtocolError,
    RemoteError,
    ZcactorError,
    remote_of,
)
from zcactor.exception_pickling import shown
from zcactor.execution.closing import OF_AN_END, TAKEN_IN
from zcactor.ids import ActorId, ProcessId
from zcactor.logs import logger
from zcactor.marshal.packed import Packed
from zcactor.options import ActorSpec, checked_name
from zcactor.process.cluster import HeadNews, HeadService, OwnNodeService, WorkerService
from zcactor.rpc.services import Services, calling_process
from zcactor.workers.output import Printers
from zcactor.workers.worker_table import FIRST_INDEX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence

    from zcactor.control.entries import Entries
    from zcactor.control.head_log import Change, HeadLog
    from zcactor.control.node_table import OwnWorkers
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["LAST_OUTPUT", "Console", "FirstAnswers", "Head", "restored", "watch"]

LAST_OUTPUT: Final = 2.0
"""Seconds that the drivers get at the end to show the rest of the output."""


class Console:
    """The console that passes lines on to programs.

    Args:
        process: the head's process.
    """

    def __init__(self, process: LocalProcess) -> None:
        self._process = process
        self._printers = Printers(self._show, process.tasks.start)
        self.has_log = True
        """Lines for programs that are gone go to the agent's own output. That of an embedded node has no reader."""

    def output(self, stream: str, worker: WorkerRecord, lines: list[str]) -> None:
        """Take the output of a worker on the head's node."""
        self.show(worker.driver, stream, f"({worker.label} pid={worker.pid}) ", lines)

    def show(self, driver: ProcessId, stream: str, prefix: str, lines: list[str]) -> None:
        """Show lines, each with `prefix` before it, at a program; in our own log when the program is gone."""
        session = self._process.sessions.used.get(driver)
        if session is not None and session.closed is None:
            if self._process.config.log_to_driver:
                self._printers.write(driver, stream, prefix, lines)
        elif self.has_log:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write("".join(f"{prefix}{line}\n" for line in lines))
            file.flush()

    async def _show(self, driver: ProcessId, stream: str, text: str) -> None:
        session = self._process.sessions.used.get(driver)
        if session is None or session.closed is not None:
            raise ConnectionLost("the driver is gone")
        await self._process.requests.ask(session, HeadNews.log, stream, text)

    def forget(self, driver: ProcessId) -> None:
        """Drop the waiting lines of a program that is gone."""
        self._printers.forget(driver)

    async def show_all(self, driver: ProcessId | None = None) -> None:
        """Wait until a program, or each, has shown all output, at most `LAST_OUTPUT` seconds."""
        try:
            async with asyncio.timeout(LAST_OUTPUT):
                await (self._printers.flush() if driver is None else self._printers.flush_one(driver))
        except TimeoutError:
            logger.debug("a driver did not show all output in time")


T = TypeVar("T")
_LASTING: Final = (ActorError, ValueError)
"""Errors that are answers. After any other, nothing was done, and a repeated request tries again."""


class FirstAnswers(Generic[T]):
    """The answers of one kind of request. Used on the loop's thread.

    Args:
        loop: on which the requests run.
        remembered: answers that are remembered; the oldest one is forgotten first.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, remembered: int = 2_000) -> None:
        self._loop = loop
        self._remembered = remembered
        self._asked: dict[bytes, asyncio.Future[T]] = {}
        self._settled: deque[bytes] = deque()

    async def once(self, request: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """The answer to a request: that of ``work()``, or the answer that the request had when it came first.

        Args:
            request: its id.
            work: called where the request is new, or its first attempt came to no answer.

        Raises:
            Exception: as `work` does. An error that is an answer is given again.

        Cancelling ends the attempt, or the wait for another one's. A cancelled attempt is no answer.
        """
        while (first := self._asked.get(request)) is not None:
            await asyncio.wait([first])
            if not first.cancelled():
                error = first.exception()
                if error is not None:
                    raise copy.copy(error)
                return first.result()
        answer = self._asked[request] = self._loop.create_future()
        try:
            outcome = await work()
        except _LASTING as error:
            # A copy, without a traceback: its frames would keep the request's arguments.
            answer.set_exception(copy.copy(error))
            answer.exception()  # retrieved: nobody may ask again
            self._remember(request)
            raise
        except BaseException:
            del self._asked[request]
            answer.cancel()
            raise
        answer.set_result(outcome)
        self._remember(request)
        return outcome

    def _remember(self, request: bytes) -> None:
        self._settled.append(request)
        if len(self._settled) > self._remembered:
            del self._asked[self._settled.popleft()]


_UNSEEN: Final = "its node has not reported to the cluster's new head yet"


def restored(entries: Entries) -> dict[ActorRecord, str]:
    """The actors of a log in the order of their spawns, each with its state in the log.

    Their own state is ``"pending"`` or ``"restarting"``, so that callers wait until it is known what became of them.
    A recipe that the earlier head alone has held is lost, and one that agents hold stays there; see
    `zcactor.control.recipes.Recipes`.
    """
    found: dict[ActorRecord, str] = {}
    for key, entry in sorted(entries.actors.items(), key=lambda item: item[1].number):
        actor = ActorRecord(
            entry.options, entry.class_name, entry.interface, ProcessId(entry.owner), entry.object_id,
            ActorId(bytes.fromhex(key)),
        )  # fmt: skip
        actor.asked, actor.restarts, actor.recorded = entry.request, entry.restarts, True
        actor.node_id, actor.gpus = entry.node, entry.gpus
        actor.location = (entry.worker, entry.index)
        if entry.recipe is not None:
            actor.recipe_holders = list(entry.recipe.holders)
            actor.recipe_nbytes, actor.recipe_key = entry.recipe.nbytes, entry.recipe.key
            payload = entries.recipes.get(key)
            actor.recipe = None if payload is None else Packed(payload, (), entry.recipe.flags)
        if entry.state != "pending":
            actor.set_state("restarting", _UNSEEN)
        found[actor] = entry.state
    return found


async def watch(actor: ActorRecord, process: LocalProcess, heartbeat: float, limit: float) -> None:
    """Ping the process of an actor through its present life.

    Args:
        actor: the actor, which is alive.
        process: the head's process.
        heartbeat: seconds between an answer and the next ping.
        limit: seconds without an answer until the process is killed.
    """
    life, worker = actor.restarts, actor.worker
    while (
        worker is not None
        and actor.worker is worker
        and actor.restarts == life
        and (actor.state == "alive" or actor.moving is not None)
    ):
        try:
            async with asyncio.timeout(limit):
                await process.requests.ask(await process.connections.connect(worker.process), Services.ping)
        except TimeoutError:
            logger.warning("%s has not responded for %g s and is killed (on_hang='kill')", actor.label, limit)
            worker.kill(f"its process did not respond for {limit:g} s and was killed (on_hang='kill')")
            return
        except ZcactorError:  # the process has ended, and the zygote reports it
            return
        await asyncio.sleep(heartbeat)


_LAST_RECORD = 1.0
"""Seconds that the log has at the end to take in that the cluster has ended in order."""


class Head(HeadService, OwnNodeService):
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

    end_report: float = 2.0
    """Seconds to wait for the report on a worker whose connection a caller has lost. The kernel needs milliseconds,
    and more for a process with much memory."""

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
        """See `OwnNodeService`."""
        found = self._nodes.worker(process)
        if found is not None and not found[1].ready.done():
            found[1].pid = pid
            self._nodes.addresses[process] = address
            found[1].ready.set_result(None)

    async def worker_broken(self, cause: str) -> None:
        """See `OwnNodeService`."""
        found = self._nodes.worker(calling_process())
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
        self, spec: dict[str, Any], class_name: str, interface: Any, recipe: Packed | None, request: bytes,
        actor_id: ActorId, object_id: int, spawner: bytes,
    ) -> tuple[Any, bool]:  # fmt: skip
        """See `HeadService`."""
        asked = ids.SpawnIds(request, actor_id, object_id)
        owner = self._asking(spawner)
        wanted = ActorSpec.from_plain(spec)
        reserve = functools.partial(self._reserve, wanted, class_name, interface, recipe, asked, owner)
        actor, existed = await self._answers.once(owner + request, reserve)
        return HandleGrant(self.grants, actor), existed

    async def _reserve(
        self, spec: ActorSpec, class_name: str, interface: Any, recipe: Packed | None, asked: ids.SpawnIds,
        owner: ProcessId,
    ) -> tuple[ActorRecord, bool]:  # fmt: skip
        await self.members.some_node()
        await self.members.taken_over()
        known = self._actors.answered(asked.actor, asked.object_id, owner)
        if known is not None:
            if known.state == "pending" and known.worker is not None:  # it was placed by an earlier head
                await known.worker.started(self.process.config.spawn_timeout, known.label)
            return known, False
        existing = self._actors.holder_of(spec.namespace, spec.name)
        if existing is not None:
            if not spec.get_if_exists:
                raise NameTaken(
                    f"an actor named {existing.name!r} lives in namespace {existing.namespace!r} already; stop it, "
                    "choose another name, or pass get_if_exists=True to get its handle"
                )
            await existing.settled()
            if existing.state == "alive":
                return existing, True
            return await self._reserve(spec, class_name, interface, recipe, asked, owner)
        if self.closing:
            raise ConnectionLost("the node is shutting down")
        self._nodes.check(spec.node, shown(class_name))
        actor = ActorRecord(spec, class_name, interface, owner, asked.object_id, asked.actor)
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
        """See `HeadService`."""
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
        if actor.spec.on_hang == "kill":
            self.process.tasks.start(watch(actor, self.process, self._heartbeat, self._hang_after))

    # ---------------------------------------------------------------- an earlier head's cluster

    def take_over(self, entries: Entries) -> Failover:
        """Go on with the cluster of an earlier head, before anybody is answered. The caller runs `Failover.finish`."""
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
        taking = Failover(self.process.loop, decisions, self._nodes, actors, members, drivers)
        self.members.taking_over = taking
        self.recipes.take_over(actors, taking.done)
        return taking

    async def give_way(self, epoch: int) -> bool:
        """See `HeadService`."""
        return epoch == self.recorder.epoch and await self.resign()

    async def force(self) -> list[str]:
        """See `HeadService`."""
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
            made = (actor.index, actor.actor_id, actor.object_id, turn, actor.spec.plain(), declared.wire(), recipe)
            await self.recorder.order(self.process.requests, session, WorkerService.create, *made)
            await actor.decided()
            if actor.restarts == turn and actor.state == "restarting":
                await self.recorder.noted(actor_change(actor, "alive"))
        except Deposed:
            return
        except RemoteError as error:
            remote = remote_of(error)
            failure = f"its constructor raised {remote.type_name} when it was restarted: {remote.message}"
        except (ConnectionLost, InsufficientResources, ProtocolError) as error:
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
        """See `HeadService`."""
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

    # ---------------------------------------------------------------- questions, which change nothing

    async def leader(self) -> dict[str, Any]:
        """See `HeadService`."""
        facts, leader_lease = self._facts, self.members.leader_lease
        state = "taking over" if self.members.is_taking_over else "leading"
        if leader_lease is not None and not leader_lease.in_term:
            state = "adrift"
        waits_for = waited_for(self.members)
        return {
            "address": facts["address"].rpartition("@")[2], "pid": facts["pid"], "epoch": self.recorder.epoch,
            "log": self.members.log, "state": state,
            "standbys": self.heads.standbys, **({"waits_for": waits_for} if waits_for else {}),
        }  # fmt: skip

    async def stay(self, epoch: int) -> tuple[int, float | None]:
        """See `HeadService`."""
        recorder, leader_lease = self.recorder, self.members.leader_lease
        if epoch > recorder.epoch:
            recorder.depose(epoch)
        age = 0.0 if leader_lease is None else leader_lease.age()
        return recorder.epoch, None if recorder.is_deposed else age

    async def locate(self, actor_id: ActorId, calls_wait: bool) -> tuple[str, bytes, int, str]:
        """See `HeadService`."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return "dead", b"", 0, "it is unknown to its node"
        if calls_wait and actor.state == "alive" and actor.worker is not None:
            # The caller lost its connection: most likely the process has just ended, and the zygote is about to report
            # it.
            await asyncio.wait([actor.worker.ended], timeout=self.end_report)
        while actor.state == "pending" or (actor.state == "restarting" and not calls_wait):
            await actor.changed()
        if actor.state == "dead":
            await self.recorder.noted()
        return actor.state, *actor.location, actor.cause

    async def get_actor(self, name: str, namespace: str) -> Any:
        """See `HeadService`."""
        name, namespace = checked_name("the name of an actor", name), checked_name("the namespace", namespace)
        await self.recorder.settled()
        actor = self._actors.named(namespace, name)
        await actor.settled()
        if actor.state == "dead":
            raise NoSuchActor(f"the actor named {name!r} in namespace {namespace!r} has just died: {actor.cause}")
        return HandleGrant(self.grants, actor)

    async def nodes(self) -> list[dict[str, Any]]:
        """See `HeadService`."""
        return self._nodes.told()

    async def actors(self) -> list[dict[str, Any]]:
        """See `HeadService`."""
        return self._actors.told()

    async def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """See `HeadService`."""
        return self._ledger.total(), self._ledger.free()

    async def process_of(self, actor_id: ActorId) -> bytes:
        """See `HeadService`."""
        state, process, _, cause = await self.locate(actor_id, False)
        if state == "dead":
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is dead: {cause}")
        return process

    async def waits(self, class_name: str, spawner: bytes) -> str:
        """See `HeadService`."""
        owner, name = self._asking(spawner), shown(class_name)
        pending = [
            actor for actor in self._actors.made_by(owner)
            if actor.state == "pending" and actor.class_name == name and not actor.told
        ]  # fmt: skip
        for actor in pending:
            actor.told = True
        return waits(pending, self._ledger, self._actors.all())

    def _asking(self, worker: bytes) -> ProcessId:
        """The process for which the present call is made: the caller, or `worker`, when its node's agent is the caller.

        Raises:
            AuthenticationError: `worker` belongs to a node with another agent.
        """
        asking = calling_process()
        if not worker:
            return asking
        named = ids.ProcessId(worker)
        node = self._nodes.host_of(named)
        if node is None or node.process != asking:
            raise AuthenticationError(f"process {worker.hex()} is no worker of the node whose agent has asked for it")
        return named

    # ---------------------------------------------------------------- ends of actors

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
                await self.process.requests.ask(session, WorkerService.leave, grace)
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

    async def _to_end(self, actor_id: ActorId) -> ActorRecord:
        """An actor that a request ends, once a head that takes over knows what has become of it."""
        actor = self._actors.known(actor_id)
        if self.members.taking_over is not None:
            await self.members.taking_over.settled(actor)
        return actor

    async def kill(self, actor_id: ActorId) -> None:
        """See `HeadService`."""
        actor = await self._to_end(actor_id)
        await self._decide_end(actor, gone_changes(actor), lambda: self._retire(actor, "it was killed by zc.kill"))
        if actor.gone is not None:
            await asyncio.shield(actor.gone)

    async def stop(self, actor_id: ActorId) -> None:
        """See `HeadService`."""
        actor = await self._to_end(actor_id)
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
                await self.recorder.order(self.process.requests, session, WorkerService.stop, actor.index, seconds)
                closed = True
            except Deposed:
                return
            except (ConnectionLost, ProtocolError, RemoteError) as error:
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

    # ---------------------------------------------------------------- places

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
        worker = self._nodes.worker_for(actor.node, label, actor.spec, root, actor.gpus, actor.planned)
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
        if actor.spec.process == "shared" or not self.recorder.is_silent:
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
        if actor.spec.node not in (None, "spread", "pack"):
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


def _has_not_started(actor: ActorRecord) -> bool:
    """Whether the process of an actor has ended before it had started."""
    return actor.worker is not None and actor.worker.ready.exception() is not None


async def _stays() -> bool:
    return False
