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
from zcactor.marshal.importable import search_here
from zcactor.node.agent_main import AGENT_ARENA, search_path
from zcactor.objectstore.groups import default_capacity, within_limits
from zcactor.testing.inner import HOST, InnerProcess, choose_among
from zcactor.testing.network import InnerNetwork
from zcactor.testing.workers import InnerWorkers

if TYPE_CHECKING:
    from zcactor.testing.faults import LinkFaults

__all__ = ["LoopbackRuntime", "end_runtime", "start_runtime"]

_PATIENCE: Final = 5.0
"""Seconds that processes get to close once they were told: the rest is reported as a leak."""


class LoopbackRuntime(Runtime):
    """The runtime of a test. `zcactor.init` and `zcactor.shutdown` know it, so a second `init` is refused.

    Attributes:
        all: every process so far, the head's and the driver's first.
        network: the connections between them.
    """

    def __init__(self, network: InnerNetwork, made: list[InnerProcess], node: Head, workers: InnerWorkers) -> None:
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
            raise TypeError(f"zc_runtime.crash takes an actor's handle, not {type(handle).__name__}")
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
        await self.process.head.ask_agent("shutdown", grace)

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
        workers = InnerWorkers(head, lambda process: make("worker", process), lambda record: node.worker_ended(record))
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
