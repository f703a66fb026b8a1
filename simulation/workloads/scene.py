"""The scene that a workload gets, and the methods that it needs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from zcactor.errors import ZcactorError

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Coroutine

    from simulation.cluster import Cluster
    from simulation.loop import SimLoop
    from simulation.record import Operation, Record
    from zcactor.assembly.process import Process
    from zcactor.config import Config

__all__ = ["Program", "Scene", "Workload"]


class Program:
    """A further driver that a workload has started.

    Args:
        cluster: of the run.
        loop: of the driver's process.
    """

    def __init__(self, cluster: Cluster, loop: SimLoop) -> None:
        self._cluster = cluster
        self._loop = loop

    async def ended(self) -> None:
        """Wait until the process has ended, by itself or by a fault."""
        while not self._loop.dead:  # noqa: ASYNC110  # a process tells nobody that it ends
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        self._cluster.kill(self._loop, "its process was killed by signal 9 (SIGKILL)")


class Scene:
    """The run as a program in it sees it.

    Args:
        record: of the run.
        rng: the workload's own.
        nodes: the number of nodes.
        duration: virtual seconds of work.
        cluster: the cluster in which workloads start processes.
    """

    def __init__(self, record: Record, rng: random.Random, nodes: int, duration: float, cluster: Cluster) -> None:
        self.record = record
        self.rng = rng
        self.nodes = nodes
        self.end = float("inf")
        """Virtual time after which workloads begin nothing new."""
        self.duration = duration
        self._cluster = cluster

    def spread(self, max_restarts: int) -> dict[str, Any]:
        """Options of an actor on any node, which may share its process with others."""
        options: dict[str, Any] = {"node": "spread", "max_restarts": max_restarts}
        if self.rng.random() < 0.3:
            options["process"] = "shared"
        return options

    @property
    def over(self) -> bool:
        """Whether the time for work has passed."""
        return self.record.world.now >= self.end

    @property
    def beheaded(self) -> bool:
        """Whether the cluster has no head any more: no actor lives on, and none is made. A head whose log outlives it
        comes back."""
        cluster = self._cluster
        return cluster.book is None and (cluster.head_host is None or cluster.head_host.agent is None)

    @property
    def settings(self) -> Config:
        """The settings of every process."""
        return self._cluster.config

    async def pause(self, mean: float) -> None:
        """Wait for a drawn while, `mean` seconds on average."""
        await asyncio.sleep(self.rng.expovariate(1 / mean))

    def start(self, name: str, program: Callable[[Process], Coroutine[Any, Any, None]]) -> Program:
        """Run `program` as a driver, to its end, on a drawn host, which may have no node at the moment."""
        cluster = self._cluster

        async def whole(process: Process) -> None:
            await program(process)
            await process.close()
            cluster.kill(loop, "its process exited with status 0")

        hosts = [host for host in cluster.hosts if not cluster.network.is_off(host)]
        loop = cluster.start_driver(name, self.rng.choice(hosts), whole)
        return Program(cluster, loop)

    async def ask(self, kind: str, method: Callable[..., Awaitable[Any]], *args: Any) -> tuple[Operation, Any]:
        """Make a call and note its end. Returns the call, and its value or None.

        Args:
            kind: of the call.
            method: called with the call's number, and `args`.
        """
        operation = self.record.begin(kind)
        return operation, await self.outcome(operation, lambda: method(operation.number, *args))

    async def outcome(self, operation: Operation, make: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call that has begun and note its end, also where it cannot be made at all. Returns its value, or
        None."""
        try:
            value = await make()
        except (ZcactorError, asyncio.CancelledError) as error:
            self.record.fail(operation, error)
        else:
            self.record.end(operation, "ok")
            return value
        return None


class Workload(Protocol):
    """Part of a program. Its methods run in a driver, in this order, and raise only for defects."""

    name: ClassVar[str]

    def __init__(self, scene: Scene) -> None: ...

    async def prepare(self) -> None:
        """Make the actors of the workload, before any fault."""

    async def run(self) -> None:
        """Work until the scene is over, and until every call has ended."""

    async def finish(self) -> None:
        """Give everything back."""
