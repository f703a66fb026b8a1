"""A worker: the process that hosts actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple
from weakref import WeakKeyDictionary

import msgspec

from zcactor.api.actor import declared_options
from zcactor.api.handle import ActorHandle, ActorHold
from zcactor.api.remote_actor import RemoteActor
from zcactor.assembly.endpoints import address_of, find_through, make_endpoint
from zcactor.assembly.fork_guard import watch_forks
from zcactor.assembly.process import Process
from zcactor.buggify import dawdle
from zcactor.config import Config
from zcactor.control.node_table import own_machine
from zcactor.errors import ConnectionLost, ZcactorError
from zcactor.exception_pickling import shown
from zcactor.execution.closing import OF_AN_END
from zcactor.execution.open_tasks import leave_to_its_task, watch_generators, watch_tasks
from zcactor.ids import ProcessId
from zcactor.interface import Interface
from zcactor.logs import logger
from zcactor.node.numeric_threads import follow_cpus, follow_environment, read_too_early
from zcactor.objectstore.store import Store
from zcactor.options import ActorSpec
from zcactor.process import context
from zcactor.process.cluster import HeadNews, OwnNodeService, WorkerService
from zcactor.process.loops import new_event_loop
from zcactor.rpc.messages import Flags
from zcactor.rpc.services import SYSTEM_INDEX, Services, caller, current_call
from zcactor.workers.exits import begin_to_flush

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zcactor.errors import DeviceError
    from zcactor.ids import ActorId
    from zcactor.marshal.packed import Packed
    from zcactor.rpc.session import Session

__all__ = ["ActorIdentity", "Worker", "become_worker", "flush_output", "serve"]

Ts = TypeVarTuple("Ts")

_FIRST_LOOK, _LAST_LOOK = 0.1, 1.0
"""Seconds between two looks whether a process without an actor is needed: callers are told where the actor is now, and
may be about to read its results."""


class ActorIdentity:
    """The facts that an actor may know about itself; see `zcactor.api.actor.CurrentActor`."""

    __slots__ = ("actor_id", "handle", "node", "restarts")

    def __init__(self, actor_id: ActorId, handle: ActorHandle, node: str, restarts: int) -> None:
        self.actor_id = actor_id
        self.handle = handle
        self.node = node
        self.restarts = restarts


class Worker(WorkerService):
    """The part of a worker process beside `Process`: makes and ends actors at the word of the agent or a spawner."""

    def __init__(self, process: Process, node: str) -> None:
        self.process = process
        self.node = node
        self.alone = False
        """Whether it is a process of its own, whose environment is the actor's."""
        self.done: asyncio.Future[float] = process.loop.create_future()
        """The time (`time.monotonic`) at which the process is to have ended, once it is to end."""
        self._news: list[tuple[ActorId, str, bytes, int, str]] = []
        """The places of the actors that have lived here, in the form that peers take."""
        self._telling: asyncio.Task[None] | None = None
        self._vacated = False
        """Whether the head has no actor here, and sends none."""

    async def create(
        self, index: int, actor_id: ActorId, object_id: int, restarts: int, spec: dict[str, Any], interface: bytes,
        recipe: Packed, epoch: int | None,
    ) -> None:  # fmt: skip
        """See `WorkerService`."""
        if epoch is not None:
            self.process.news.known.check(epoch)
        process, asked = self.process, ActorSpec.from_plain(spec)
        parts = recipe.parts
        if asked.max_restarts:  # another life must find the spawner's arguments as they were passed
            parts = process.marshaller.duplicate(parts)
        if self.alone and asked.num_cpus and asked.process != "shared":
            follow_cpus(asked.num_cpus)  # before the class's modules load libraries that read the variables
        take_log_level(asked.log_level)
        # The class is unpickled on the loop, because its runner needs it. The constructor runs in the actor's thread.
        actor_class, *args = process.marshaller.unpack(recipe.payload, parts, recipe.flags, True)
        kwargs = args.pop() if recipe.flags & Flags.KWARGS else {}
        declared, there = Interface.from_wire(interface), Interface.of(actor_class)
        groups = declared_options(actor_class).get("concurrency_groups", {})  # the spawner's version may have others
        asked = msgspec.structs.replace(asked, concurrency_groups={**groups, **asked.concurrency_groups})
        label = f"{shown(actor_class.__name__)}({shown(asked.name) if asked.name else actor_id.hex()[:8]})"
        host = process.hosts.add(index, actor_class, label, asked, interface=there.seen_as(declared, actor_class))
        remote = RemoteActor(
            process, actor_id, declared, (process.process, index), asked.name, asked.namespace,
            asked.max_pending_calls or process.config.max_pending_calls, asked.max_retries,
        )  # fmt: skip
        remote.hold = ActorHold(process.sessions.head, object_id, None)
        process.sessions.remotes[actor_id] = remote
        host.info = ActorIdentity(actor_id, ActorHandle(remote), self.node, restarts)
        await dawdle("construct")
        try:
            await host.construct(lambda: actor_class(*args, **kwargs))
        except BaseException:
            process.hosts.by_index.pop(index, None)
            host.close()
            incoming = current_call.get()
            if incoming is not None:
                incoming.blamed = label
            raise

    async def stop(self, index: int, seconds: float, epoch: int) -> None:
        """See `WorkerService`."""
        self.process.news.known.check(epoch)
        host = self.process.hosts.by_index.get(index)
        if host is not None:
            await host.stop(seconds)
            self.process.hosts.by_index.pop(index, None)
            self.process.groups.actor_ended(host.info.actor_id, "it was stopped")
            self.process.graphs.actor_ended(host.info.actor_id, "it was stopped")
        flush_output()

    async def vacate(self, index: int, patience: float, epoch: int) -> bool:
        """See `WorkerService`."""
        self.process.news.known.check(epoch)
        host = self.process.hosts.by_index.get(index)
        if host is None or host.instance is None or not await host.vacate(patience):
            return False
        self.process.groups.actor_ended(host.info.actor_id, "it has moved to another node")
        self.process.graphs.actor_ended(host.info.actor_id, "it has moved to another node")
        flush_output()
        return True

    async def readmit(self, index: int) -> None:
        """See `WorkerService`."""
        host = self.process.hosts.by_index.get(index)
        if host is not None:
            await host.readmit(caller())

    async def moved(self, index: int, place: ProcessId, there: int, last: bool, epoch: int) -> None:
        """See `WorkerService`."""
        self.process.news.known.check(epoch)
        self._vacated = self._vacated or last
        host = self.process.hosts.by_index[index]
        self._news.append((host.info.actor_id, "alive", place, there, "it has moved to another node"))
        if self._telling is None:
            self._telling = self.process.tasks.begin(self._tell_peers())

    async def _tell_peers(self) -> None:
        """Tell each peer where the actors are that have lived here. End this process when all know, no peer needs it,
        and the head has no actor here."""
        told: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        pause = _FIRST_LOOK
        while True:
            sessions = [each for each in self.process.sessions.all() if each.peer_process != self.process.process]
            waiting = [each for each in sessions if each.closed is None and told.get(each, 0) < len(self._news)]
            if waiting:
                count = len(self._news)
                await asyncio.gather(*(self._tell(each, self._news[told.get(each, 0) : count]) for each in waiting))
                told.update(dict.fromkeys(waiting, count))
                continue
            if self._vacated and not any(map(_is_needed, sessions)):
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK)
        await self._hand_over(time.monotonic() + self.process.config.shutdown_timeout)
        self.process.leaving = True
        self.finish()

    async def _hand_over(self, until: float) -> None:
        """Hand values to their holders, and write files: the process is killed where the rest takes too long."""
        if self.alone:  # another process is a test's, or a simulation's, and its files are not the actors'
            begin_to_flush()
        await self.process.succession.hand_over(until - time.monotonic())

    async def _tell(self, session: Session, news: list[tuple[ActorId, str, bytes, int, str]]) -> None:
        known = self.process.news.known
        with contextlib.suppress(ZcactorError):  # the peer has ended
            for change in news:
                if session.is_replaced:  # its twin brings the news: the peer may not read this one any more
                    break
                await self.process.requests.ask(session, HeadNews.actor_changed, *change, known.epoch)
            await self.process.requests.ask(session, Services.ping)  # another thread of the peer was about to send

    async def discard(self, index: int, epoch: int) -> None:
        """See `WorkerService`."""
        self.process.news.known.check(epoch)
        host = self.process.hosts.by_index.pop(index, None)
        if host is not None:
            host.close()
            self.process.groups.actor_ended(host.info.actor_id, "it was ended")
            self.process.graphs.actor_ended(host.info.actor_id, "it was ended")

    async def discard_others(self, indices: list[int], epoch: int) -> None:
        """See `WorkerService`."""
        self.process.news.known.check(epoch)
        for index in list(self.process.hosts.by_index):
            if index != SYSTEM_INDEX and index not in indices:
                await self.discard(index, epoch)

    async def leave(self, grace: float) -> None:
        """See `WorkerService`."""
        until = time.monotonic() + grace
        self.process.unretrieved_errors.close()
        self.process.leaving = True
        idle = [
            self.process.loop.create_task(host.stop(grace * OF_AN_END))
            for host in self.process.hosts.actors()
            if host.instance is not None and not host.busy
        ]
        if idle:
            await asyncio.wait(idle, timeout=grace)
        await self._hand_over(until)
        flush_output()
        self.process.loop.call_soon(self.finish, until)

    def gpu_broke(self, error: DeviceError) -> None:
        """Have the agent of this node end this process, whose actor can use its GPU no more. Actors that may restart
        get another process."""
        self.give_up(f"its GPU cannot be used: {error}")

    def give_up(self, reason: str) -> None:
        """Have the agent of this node end this process, which cannot go on for `reason`. On the loop's thread."""
        logger.error("this process ends: %s", reason)
        flush_output()
        self.process.tasks.start(self._report_broken(f"its process ended itself: {reason}"))

    async def _report_broken(self, cause: str) -> None:
        try:
            await self._ask_agent(OwnNodeService.worker_broken, cause)
        except ConnectionLost:
            self.finish()

    def session_lost(self, session: Session) -> None:
        """End the worker when the agent of its node is gone."""
        if session.peer_process.hex() == self.node:
            self.finish()

    async def report(self, address: str) -> None:
        """Tell the agent of its node that this worker serves, at `address` for peers of other hosts.

        Raises:
            ConnectionLost: the agent is gone.
        """
        await dawdle("worker ready")
        own, pid = ProcessId(self.process.process), self.process.place.pid
        await self._ask_agent(OwnNodeService.worker_ready, own, pid, address)

    async def _ask_agent(self, method: Callable[[Any, *Ts], Coroutine[Any, Any, None]], *args: *Ts) -> None:
        session = await self.process.connections.connect(bytes.fromhex(self.node))
        await self.process.requests.ask_of(session, method, *args)

    def finish(self, until: float | None = None) -> None:
        """End the process, at `until` (`time.monotonic`) at the latest; None gives it the time of an end."""
        if not self.done.done():
            self.done.set_result(until or time.monotonic() + self.process.config.shutdown_timeout)


def _is_needed(session: Session) -> bool:
    """Whether the peer waits for an answer, or has leases on bytes that go with this process: it maps none of them."""
    return session.closed is None and (
        bool(session.incoming) or (session.connection.reader is None and session.leases.total > 0)
    )


def flush_output() -> None:
    """Flush text that has no line end yet: the process may be killed next."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # user code may have replaced or closed it
            stream.flush()


def take_log_level(level: int | None) -> None:
    """Show log records from the spawner's `level` on, unless somebody has configured logging here."""
    root, shown_by = logging.getLogger(), logging.lastResort
    if level is not None and root.level == logging.WARNING and not root.handlers and shown_by is not None:
        root.setLevel(level)
        shown_by.setLevel(level)


def become_worker(setup: dict[str, Any]) -> float:
    """Run a worker until its agent is gone or tells it to leave. Called in a fresh fork of the zygote.

    Returns:
        The time (`time.monotonic`) at which the process is to have ended.
    """
    env: dict[str, str] = setup["env"]
    os.environ.update(env)
    if "TZ" in env:
        time.tzset()
    if env:
        follow_environment(env)
    if logging.lastResort is not None:  # this handler shows records until user code configures logging
        logging.lastResort.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if too_early := read_too_early(env):
        logger.warning(
            "env sets %s, which a process reads when it starts, and actors' processes are forks of one: programs that "
            "the actor starts see it; for the actor itself set it where zc.init or zcactor start is called",
            ", ".join(too_early),
        )
    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = _pass_breakpoint
    watch_forks()
    loop = new_event_loop(setup["loop"])
    asyncio.set_event_loop(loop)
    watch_tasks(loop)
    return _run(loop, loop.create_task(_work(loop, setup)))


def _pass_breakpoint(*_: object, **__: object) -> None:
    """Go on at a ``breakpoint()``, and log how to stop there: pdb would read the end of a file, and raise BdbQuit."""
    frame = sys._getframe(1)
    logger.warning(
        "breakpoint() at %s:%d did not stop, as an actor has no terminal: install remote-pdb, give the actor "
        "env={'PYTHONBREAKPOINT': 'remote_pdb.set_trace'}, and connect to the port that it prints",
        os.path.basename(frame.f_code.co_filename), frame.f_lineno,
    )  # fmt: skip


def _run(loop: asyncio.AbstractEventLoop, work: asyncio.Task[float]) -> float:
    """Run the task of a worker, also past a SystemExit or KeyboardInterrupt of a task that an actor has begun.

    Asyncio raises these two out of the loop when they end a task, as they end a program. Here they are the outcome of
    that task alone, as they would be that of a method: those that await it get them, and other actors go on. All other
    ways to the loop, as that of a signal's handler, end the worker.
    """
    while True:
        loop.call_soon(watch_generators)
        try:
            return loop.run_until_complete(work)
        except (SystemExit, KeyboardInterrupt) as error:
            if not leave_to_its_task(error):
                raise


async def _work(loop: asyncio.AbstractEventLoop, setup: dict[str, Any]) -> float:
    config = Config(**setup["config"])
    store = Store(setup["store_capacity"], setup["process"])
    endpoint = make_endpoint(
        config, Path(setup["directory"]), setup["process"], setup["token"], store, clustered=setup["clustered"]
    )
    process = Process(setup["process"], "worker", config, loop, store, endpoint)
    process.sessions.head = setup["agent"]
    process.locations.machine = own_machine(config, Path(setup["directory"]))
    find_through(endpoint, process.places, process.head, setup["head_address"])
    process.namespace = setup["namespace"]
    context.set_current(process)
    process.use_numpy()
    return await serve(process, setup["node"], alone=True)


async def serve(process: Process, node: str, *, alone: bool = False) -> float:
    """Run a worker until the agent of its node is gone or tells it to leave.

    Args:
        process: the worker's own, with an endpoint that has not been started.
        node: id of its node.
        alone: whether the worker is a process of its own, and not a part of a test's or a simulation's.

    Returns:
        The time (`time.monotonic`) at which its process is to have ended.

    Raises:
        ConnectionLost: a worker that is a process of its own could not report to its agent.
    """
    worker = Worker(process, node)
    worker.alone = alone
    process.serve(worker)
    process.broken.on_broken = worker.gpu_broke
    process.broken.give_up = worker.give_up
    process.sessions.node = bytes.fromhex(node)
    await process.endpoint.start(process.connections.accepted)
    process.connections.on_lost = worker.session_lost
    try:
        await worker.report(address_of(process.endpoint))
    except ConnectionLost:
        if alone:  # the agent is gone, and nobody reads the reason; or this process cannot reach it
            raise
        return time.monotonic()
    return await worker.done
