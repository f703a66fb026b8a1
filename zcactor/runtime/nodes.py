"""The nodes of a cluster as its head knows them: their workers, their resources, and where each process is reached.

The head's own agent starts workers itself (`zcactor.runtime.pool.Pool`); another node's agent is asked to, by calls
(`RemotePool`, and `zcactor.runtime.member` at the other end). What is above sees no difference.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from zcactor import ids
from zcactor.errors import ConnectionLost, InsufficientResources
from zcactor.runtime.place import Place
from zcactor.runtime.pool import WorkerRecord
from zcactor.runtime.resources import Ledger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from zcactor.config import Config

__all__ = [
    "SHARED_WORKERS", "DriverRecord", "NodeRecord", "Nodes", "OwnWorkers", "RemotePool", "Workers", "facts_of",
    "machine_of", "own_machine",
]  # fmt: skip

SHARED_WORKERS = max(1, len(os.sched_getaffinity(0)))
"""Processes that actors with ``process="shared"`` are spread over on each node: one per core."""


def machine_of(directory: Path) -> str:
    """What names the host and, on it, the run directory: processes that have it in common reach each other locally."""
    status = directory.stat()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{status.st_dev}-{status.st_ino}"


def own_machine(config: Config, directory: Path) -> str:
    """What `Process.machine` is: the name of the host, where processes in the run directory `directory` prefer to map
    each other's arenas; empty where they do not."""
    return machine_of(directory) if config.transports.startswith("local") else ""


class Workers(Protocol):
    """What starts and ends the workers of one node."""

    by_process: dict[bytes, WorkerRecord]

    def start(self, label: str, env: Mapping[str, str], driver: bytes, *, shared: bool) -> WorkerRecord:
        """Ask for a worker; see `zcactor.runtime.pool.Pool.start`."""
        ...

    def kill_all(self, cause: str | None) -> None:
        """End every worker at once."""
        ...


class OwnWorkers(Workers, Protocol):
    """What starts and ends the workers of the node that it runs on: `zcactor.runtime.pool.Pool`, by forks."""

    def start(
        self, label: str, env: Mapping[str, str], driver: bytes, *, shared: bool, process: bytes = b""
    ) -> WorkerRecord:
        """Likewise; `process` is the worker's name, by default a new one."""
        ...

    async def wait_all(self, timeout: float) -> None:
        """Wait until no worker is left, at most `timeout` seconds."""
        ...

    def drain_output(self) -> None:
        """Pass on what workers have printed up to now, and read no more."""
        ...

    def close(self) -> None:
        """End what is left. No loop is needed any more."""
        ...


class _RemoteWorker(WorkerRecord):
    """A worker of another node."""

    def __init__(self, pool: RemotePool, label: str, driver: bytes, *, shared: bool) -> None:
        super().__init__(ids.token(), pool.loop, label, driver, shared=shared)
        self._pool = pool

    def kill(self, cause: str | None = None) -> None:
        """See `zcactor.runtime.pool.WorkerRecord.kill`: the node's agent does it."""
        if not self.ended.done():
            self.doomed = True
            self.cause = self.cause or cause
            self._pool.tell("kill_worker", self.process, cause)


class RemotePool:
    """The workers of another node.

    Args:
        loop: the head's loop.
        tell: ``tell(method, *args)`` calls the node's agent and does not wait; nothing comes of it where the node is
            gone, which `lost` is called for.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tell: Callable[..., None], ended: Callable[[WorkerRecord], None]
    ) -> None:
        self.loop = loop
        self.tell = tell
        self.by_process: dict[bytes, WorkerRecord] = {}
        self._ended = ended

    def start(self, label: str, env: Mapping[str, str], driver: bytes, *, shared: bool) -> WorkerRecord:
        """Have the node start one. See `Workers.start`."""
        record = _RemoteWorker(self, label, driver, shared=shared)
        self.by_process[record.process] = record
        self.tell("start_worker", record.process, label, dict(env), driver, shared)
        return record

    def worker_ended(self, process: bytes, cause: str) -> None:
        """A worker's process is gone, or could not be started."""
        record = self.by_process.pop(process, None)
        if record is None:
            return
        cause = record.cause or cause
        if not record.ready.done():
            record.ready.set_exception(RuntimeError(cause))
            record.ready.exception()  # nobody may be waiting for it any more
        record.ended.set_result(cause)
        self._ended(record)

    def kill_all(self, cause: str | None) -> None:
        """See `Workers.kill_all`."""
        for record in list(self.by_process.values()):
            record.kill(cause)

    def lost(self, cause: str) -> None:
        """The node is gone, and every worker with it."""
        for process in list(self.by_process):
            self.worker_ended(process, cause)


class NodeRecord:
    """One node.

    Args:
        process: its agent's name, 16 bytes, which names the node as well.
        workers: starts its workers.
        facts: what `NodeInfo` shows of it: ``host``, ``pid``, ``address``, ``transports`` and ``machine``.
    """

    def __init__(self, process: bytes, workers: Workers, facts: Mapping[str, Any]) -> None:
        self.process = process
        self.id = process.hex()
        self.workers = workers
        self.facts = dict(facts)
        self.shared: list[WorkerRecord] = []
        self.actors = 0
        """That live on it or are about to."""
        self.heard: float | None = None
        """When the head has last heard from it, in seconds of its loop's clock; None for the head's own."""

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"node {self.id[:8]} ({self.facts['host']})"


class DriverRecord:
    """A program that has joined."""

    __slots__ = ("machine", "process")

    def __init__(self, process: bytes, machine: str) -> None:
        self.process = process
        self.machine = machine


class Nodes:
    """Which nodes there are, which of them an actor goes to, and where each process is.

    Args:
        own: the head's node.
        resources: of it, amounts by name.
    """

    def __init__(self, own: NodeRecord, resources: Mapping[str, float]) -> None:
        self.own = own
        self.by_id: dict[str, NodeRecord] = {own.id: own}
        self.ledger = Ledger()
        self.ledger.add(own.id, resources)
        self.addresses: dict[bytes, str] = {}
        """Where each process listens for peers of other hosts, by its name."""
        self.drivers: dict[bytes, DriverRecord] = {}

    def add(self, node: NodeRecord, resources: Mapping[str, float]) -> None:
        """A node has joined."""
        self.by_id[node.id] = node
        self.addresses[node.process] = node.facts["address"]
        self.ledger.add(node.id, resources)

    def remove(self, node: NodeRecord) -> None:
        """A node is gone."""
        del self.by_id[node.id]
        self.addresses.pop(node.process, None)
        self.ledger.remove(node.id)

    def find(self, process: bytes) -> str:
        """Where `process` listens.

        Raises:
            ConnectionLost: it has ended, or listens for nobody on other hosts.
        """
        address = self.addresses.get(process)
        if not address:
            raise ConnectionLost(f"process {process.hex()} is not known to the cluster: it has ended")
        return address

    def worker(self, process: bytes) -> tuple[NodeRecord, WorkerRecord] | None:
        """The worker of that name, and its node."""
        for node in self.by_id.values():
            record = node.workers.by_process.get(process)
            if record is not None:
                return node, record
        return None

    def home(self, process: bytes) -> NodeRecord:
        """The node that a process belongs to: a worker's or an agent's own, a driver's on the same host, or the
        head's."""
        found = self.worker(process)
        if found is not None:
            return found[0]
        driver = self.drivers.get(process)
        for node in self.by_id.values():
            if node.process == process or (driver is not None and node.facts["machine"] == driver.machine):
                return node
        return self.own

    def order(self, where: str | None, owner: bytes) -> Sequence[str]:
        """The nodes that an actor may go to, the preferred one first.

        ``"spread"`` prefers those with the fewest actors, ``"pack"`` those with the most; without a word it is the
        spawner's own node, and then the others in the order in which they joined.
        """
        nodes = list(self.by_id.values())
        if where == "spread":
            nodes.sort(key=lambda node: node.actors)
        elif where == "pack":
            nodes.sort(key=lambda node: -node.actors)
        elif where is not None:
            nodes = [node for node in nodes if node.id == where]
        else:
            home = self.home(owner)
            nodes.sort(key=lambda node: node is not home)
        return [node.id for node in nodes]

    def check(self, where: str | None, label: str) -> None:
        """Refuse a node that is not there.

        Raises:
            ValueError: it is not; the message lists those there are.
        """
        if where not in (None, "spread", "pack") and where not in self.by_id:
            raise ValueError(f"{label}.options: there is no node {where!r}; nodes: {', '.join(self.by_id)}")

    def worker_for(self, node: NodeRecord, label: str, options: Mapping[str, Any], driver: bytes) -> WorkerRecord:
        """A process for an actor: its own, or one of those that are shared. `driver` is the program that it is for.

        Raises:
            InsufficientResources: none can be started.
        """
        try:
            if options.get("process") != "shared":
                return node.workers.start(label, options.get("env") or {}, driver, shared=False)
            alive = [worker for worker in node.shared if not worker.leaving]
            if len(alive) >= SHARED_WORKERS:
                return min(alive, key=lambda worker: len(worker.actors))
            node.shared.append(node.workers.start("shared", {}, driver, shared=True))
            return node.shared[-1]
        except OSError as error:
            raise InsufficientResources(f"no process could be started for {label}: {error}; see ulimit -n") from error

    def unshare(self, worker: WorkerRecord) -> None:
        """A worker is over: no further actor goes there."""
        for node in self.by_id.values():
            if worker in node.shared:
                node.shared.remove(worker)

    def told(self) -> list[dict[str, Any]]:
        """What `zcactor.nodes` shows."""
        return [
            {
                "node_id": node.id, "alive": True, "workers": len(node.workers.by_process),
                "resources": self.ledger.total(node.id),
                **{name: node.facts[name] for name in ("host", "pid", "address", "transports")},
            }
            for node in self.by_id.values()
        ]  # fmt: skip


def facts_of(address: str, transports: Sequence[str], machine: str, place: Place | None = None) -> dict[str, Any]:
    """What a node tells of itself; None for `place` is where this process runs."""
    place = place or Place.here()
    return {
        "host": place.host, "pid": place.pid, "address": address, "transports": list(transports),
        "machine": machine,
    }  # fmt: skip
