"""The node agent: places and supervises actors, knows their names, holds the host's resources.

It is an actor like any other (index 1 of its process), so every request to it is a call. It is not on the path of calls
between actors or of data.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

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
from zcactor.interface import Interface
from zcactor.marshal.values import Code, registered
from zcactor.objectstore.ref import RegionKind
from zcactor.rpc.parts import Part
from zcactor.runtime.host import current_call
from zcactor.runtime.output import Printer
from zcactor.runtime.records import ActorRecord, ActorToken
from zcactor.runtime.resources import Ledger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from zcactor.marshal.sealed import Sealed
    from zcactor.rpc.session import Session
    from zcactor.runtime.pool import Pool, WorkerRecord
    from zcactor.runtime.process import Process

__all__ = ["NodeAgent", "agent_interface"]

logger = logging.getLogger("zcactor")
SHARED_WORKERS = max(1, len(os.sched_getaffinity(0)))
"""Processes that actors with ``process="shared"`` are spread over: one per core."""
RESPONSE = 1.0
"""Seconds in which a worker's loop must answer when the node ends; one that is blocked is killed without its close
hooks."""
END_REPORT = 2.0
"""Seconds to wait for the zygote's word on a worker whose connection a caller has lost: normally a few milliseconds,
but the kernel may take its time over a process with much memory."""
LAST_OUTPUT = 2.0
"""Seconds that the driver gets at the end to show what was printed."""
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
    """The actor that places actors. Its callers are the driver and the workers of its node.

    Args:
        process: the agent's own.
        pool: starts workers.
        total: the node's resources.
        heartbeat: seconds between two pings of an actor with ``on_hang="kill"``.
        hang_after: seconds without an answer until such an actor counts as hung.
    """

    def __init__(
        self, process: Process, pool: Pool, total: Mapping[str, float], heartbeat: float = 1.0, hang_after: float = 10.0
    ) -> None:
        self.process = process
        self.node = process.process.hex()
        self._pool = pool
        self._ledger = Ledger(total)
        self._actors: dict[bytes, ActorRecord] = {}
        self._dead: deque[bytes] = deque()
        self._by_object: dict[int, ActorRecord] = {}
        self._names: dict[tuple[str, str], ActorRecord] = {}
        self._next_object = 1
        self._shared: list[WorkerRecord] = []
        self._heartbeat = heartbeat
        self._hang_after = hang_after
        self._closing = False
        self._ending: asyncio.Task[None] | None = None
        self._printer = Printer(self._show, process.start_task)
        self.driver: bytes = b""
        self.finished: asyncio.Future[None] = process.loop.create_future()
        process.revive = self._revive
        process.on_session_lost = self._session_lost

    # ---------------------------------------------------------------- workers

    async def worker_ready(self, process: bytes) -> None:
        """A worker has started and listens."""
        record = self._pool.by_process.get(process)
        if record is not None and not record.ready.done():
            record.ready.set_result(None)

    def worker_ended(self, record: WorkerRecord) -> None:
        """A worker's process is gone (from the pool)."""
        if record in self._shared:
            self._shared.remove(record)
        cause = record.ended.result()
        for actor in list(record.actors):
            self._actor_lost(actor, cause)
        self._end_owned(record.process)

    def _session_lost(self, session: Session) -> None:
        if self._closing:
            return
        if session.peer_process == self.driver:
            self.process.start_task(self.shutdown(0.0))
        worker = self._pool.by_process.get(session.peer_process)
        if worker is not None and not worker.leaving:
            worker.kill()  # it has ended, or cannot be reached any more; the zygote reports its end

    def _end_owned(self, owner: bytes) -> None:
        for actor in list(self._actors.values()):
            # A detached actor outlives its spawner, but not the spawning: nobody is left to construct it.
            if actor.owner == owner and actor.state != "dead" and (actor.state == "pending" or not actor.detached):
                self._retire(actor, "its owner's process ended")

    def _start_worker(self, label: str, env: Mapping[str, str], *, shared: bool) -> WorkerRecord:
        try:
            return self._pool.start(label, env, shared=shared)
        except OSError as error:
            raise InsufficientResources(f"no process could be started for {label}: {error}; see ulimit -n") from error

    async def _worker_for(self, actor: ActorRecord) -> WorkerRecord:
        options = actor.options
        if options.get("process") == "shared":
            alive = [worker for worker in self._shared if not worker.leaving]
            if len(alive) < SHARED_WORKERS:
                worker = self._start_worker("shared", {}, shared=True)
                self._shared.append(worker)
            else:
                worker = min(alive, key=lambda w: len(w.actors))
        else:
            label = actor.class_name if actor.name is None else f"{actor.class_name} {actor.name}"
            worker = self._start_worker(label, options.get("env") or {}, shared=False)
        actor.worker = worker
        actor.index = worker.take_index()
        worker.actors.add(actor)
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
        if self._closing:
            raise ConnectionLost("the node is shutting down")
        self._next_object += 1
        object_id = self._next_object << 32 | secrets.randbits(32)
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

    async def _acquire(self, actor: ActorRecord) -> None:
        if not actor.request:
            return
        granted: asyncio.Future[None] = self.process.loop.create_future()

        def grant() -> None:
            actor.holds_resources = True
            actor.withdraw = None
            if not granted.done():  # cancelled a moment ago: the request is about to be buried, and this given back
                granted.set_result(None)

        withdraw = self._ledger.acquire(actor.request, grant)
        if not actor.holds_resources:

            def give_up() -> None:
                withdraw()
                granted.cancel()

            actor.withdraw = give_up
        await granted

    async def constructed(self, actor_id: bytes, failure: str | None) -> None:
        """The constructor has returned; or `failure` tells why there is no actor, empty when its process was lost."""
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
        actor.set_state("alive")
        if actor.options.get("on_hang") == "kill":
            self.process.start_task(self._watch_for_hang(actor, actor.restarts))

    # ---------------------------------------------------------------- ends and restarts

    def _actor_lost(self, actor: ActorRecord, cause: str) -> None:
        """The actor's process ended under it."""
        if actor.state == "dead":
            return
        if actor.worker is not None:
            actor.worker.actors.discard(actor)
        if self._closing or not actor.may_restart():
            self._bury(actor, cause)
            return
        delay = actor.note_death(self.process.loop.time())
        if delay is None:
            self._bury(actor, f"{cause}; each time before its constructor had returned, so it is not restarted again")
            return
        actor.restarts += 1
        actor.set_state("restarting", cause)
        self.process.start_task(self._restart(actor, actor.restarts, delay))

    async def _restart(self, actor: ActorRecord, turn: int, delay: float) -> None:
        """Start the actor for the `turn`-th time again."""
        recipe = actor.recipe
        failure = None
        if delay:
            await asyncio.sleep(delay)
        try:
            if actor.restarts != turn or actor.state != "restarting":
                return
            worker = await self._worker_for(actor)
            session = await self.process.connect(worker.process)
            await self.process.ask(
                session, "create", actor.index, actor.actor_id, actor.object_id, turn, actor.options, recipe
            )
        except RemoteError as error:
            failure = f"its constructor raised {error.type_name} when it was restarted: {error.message}"
        except (ConnectionLost, InsufficientResources):
            if actor.worker is not None and actor.restarts == turn:
                actor.worker.kill()
            return  # the worker has ended or is about to, and `_actor_lost` decides what comes then
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
        worker.actors.discard(actor)
        if not worker.actors:
            worker.leaving = True
            if worker in self._shared:
                self._shared.remove(worker)
            worker.kill()
        elif worker.shared:
            self.process.start_task(self._discard(worker, actor.index))

    async def _discard(self, worker: WorkerRecord, index: int) -> None:
        try:
            await self.process.ask(await self.process.connect(worker.process), "discard", index)
        except ConnectionLost:
            logger.debug("worker %d ended before its actor could be discarded", worker.pid)

    def _bury(self, actor: ActorRecord, cause: str) -> None:
        if actor.state == "dead":
            return
        actor.set_state("dead", cause)
        if actor.withdraw is not None:
            actor.withdraw()
        if actor.holds_resources:
            actor.holds_resources = False
            self._ledger.release(actor.request)
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
                await self.process.ask(await self.process.connect(worker.process), "stop", actor.index)
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
                    await self.process.ask(await self.process.connect(worker.process), "ping")
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
            self.process.exports[actor.object_id] = token
        return token

    def _revive(self, object_id: int) -> Any:
        actor = self._by_object.get(object_id)
        return None if actor is None else self.token_of(actor)

    def _unheld(self, actor: ActorRecord) -> None:
        """Nobody holds a handle any more."""
        if self._closing or actor.state == "dead" or (actor.token is not None and actor.token() is not None):
            return
        if actor.state == "pending":  # named or not: the spawn was given up before the handle arrived
            self._retire(actor, "its spawn was cancelled")
        elif actor.name is None and not actor.detached:
            self._begin_stop(actor, "its last handle was dropped")

    # ---------------------------------------------------------------- questions

    async def locate(self, actor_id: bytes, calls_wait: bool) -> tuple[str, bytes, int, str]:
        """Where an actor is; see `zcactor.runtime.process.Process.locate`."""
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
        """This node, in a list."""
        return [
            {
                "node_id": self.node, "host": socket.gethostname(), "pid": os.getpid(), "alive": True,
                "resources": self._ledger.total, "workers": len(self._pool.by_process),
            }
        ]  # fmt: skip

    async def actors(self) -> list[dict[str, Any]]:
        """Every actor that lives or whose death is remembered."""
        return [
            {
                "actor_id": actor.actor_id.hex(), "class_name": actor.class_name, "name": actor.name,
                "namespace": actor.namespace, "state": actor.state, "node_id": self.node,
                "pid": actor.pid, "restarts": actor.restarts,
                "cause": actor.cause,
            }
            for actor in self._actors.values()
        ]  # fmt: skip

    async def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """Total and free amounts."""
        return self._ledger.total, self._ledger.free

    async def process_of(self, actor_id: bytes) -> bytes:
        """The process that hosts an actor."""
        state, process, _, cause = await self.locate(actor_id, False)
        if state == "dead":
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is dead: {cause}")
        return process

    # ---------------------------------------------------------------- output and the end

    def output(self, stream: str, worker: WorkerRecord, lines: list[str]) -> None:
        """Pass what a worker printed to the driver."""
        if self.process.config.log_to_driver:
            self._printer.write(stream, f"({worker.label} pid={worker.pid}) ", lines)

    def _show(self, stream: str, text: str) -> Awaitable[object]:
        session = self.process.sessions.get(self.driver)
        if session is None or session.closed is not None:
            raise ConnectionLost("the driver is gone")
        return self.process.ask(session, "log", stream, text)

    async def shutdown(self, grace: float) -> None:
        """End every actor and then the node. Idle actors are closed first, within `grace` seconds; those with calls
        running are killed. Cancelling it ends only the wait; a second call without grace ends the first one's."""
        if self._ending is None:
            self._closing = True
            self._ending = self.process.loop.create_task(self._shutdown(grace))
        elif grace <= 0:  # the driver died while it waited for an orderly end
            self._pool.kill_all("the node was shut down")
        await asyncio.shield(self._ending)

    async def _shutdown(self, grace: float) -> None:
        if grace > 0:
            leaving = []
            for worker in list(self._pool.by_process.values()):
                session = self.process.sessions.get(worker.process)
                worker.leaving = True
                if session is not None and session.closed is None:
                    leaving.append(self._leave(session, grace))
            await asyncio.gather(*leaving)
        self._pool.kill_all("the node was shut down")
        await self._pool.wait_all(2.0)
        self._pool.drain_output()
        if grace > 0:
            try:
                async with asyncio.timeout(LAST_OUTPUT):
                    await self._printer.flush()
            except TimeoutError:
                logger.debug("the driver did not show all output in time")
        self.process.loop.call_soon(self.finish)

    def zygote_lost(self) -> None:
        """No worker can be started any more, and those there were have ended: so does the node."""
        self._closing = True
        self.process.loop.call_soon(self.finish)

    def finish(self) -> None:
        """End the agent's process."""
        if not self.finished.done():
            self.finished.set_result(None)

    async def _leave(self, session: Session, grace: float) -> None:
        try:
            async with asyncio.timeout(RESPONSE):
                await self.process.ask(session, "ping")
            async with asyncio.timeout(grace):
                await self.process.ask(session, "leave", grace)
        except (TimeoutError, ZcactorError) as error:
            logger.debug("a worker did not leave by itself: %s", error)


@functools.cache
def agent_interface() -> Interface:
    """The agent's methods."""
    return Interface.of(NodeAgent)
