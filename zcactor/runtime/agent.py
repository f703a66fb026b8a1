"""The node agent that is the head: places and supervises actors, knows their names, the nodes and what they have.

It is an actor like any other (index 1 of its process), so every request to it is a call. It is not on the path of calls
between actors or of data. An embedded node's agent is the head of a cluster of one; the agents of further nodes
(`zcactor.runtime.member`) start workers at its word.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import sys
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.buggify import dawdle
from zcactor.errors import (
    ActorDied,
    ConnectionLost,
    InsufficientResources,
    NameTaken,
    NoSuchActor,
    RemoteError,
    ZcactorError,
)
from zcactor.handle import RemoteActor, describe
from zcactor.interface import Interface, shown
from zcactor.marshal.values import Code, registered
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part
from zcactor.runtime.host import current_call
from zcactor.runtime.leaving import end_workers
from zcactor.runtime.membership import Membership
from zcactor.runtime.nodes import NodeRecord, Nodes
from zcactor.runtime.output import Printers
from zcactor.runtime.records import ActorRecord, ActorToken

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from zcactor.context import Runtime
    from zcactor.marshal.sealed import Sealed
    from zcactor.rpc.session import Session
    from zcactor.runtime.nodes import OwnWorkers
    from zcactor.runtime.pool import WorkerRecord

__all__ = ["NodeAgent", "agent_interface"]

logger = logging.getLogger("zcactor")
END_REPORT = 2.0
"""Seconds to wait for the zygote's word on a worker whose connection a caller has lost: normally a few milliseconds,
but the kernel may take its time over a process with much memory."""
LAST_OUTPUT = 2.0
"""Seconds that the driver gets at the end to show what was printed."""
_NAMED = 3
"""Actors that a line names."""
_REMEMBERED = 2_000
"""Dead actors whose cause of death is remembered."""


class _Grant:
    """A handle on its way out of the agent."""

    __slots__ = ("agent", "record")

    def __init__(self, agent: NodeAgent, record: ActorRecord) -> None:
        self.agent = agent
        self.record = record


def _lower_grant(packing: Any, grant: _Grant) -> bytes:
    record, process = grant.record, grant.agent.process
    if record.worker is None or record.interface is None:
        raise ActorDied(record.label, record.cause, False)
    remote = RemoteActor(
        process, record.actor_id, record.interface, (record.worker.process, record.index), record.name,
        record.namespace, record.options.get("max_pending_calls") or process.config.max_pending_calls,
        record.options.get("max_retries") or 0,
    )  # fmt: skip
    return describe(remote, packing.add(Part(RegionKind.ACTOR, grant.agent.token_of(record), 0, 0)))


registered[_Grant] = (Code.ACTOR, _lower_grant)


class NodeAgent:
    """The actor that places actors. Its callers are drivers, workers and the agents of other nodes.

    Args:
        process: the agent's own.
        exports: its promises, among which actors are for those who hold them.
        pool: starts workers on its node.
        facts: what it tells of its node; see `zcactor.runtime.nodes.facts_of`.
        total: its node's resources.
        heartbeat: seconds between two pings of another node, and of an actor with ``on_hang="kill"``.
        hang_after: seconds without an answer until either counts as hung.

    Attributes:
        driver: the program whose embedded node this is, and with which it ends; empty for a cluster's.
    """

    def __init__(
        self, process: Runtime, exports: MutableMapping[int, Any], pool: OwnWorkers, facts: Mapping[str, Any],
        total: Mapping[str, float], heartbeat: float = 1.0, hang_after: float = 10.0,
    ) -> None:  # fmt: skip
        self.process = process
        self._exports = exports
        self._pool = pool
        self._nodes = Nodes(NodeRecord(process.process, pool, facts), total)
        self._ledger = self._nodes.ledger
        self.members = Membership(self, self._nodes, heartbeat, hang_after)
        self._actors: dict[bytes, ActorRecord] = {}
        self._dead: deque[bytes] = deque()
        self._by_object: dict[int, ActorRecord] = {}
        self._names: dict[tuple[str, str], ActorRecord] = {}
        self._next_object = 1
        self._heartbeat = heartbeat
        self._hang_after = hang_after
        self.closing = False
        self._ending: asyncio.Task[None] | None = None
        self._printers = Printers(self._show, process.tasks.start)
        self.driver: bytes = b""
        self.finished: asyncio.Future[None] = process.loop.create_future()

    # ---------------------------------------------------------------- workers

    async def worker_ready(self, process: bytes, pid: int, address: str) -> None:
        """A worker has started and listens, at `address` for peers of other hosts."""
        found = self._nodes.worker(process)
        if found is not None and not found[1].ready.done():
            found[1].pid = pid
            self._nodes.addresses[process] = address
            found[1].ready.set_result(None)

    def worker_ended(self, record: WorkerRecord) -> None:
        """A worker's process is gone (from the pool of its node)."""
        self._nodes.addresses.pop(record.process, None)
        self._nodes.unshare(record)
        cause = record.ended.result()
        for actor in list(record.actors):
            self._actor_lost(actor, cause)
        self.end_owned(record.process)

    def session_lost(self, session: Session) -> None:
        peer = session.peer_process
        self._printers.forget(peer)
        if self.process.sessions.used.get(peer) is not None:  # there is another connection to it
            return
        self.members.session_lost(session)
        if self.closing:
            return
        if peer == self.driver:
            self.process.tasks.start(self.shutdown(0.0))
        found = self._nodes.worker(peer)
        if found is not None and not found[1].leaving:
            found[1].kill()  # it has ended, or cannot be reached any more; its node reports its end

    def stop_owned(self, driver: bytes) -> list[asyncio.Task[None]]:
        """Begin to stop what was made for a program that is about to go. Returns the tasks that do."""
        ending = []
        for actor in list(self._actors.values()):
            if self._root(actor) == driver and actor.state == "alive" and not actor.detached:
                self._begin_stop(actor, "its program has ended")
                if actor.ending is not None:
                    ending.append(actor.ending)
        return ending

    def end_owned(self, owner: bytes) -> None:
        """The process `owner` has ended, and with it the actors that it made."""
        for actor in list(self._actors.values()):
            # A detached actor outlives its spawner, but not the spawning: nobody is left to construct it.
            if actor.owner == owner and actor.state != "dead" and (actor.state == "pending" or not actor.detached):
                self._retire(actor, "its owner's process ended")

    async def _worker_for(self, actor: ActorRecord) -> WorkerRecord:
        label = actor.class_name if actor.name is None else f"{actor.class_name} {shown(actor.name)}"
        assert actor.node is not None
        worker = self._nodes.worker_for(actor.node, label, actor.options, self._root(actor))
        actor.worker = worker
        actor.index = worker.take_index()
        worker.actors[actor] = None
        limit = self.process.config.spawn_timeout
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(worker.ready)
        except TimeoutError:
            cause = f"it did not start within {limit:g} s (spawn_timeout)"
            worker.kill(cause)
            raise InsufficientResources(f"no process could be started for {actor.label}: {cause}") from None
        except RuntimeError as error:
            raise InsufficientResources(f"no process could be started for {actor.label}: {error}") from error
        return worker

    # ---------------------------------------------------------------- spawning

    async def reserve(
        self, options: dict[str, Any], class_name: str, interface: Any, recipe: Sealed | None
    ) -> tuple[Any, bool, int]:
        """Find room for an actor: its name, its resources, a process.

        Returns:
            The handle; whether the actor existed already (``get_if_exists``); its object id. A new actor is constructed
            by the caller, in the worker, and then reported by `constructed`.
        """
        key = (options["namespace"], options.get("name"))
        existing = self._names.get(key) if key[1] is not None else None  # type: ignore[arg-type]
        if existing is not None:
            if not options.get("get_if_exists"):
                raise NameTaken(
                    f"an actor named {key[1]!r} lives in namespace {key[0]!r} already; stop it, choose another name, "
                    "or pass get_if_exists=True to get its handle"
                )
            await existing.settled()
            if existing.state == "alive":
                return _Grant(self, existing), True, existing.object_id
            return await self.reserve(options, class_name, interface, recipe)
        if self.closing:
            raise ConnectionLost("the node is shutting down")
        self._nodes.check(options.get("node"), shown(class_name))
        self._next_object += 1
        object_id = self._next_object << 32 | ids.bits(32)
        owner = current_call.get().session.peer_process
        actor = ActorRecord(options, class_name, interface, owner, object_id)
        actor.recipe = recipe
        self._actors[actor.actor_id] = actor
        self._by_object[object_id] = actor
        if actor.name is not None:
            self._names[actor.namespace, actor.name] = actor
        try:
            await self._acquire(actor)
            await self._worker_for(actor)
            if actor.state == "dead":
                raise ActorDied(actor.label, actor.cause, False)
        except BaseException as error:
            self._retire(actor, f"it could not be placed: {str(error) or type(error).__name__}")
            raise
        return _Grant(self, actor), False, object_id

    async def waits(self, class_name: str) -> str:
        """For what a spawn of the caller's waits, as a line; empty when none of that class does. Each is told of
        once."""
        owner, name = current_call.get().session.peer_process, shown(class_name)
        for actor in self._actors.values():
            if actor.owner == owner and actor.class_name == name and actor.state == "pending" and not actor.told:
                actor.told = True
                return f"{actor.class_name} waits for {self._missing(actor)}"
        return ""

    def _missing(self, actor: ActorRecord) -> str:
        if actor.node is not None:
            return (
                "its process to start" if actor.worker is None or not actor.worker.ready.done() else "its constructor"
            )
        total, free = self._ledger.total(), self._ledger.free()
        short = {name: amount for name, amount in actor.request.items() if free.get(name, 0.0) < amount}
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in (short or actor.request).items())
        if not short:  # no node has all of it at once, or others were first
            return f"{wanted} on one node"
        held = []
        for name in short:
            holders = [
                other.label for other in self._actors.values() if other.node is not None and name in other.request
            ]
            by = ", ".join(holders[:_NAMED]) + (f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else "")
            unit = f" {name}" if len(short) > 1 else ""
            used = total.get(name, 0.0) - free.get(name, 0.0)
            held.append(f"{used:g} of {total.get(name, 0.0):g}{unit} held by {by or 'nobody'}")
        return f"{wanted}: {'; '.join(held)}"

    async def _acquire(self, actor: ActorRecord) -> None:
        """Take a node for the actor, and of it what the actor asks for."""
        granted: asyncio.Future[None] = self.process.loop.create_future()

        def grant(node: str) -> None:
            actor.node = self._nodes.by_id[node]
            actor.node.actors += 1
            actor.node_id = node
            actor.withdraw = None
            if not granted.done():  # cancelled a moment ago: the request is about to be buried, and this given back
                granted.set_result(None)

        def refuse(error: InsufficientResources) -> None:
            actor.withdraw = None
            if not granted.done():
                granted.set_exception(error)

        where, owner = actor.options.get("node"), actor.owner
        withdraw = self._ledger.acquire(actor.request, lambda: self._nodes.order(where, owner), grant, refuse)
        if actor.node is None and not granted.done():

            def give_up() -> None:
                withdraw()
                granted.cancel()

            actor.withdraw = give_up
        await granted

    def _give_back(self, actor: ActorRecord) -> None:
        """The actor leaves its node."""
        node, actor.node = actor.node, None
        if node is not None:
            node.actors -= 1
            self._ledger.release(node.id, actor.request)

    def _root(self, actor: ActorRecord) -> bytes:
        """The program that the actor was made for, directly or through others."""
        found = self._nodes.worker(actor.owner)
        return actor.owner if found is None else found[1].driver

    async def constructed(self, actor_id: bytes, failure: str | None) -> None:
        """The constructor has returned; or `failure` tells why there is no actor, empty when its process was lost."""
        await dawdle("constructed")
        actor = self._actors.get(actor_id)
        if actor is None or actor.state == "dead":
            return
        if failure is None:
            self._alive(actor)
            return
        if not failure and actor.worker is not None:
            await asyncio.wait([actor.worker.ended], timeout=END_REPORT)
        self._retire(actor, failure or "its process could not be reached")

    def _alive(self, actor: ActorRecord) -> None:
        if actor.worker is not None:
            actor.location = (actor.worker.process, actor.index)
        actor.note_life(self.process.loop.time())
        actor.set_state("alive")
        if actor.displaced:
            actor.displaced = False
            self._tell_holders(actor)
        if actor.options.get("on_hang") == "kill":
            self.process.tasks.start(self._watch_for_hang(actor, actor.restarts))

    # ---------------------------------------------------------------- ends and restarts

    def _actor_lost(self, actor: ActorRecord, cause: str) -> None:
        """The actor's process ended under it."""
        if actor.state == "dead":
            return
        if actor.worker is not None:
            actor.worker.actors.pop(actor, None)
        actor.displaced = actor.node is not None and actor.node.id not in self._nodes.by_id
        if self.closing or not actor.may_restart():
            self._bury(actor, cause)
            return
        delay = actor.note_death(self.process.loop.time())
        if delay is None:
            self._bury(actor, f"{cause}; each time before its constructor had returned, so it is not restarted again")
            return
        actor.restarts += 1
        cause = f"{cause}; it is being restarted, after a pause of {delay:g} s"
        logger.warning("%s: %s", actor.label, cause)
        actor.set_state("restarting", cause)
        if actor.displaced:
            self._tell_holders(actor)
        self.process.tasks.start(self._restart(actor, actor.restarts, delay))

    def _tell_holders(self, actor: ActorRecord) -> None:
        """Its node was lost, or it lives elsewhere now: tell those who hold a lease on it. The connections that they
        have to its old place may not end by themselves."""
        if self.closing:
            return
        for session in list(self.process.sessions.all()):
            if session.closed is None and session.leases.get(actor.object_id) is not None:
                change = (actor.actor_id, actor.state, *actor.location, actor.cause)
                self.process.tasks.start(self._tell_holder(session, *change))

    async def _tell_holder(self, session: Session, *change: Any) -> None:
        await dawdle("tell holder")
        try:
            await self.process.requests.ask(session, "actor_changed", *change)
        except ZcactorError as error:  # it has ended, and its handles with it
            logger.debug("a holder was not told where an actor is: %s", error)

    async def _restart(self, actor: ActorRecord, turn: int, delay: float) -> None:
        """Start the actor for the `turn`-th time again."""
        recipe = actor.recipe
        failure = None
        await asyncio.sleep(delay)
        try:
            if actor.restarts != turn or actor.state != "restarting":
                return
            if actor.node is None or actor.node.id not in self._nodes.by_id:
                self._give_back(actor)
                await self._acquire(actor)
            worker = await self._worker_for(actor)
            session = await self.process.connections.connect(worker.process)
            await self.process.requests.ask(
                session, "create", actor.index, actor.actor_id, actor.object_id, turn, actor.options, recipe
            )
        except RemoteError as error:
            failure = f"its constructor raised {error.type_name} when it was restarted: {error.message}"
        except (ConnectionLost, InsufficientResources) as error:
            if actor.worker is not None and not actor.worker.ended.done() and actor.restarts == turn:
                actor.worker.kill()
            if actor.worker is not None and actor in actor.worker.actors:
                return  # the worker is about to end, and `_actor_lost` decides what comes then
            failure = f"it could not be restarted: {error}"
        except ZcactorError as error:
            failure = f"it could not be restarted: {error}"
        if actor.restarts != turn or actor.state != "restarting":
            return  # it was killed or lost on the way
        if failure is None:
            self._alive(actor)
        else:
            self._retire(actor, failure)

    def _retire(self, actor: ActorRecord, cause: str) -> None:
        """The actor is over: end its process, or its place in a shared one."""
        worker = actor.worker
        self._bury(actor, cause)
        if worker is None or worker.ended.done():
            return
        worker.actors.pop(actor, None)
        if not worker.actors:
            worker.leaving = True
            self._nodes.unshare(worker)
            worker.kill()
        elif worker.shared:
            self.process.tasks.start(self._discard(worker, actor.index))

    async def _discard(self, worker: WorkerRecord, index: int) -> None:
        try:
            await self.process.requests.ask(await self.process.connections.connect(worker.process), "discard", index)
        except ConnectionLost:
            logger.debug("worker %d ended before its actor could be discarded", worker.pid)

    def _bury(self, actor: ActorRecord, cause: str) -> None:
        if actor.state == "dead":
            return
        actor.set_state("dead", cause)
        if actor.displaced:
            self._tell_holders(actor)
        if actor.withdraw is not None:
            actor.withdraw()
        self._give_back(actor)
        if actor.name is not None and self._names.get((actor.namespace, actor.name)) is actor:
            del self._names[actor.namespace, actor.name]
        self._by_object.pop(actor.object_id, None)
        actor.strip()
        self._dead.append(actor.actor_id)
        if len(self._dead) > _REMEMBERED:
            self._actors.pop(self._dead.popleft(), None)

    def _known(self, actor_id: bytes) -> ActorRecord:
        actor = self._actors.get(actor_id)
        if actor is None:
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is unknown to this node")
        return actor

    async def kill(self, actor_id: bytes) -> None:
        """End an actor at once. Returns when its process has ended."""
        actor = self._known(actor_id)
        worker = actor.worker
        self._retire(actor, "it was killed by zc.kill")
        if worker is not None and not worker.shared:
            await asyncio.shield(worker.ended)

    async def stop(self, actor_id: bytes) -> None:
        """End an actor after what it has queued. Returns when its process has ended; cancelling only ends the wait."""
        actor = self._known(actor_id)
        self._begin_stop(actor, "it was stopped by zc.stop")
        if actor.ending is not None:
            await asyncio.shield(actor.ending)

    def _begin_stop(self, actor: ActorRecord, cause: str) -> None:
        """Stop an actor in a task of its own: whoever asked may go away meanwhile."""
        if actor.state != "dead" and actor.ending is None:
            actor.ending = self.process.loop.create_task(self._stop(actor, cause))

    async def _stop(self, actor: ActorRecord, cause: str) -> None:
        worker = actor.worker
        if worker is not None and actor.state == "alive":
            try:
                await self.process.requests.ask(
                    await self.process.connections.connect(worker.process), "stop", actor.index
                )
            except (ConnectionLost, RemoteError) as error:
                logger.debug("%s ended while it was being stopped: %s", actor.label, error)
        self._retire(actor, cause)
        if worker is not None and not worker.shared:
            await asyncio.shield(worker.ended)

    async def _watch_for_hang(self, actor: ActorRecord, turn: int) -> None:
        limit = self._hang_after
        while actor.state == "alive" and actor.restarts == turn and actor.worker is not None:
            worker = actor.worker
            try:
                async with asyncio.timeout(limit):
                    await self.process.requests.ask(await self.process.connections.connect(worker.process), "ping")
            except TimeoutError:
                logger.warning("%s has not responded for %g s and is killed (on_hang='kill')", actor.label, limit)
                worker.kill(f"its process did not respond for {limit:g} s and was killed (on_hang='kill')")
                return
            except ZcactorError:
                return
            await asyncio.sleep(self._heartbeat)

    # ---------------------------------------------------------------- handles

    def token_of(self, actor: ActorRecord) -> ActorToken:
        """The token that leases on `actor` keep alive."""
        token = actor.token() if actor.token is not None else None
        if token is None:
            token = ActorToken(
                self.process.process, actor.object_id,
                functools.partial(self.process.loop.call_soon_threadsafe, self._unheld, actor),
            )  # fmt: skip
            actor.token = weakref.ref(token)
            self._exports[actor.object_id] = token
        return token

    def revive(self, object_id: int) -> Any:
        """What those who hold the actor of that object id share; None where there is no such actor. Nobody may hold it
        at the moment."""
        actor = self._by_object.get(object_id)
        return None if actor is None else self.token_of(actor)

    def _unheld(self, actor: ActorRecord) -> None:
        """Nobody holds a handle any more."""
        if self.closing or actor.state == "dead" or (actor.token is not None and actor.token() is not None):
            return
        if actor.state == "pending":  # named or not: the spawn was given up before the handle arrived
            self._retire(actor, "its spawn was cancelled")
        elif actor.name is None and not actor.detached:
            self._begin_stop(actor, "its last handle was dropped")

    # ---------------------------------------------------------------- questions

    async def locate(self, actor_id: bytes, calls_wait: bool) -> tuple[str, bytes, int, str]:
        """Where an actor is; see `zcactor.runtime.head.HeadLink.locate`."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return "dead", b"", 0, "it is unknown to its node"
        if calls_wait and actor.state == "alive" and actor.worker is not None:
            # The caller lost its connection: most likely the process has just ended, and the zygote is about to tell.
            await asyncio.wait([actor.worker.ended], timeout=END_REPORT)
        while actor.state == "pending" or (actor.state == "restarting" and not calls_wait):
            await actor.changed()
        return actor.state, *actor.location, actor.cause

    async def get_actor(self, name: str, namespace: str) -> Any:
        """The handle of a named actor."""
        actor = self._names.get((namespace, name))
        if actor is None:
            known = ", ".join(sorted(n for space, n in self._names if space == namespace)) or "none"
            raise NoSuchActor(f"no actor named {name!r} lives in namespace {namespace!r} (named actors there: {known})")
        await actor.settled()
        if actor.state == "dead":
            raise NoSuchActor(f"the actor named {name!r} in namespace {namespace!r} has just died: {actor.cause}")
        return _Grant(self, actor)

    async def nodes(self) -> list[dict[str, Any]]:
        """Every node."""
        return self._nodes.told()

    async def actors(self) -> list[dict[str, Any]]:
        """Every actor that lives or whose death is remembered."""
        return [
            {
                "actor_id": actor.actor_id.hex(), "class_name": actor.class_name, "name": actor.name,
                "namespace": actor.namespace, "state": actor.state, "node_id": actor.node_id,
                "pid": actor.pid, "restarts": actor.restarts,
                "cause": actor.cause,
            }
            for actor in self._actors.values()
        ]  # fmt: skip

    async def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """Total and free amounts."""
        return self._ledger.total(), self._ledger.free()

    async def process_of(self, actor_id: bytes) -> bytes:
        """The process that hosts an actor."""
        state, process, _, cause = await self.locate(actor_id, False)
        if state == "dead":
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is dead: {cause}")
        return process

    # ---------------------------------------------------------------- output and the end

    def output(self, stream: str, worker: WorkerRecord, lines: list[str]) -> None:
        """A worker of this node has printed something."""
        self.show(worker.driver, stream, f"({worker.label} pid={worker.pid}) ", lines)

    def show(self, driver: bytes, stream: str, prefix: str, lines: list[str]) -> None:
        """Show lines, each with `prefix` before it, at a program; where it is gone, in our own log."""
        session = self.process.sessions.used.get(driver)
        if session is not None and session.closed is None:
            if self.process.config.log_to_driver:
                self._printers.write(driver, stream, prefix, lines)
        elif not self.driver:
            file = sys.stderr if stream == "stderr" else sys.stdout
            file.write("".join(f"{prefix}{line}\n" for line in lines))
            file.flush()

    async def _show(self, driver: bytes, stream: str, text: str) -> None:
        session = self.process.sessions.used.get(driver)
        if session is None or session.closed is not None:
            raise ConnectionLost("the driver is gone")
        await self.process.requests.ask(session, "log", stream, text)

    async def shutdown(self, grace: float) -> None:
        """End every actor and then the node. Idle actors are closed first, within `grace` seconds; those with calls
        running are killed. Cancelling it ends only the wait; a second call without grace ends the first one's."""
        if self._ending is None:
            self.closing = True
            self._ending = self.process.loop.create_task(self._shutdown(grace))
        elif grace <= 0:  # the driver died while it waited for an orderly end
            self._pool.kill_all("the node was shut down")
        await asyncio.shield(self._ending)

    async def _shutdown(self, grace: float) -> None:
        await asyncio.gather(
            self.members.end(grace),
            end_workers(self.process.sessions, self.process.requests, self._pool, grace, "the node was shut down"),
        )
        if grace > 0:
            await self.show_all()
        self.process.loop.call_soon(self.finish)

    async def show_all(self) -> None:
        """Wait until the drivers have shown what was printed, or do not in time."""
        try:
            async with asyncio.timeout(LAST_OUTPUT):
                await self._printers.flush()
        except TimeoutError:
            logger.debug("a driver did not show all output in time")

    def zygote_lost(self) -> None:
        """No worker can be started any more, and those there were have ended: so does the node."""
        self.closing = True
        self.process.loop.call_soon(self.finish)

    def finish(self) -> None:
        """End the agent's process."""
        if not self.finished.done():
            self.finished.set_result(None)


@functools.cache
def agent_interface() -> Interface:
    """The agent's methods."""
    return Interface.of(NodeAgent)
