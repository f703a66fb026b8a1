"""One of several `Process` objects in this interpreter: a head, a driver or a worker of a test's runtime.

Everything in it is the package's own. The parts that would be forks, sockets and global variables elsewhere are given
to it here: an endpoint in an `InnerNetwork`, and a context. All that runs for a process runs in its context, or in one
that was made from it, and so `zcactor.process.context.current` finds the right object. Threads of actors have contexts
of their own, which name the actor. All else belongs to the driver: the test itself.
"""

from __future__ import annotations

import asyncio
import gc
import os
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

from zcactor.assembly.process import Process
from zcactor.execution.open_tasks import is_ours
from zcactor.objectstore.arena import Arena
from zcactor.objectstore.store import Store
from zcactor.process import context
from zcactor.process.place import Place
from zcactor.testing.network import InnerEndpoint

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zcactor.config import Config
    from zcactor.testing.network import InnerNetwork

__all__ = ["InnerProcess", "choose_among", "described"]

_process: ContextVar[Any] = ContextVar("zcactor_inner_process", default=None)
"""The `Process` that a context belongs to."""
HOST = "loopback"
"""The name of the host of all processes."""


def described(task: asyncio.Task[Any]) -> str:
    """The name of a task and of its coroutine."""
    coroutine = task.get_coro()
    return f"task {task.get_name()!r} ({getattr(coroutine, '__qualname__', coroutine)})"


def choose_among(driver: Process) -> None:
    """Let `zcactor.process.context.current` find the process by its context. `driver` has all other code."""

    def chosen() -> Any:
        host = context.current_host.get()
        return _process.get() or driver if host is None else host.process

    context.choose_by(chosen)


class InnerProcess:
    """One process.

    Args:
        network: the network in which it is found.
        config: its settings.
        capacity: bytes of its arena.
        role: ``"agent"``, ``"driver"`` or ``"worker"``.
        name: process id, 16 bytes.
        head: process id of the head.
    """

    def __init__(
        self, network: InnerNetwork, config: Config, capacity: int, role: str, name: bytes, head: bytes
    ) -> None:
        loop = asyncio.get_running_loop()
        self.network = network
        self.context = Context()
        self.label = {"agent": "the head", "driver": "the test"}.get(role, role)
        """The name in messages: the class of a worker's first actor, and its name if it has one."""
        self.left: list[str] = []
        """Tasks that its actors had left when they were stopped in order, a line for each. The system would end them
        with a real process, but not in one that others share."""
        arena = Arena(capacity, groups=())
        self.endpoint = InnerEndpoint(
            network, loop, self.context, name, os.getpid(), arena, is_head=role == "agent",
            recv_depth=config.recv_depth, eager_limit=config.eager_limit,
        )  # fmt: skip
        place = Place(os.getpid(), HOST)
        self.process: Process = self.context.run(
            Process, name, role, config, loop, Store(0, name, arena=arena), self.endpoint, place
        )
        self.process.sessions.head = head
        self.process.locations.machine = HOST
        self.context.run(_process.set, self.process)
        if role != "agent":
            self.context.run(self.process.use_numpy)
        self.ended = False
        """Whether the process has closed, or was killed."""
        self._main: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Let other processes connect."""
        await self.endpoint.start(self.process.connections.accepted)

    def start(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `main` in this process, which may end it."""
        name = f"zcactor.testing {self.label}"
        self._main = self.process.loop.create_task(main, name=name, context=self.context)
        return self._main

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks of this process that have not ended: those of its actors' methods, and those that these have
        made."""
        return [task for task in asyncio.all_tasks(self.process.loop) if _belongs(_context_of(task), self.process)]

    def end(self) -> asyncio.Task[None]:
        """Close the process in order. Returns the task that does it. Idempotent."""
        if self._closing is None:
            self._closing = self.process.loop.create_task(self._close(), name="end of a process", context=self.context)
        return self._closing

    def kill(self) -> asyncio.Task[None]:
        """End the process as SIGKILL does, as far as that is possible: its connections break at once, its tasks are
        cancelled, and no method begins any more. A plain method that runs in a thread goes on to its end."""
        self.ended = True
        self.endpoint.unlisten()
        for session in list(self.process.sessions.all()):
            session.connection.abort()
        if self._main is not None:
            self._main.cancel()
        return self.end()

    async def _close(self) -> None:
        stopped = all(host.instance is None for host in self.process.hosts.actors())
        await self.process.close()
        await asyncio.sleep(0)  # calls that were cancelled end
        for task in self.tasks():
            if task not in (self._main, self._closing):
                if stopped and not task.cancelling() and not is_ours(task):
                    self.left.append(f"{described(task)} of {self.label}")
                task.cancel()
        self.ended = True

    def abandon(self) -> None:
        """End the process where its loop has been closed. Idempotent."""
        process = self.process
        self.ended = process.tasks.closing = True
        self.endpoint.unlisten()
        for host in process.hosts.by_index.values():
            for mailbox in host._mailboxes.values():
                mailbox.close()
        process.threads.close()
        if process.hosts.watchdog is not None:
            process.hosts.watchdog.close()
        process.trimmer.abandon()
        process.sessions.end_leases()
        process.placements.clear()
        process.store.close()

    def forget_reader(self, other: InnerProcess) -> None:
        """Give back the memory that `other`, which has ended, could still read here."""
        parked = self.process.store.parking
        reader = other.endpoint.reader
        parked.hold(reader, parked.connections_of(reader), ())


def _context_of(task: asyncio.Task[Any]) -> Context | None:
    """The context that a task runs in. Python 3.11 has no method for it."""
    get = getattr(task, "get_context", None)
    if get is not None:
        found: Context = get()
        return found
    return next((each for each in gc.get_referents(task) if isinstance(each, Context)), None)


def _belongs(found: Context | None, process: Process) -> bool:
    if found is None:
        return False
    host = found.get(context.current_host)
    return (found.get(_process) if host is None else host.process) is process
