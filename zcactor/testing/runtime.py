"""A runtime wholly in this process: a head, a driver, and a worker for each actor, over loopback connections."""

from __future__ import annotations

import asyncio
import os
from contextvars import Context
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from zcactor import ids
from zcactor.api.handle import ActorHandle
from zcactor.assembly.agents import assemble_agent
from zcactor.assembly.devices import offered_gpus
from zcactor.assembly.fork_guard import watch_forks
from zcactor.config import load_config
from zcactor.control.head import Head
from zcactor.control.node_table import facts_of
from zcactor.driver import driver as drivers
from zcactor.driver.runtimes import Runtime
from zcactor.errors import NoSuchActor
from zcactor.exception_pickling import shown_class
from zcactor.marshal.importable import search_here
from zcactor.node.agent_main import AGENT_ARENA, search_path
from zcactor.node.worker_main import serve
from zcactor.objectstore.groups import default_capacity, within_limits
from zcactor.process.cluster import HeadService
from zcactor.testing.inner import HOST, InnerProcess, choose_among
from zcactor.testing.network import InnerNetwork
from zcactor.workers.worker_table import WorkerRecord, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zcactor.ids import ProcessId
    from zcactor.testing.faults import LinkFaults

__all__ = ["LoopbackRuntime", "end_runtime", "start_runtime"]


class _Worker(WorkerRecord):
    """One worker. `WorkerRecord.pid` is that of this very process, so nothing may send it a signal."""

    def __init__(
        self, workers: _InnerWorkers, process: ProcessId, label: str, driver: ProcessId, *, shared: bool
    ) -> None:
        super().__init__(process, workers.loop, label, driver, shared=shared)
        self.workers = workers
        self.inner: InnerProcess | None = None

    def kill(self, cause: str | None = None) -> None:
        """See `WorkerRecord.kill`."""
        if self.ended.done() or self.doomed:
            return
        self.doomed = True
        self.cause = cause
        if self.inner is not None:
            self.inner.kill()
            self.workers.end_soon(self, "its process was killed by signal 9 (SIGKILL)")


class _InnerWorkers(WorkerTable):
    """The workers of the head's node. Satisfies `zcactor.control.node_table.OwnWorkers`.

    Args:
        head: the head's process.
        make: ``make(process id)`` makes the process of a worker.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(
        self, head: InnerProcess, make: Callable[[bytes], InnerProcess], ended: Callable[[WorkerRecord], None]
    ) -> None:
        super().__init__(head.process.loop, ended)
        self._head = head
        self._make = make
        self._environment = Environment()

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """See `zcactor.workers.pool.Pool.start`. All processes share one environment: `env` is set in it until the
        worker ends."""
        record = _Worker(self, process or ids.new_process(), label, driver, shared=shared)
        self.by_process[record.process] = record
        self.loop.call_soon(self._fork, record, dict(env), context=self._head.context)
        return record

    def _fork(self, record: _Worker, env: Mapping[str, str]) -> None:
        if record.doomed:
            self._end(record, "it was not needed any more")
            return
        inner = record.inner = self._make(record.process)
        inner.label = record.label
        self._environment.enter(record, env)
        inner.start(self._work(record, inner))

    async def _work(self, record: _Worker, inner: InnerProcess) -> None:
        await serve(inner.process, self._head.process.process.hex())
        if not record.doomed:
            record.doomed = True
            await inner.end()
            self.end_soon(record, "its process exited with status 0")

    def end_soon(self, record: WorkerRecord, cause: str) -> None:
        """Report the end of a worker to the head, in the next turn of the loop."""
        self.loop.call_soon(self._end, record, cause, context=self._head.context)

    def _leave(self, record: WorkerRecord) -> None:
        self._environment.leave(record)

    def drain_output(self) -> None:
        """Return at once: actors print to the standard output of the test."""

    def close(self) -> None:
        """See `zcactor.control.node_table.OwnWorkers.close`. The processes end with their loop."""
        self._environment.restore()


class Environment:
    """The variables that actors have asked for, in the one environment of this process. The latest of several wishes
    holds while its worker lives."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}
        self._wishes: dict[Any, Mapping[str, str]] = {}

    def enter(self, worker: Any, env: Mapping[str, str]) -> None:
        """Set the variables of a worker."""
        for name in env:
            self._before.setdefault(name, os.environ.get(name))
        self._wishes[worker] = env
        os.environ.update(env)

    def leave(self, worker: Any) -> None:
        """Set each variable of a worker as others wish it, or as it was."""
        for name in self._wishes.pop(worker, ()):
            self._set(name)

    def _set(self, name: str) -> None:
        wished = [env[name] for env in self._wishes.values() if name in env]
        value = wished[-1] if wished else self._before[name]
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def restore(self) -> None:
        """Set all variables as they were. Idempotent."""
        self._wishes.clear()
        for name in self._before:
            self._set(name)


_PATIENCE: Final = 5.0
"""Seconds that processes get to close once they were told: the rest is reported as a leak."""


class LoopbackRuntime(Runtime):
    """The runtime of a test. `zcactor.init` and `zcactor.shutdown` know it, so a second `init` is refused.

    Attributes:
        all: every process so far, the head's and the driver's first.
        network: the connections between them.
    """

    def __init__(self, network: InnerNetwork, made: list[InnerProcess], node: Head, workers: _InnerWorkers) -> None:
        self.all = made
        self.network = network
        head, driver = made
        self._workers = workers
        self._over = False
        choose_among(driver.process)
        super().__init__(driver.process.config, driver.process, _NoDirectory())  # type: ignore[arg-type]
        self._head = head.start(self._serve(head, node))
        self._keeper = self.process.loop.create_task(self._keep(), name="zcactor.testing", context=Context())

    def __repr__(self) -> str:
        return f"<zcactor runtime in this process, head {self.node_id[:8]}>"

    @property
    def processes(self) -> list[int]:
        """The pids of the processes that the runtime has started: always none."""
        return []

    def crash(self, handle: object) -> None:
        """End the process of an actor at once, as SIGKILL does: nothing in it is closed, and an actor with
        `max_restarts` starts again. A method that runs in a thread goes on to its end.

        Raises:
            TypeError: `handle` is no handle.
            NoSuchActor: its process has ended.
        """
        if not isinstance(handle, ActorHandle):
            raise TypeError(f"zc_runtime.crash takes an actor's handle, not {shown_class(type(handle))}")
        record = self._workers.by_process.get(ids.ProcessId(handle._remote.location[0]))
        if record is None:
            raise NoSuchActor(f"zc_runtime.crash: the process of {handle._remote.label} has ended")
        record.kill()

    def label(self, process: bytes) -> str:
        """The name of one of its processes in messages."""
        return next(inner.label for inner in self.all if inner.process.process == process)

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._over

    async def _serve(self, head: InnerProcess, node: Head) -> None:
        await node.finished
        await head.end()

    async def _keep(self) -> None:
        """Close all processes where the loop ends before the runtime does: `asyncio.run` cancels every task then."""
        try:
            await self.process.loop.create_future()
        finally:
            if not self._over:
                self._over = True
                self._workers.kill_all("the event loop has ended")
                await self._workers.wait_all(_PATIENCE)
                await asyncio.wait([inner.kill() for inner in self.all], timeout=_PATIENCE)
                left = [task for inner in self.all for task in inner.tasks()]
                if left:
                    await asyncio.wait(left, timeout=_PATIENCE)

    async def _end_actors(self, grace: float) -> None:
        await self.process.head.ask(HeadService.shutdown, grace)

    def _give_up(self) -> None:
        self._workers.kill_all("the runtime was shut down")
        self.all[0].kill()

    async def _ended(self) -> None:
        ending = [inner.end() for inner in self.all]
        await asyncio.wait([self._head, *ending], timeout=_PATIENCE)
        self._over = True
        self._keeper.cancel()
        await asyncio.wait([self._keeper])

    def _let_go(self) -> None:
        self.process.tasks.closing = True
        if self._over:
            super()._let_go()

    def end_now(self) -> None:
        """See `Runtime.end_now`."""
        self._over = True
        self._workers.close()
        for inner in self.all:
            inner.abandon()
        super().end_now()


class _NoDirectory:
    """Stands for the run directory: a runtime without sockets and processes has none."""

    def remove(self) -> None:
        """See `zcactor.workers.run_directory.RunDirectory.remove`."""

    def forget(self) -> None:
        """See `zcactor.workers.run_directory.RunDirectory.forget`."""


async def start_runtime(faults: LinkFaults | None = None, **settings: Any) -> LoopbackRuntime:
    """Start a runtime in this process, on the running loop. It ends by `zcactor.shutdown`.

    Args:
        faults: of the connections between the driver and its actors; None for none.
        settings: fields of `zcactor.Config`; the environment and the settings' file give the others, as for
            `zcactor.init`.

    Raises:
        AlreadyInitialized: a runtime is running in this process.
        TypeError, ValueError: a setting is wrong.
        OutOfMemory: the system has no address space left.
    """
    drivers.check_free()
    config = replace(load_config(settings)[0], address=None)
    watch_forks()
    network = InnerNetwork(faults)
    name, capacity = ids.new_process(), config.store_capacity or default_capacity()
    made: list[InnerProcess] = []

    def make(role: str, process: bytes, nbytes: int = capacity) -> InnerProcess:
        inner = InnerProcess(network, config, nbytes, role, process, name)
        made.append(inner)
        return inner

    try:
        head, driver = make("agent", name, within_limits(AGENT_ARENA)), make("driver", ids.new_process())
        workers = _InnerWorkers(head, lambda process: make("worker", process), lambda record: node.worker_ended(record))
        # GPUs are counted, and given to no actor: all processes share one environment.
        resources = drivers.resources_of(config, {}, offered_gpus(config, os.environ))
        facts = facts_of("", ["loopback"], HOST, head.process.place)
        node = head.context.run(
            assemble_agent, head.process, workers, facts, resources, drivers.HEARTBEAT, drivers.HANG_AFTER
        )
        assert isinstance(node, Head)
        node.driver = driver.process.process
        node.end_report = 0.0  # an end is reported at once
        for inner in made:
            await inner.listen()
        await driver.process.connections.connect(name)
        runtime = LoopbackRuntime(network, made, node, workers)
    except BaseException:
        for inner in made:
            await inner.end()
        raise
    search_here(search_path())
    drivers.adopt(runtime)
    return runtime


async def end_runtime(runtime: LoopbackRuntime) -> None:
    """Shut `runtime` down, unless the test has done that."""
    if not runtime.closed:
        await drivers.shutdown()
