"""The nodes of a cluster as its head knows them: their workers, their resources, and the addresses of all processes.

An embedded node's agent is the head, and starts workers itself (`zcactor.workers.pool.Pool`); another node's agent
starts them when it is asked by calls (`RemotePool`, and `zcactor.control.node_agent` at the other end). The code above
sees no difference.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from zcactor import ids
from zcactor.control.scheduler import Ledger, Order
from zcactor.errors import ConnectionLost, InsufficientResources
from zcactor.machine import usable_cpus
from zcactor.process.cluster import NodeService
from zcactor.process.place import Place
from zcactor.transport.registry import prefers_host
from zcactor.workers.worker_table import WorkerRecord, WorkerTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from zcactor.config import Config
    from zcactor.ids import ProcessId
    from zcactor.options import ActorSpec

__all__ = [
    "SHARED_WORKERS", "VISIBLE", "DriverRecord", "NodeRecord", "NodeTable", "OwnWorkers", "RemotePool", "Workers",
    "facts_of", "machine_of", "own_machine",
]  # fmt: skip

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""The variable that names the GPUs of a process."""

SHARED_WORKERS = usable_cpus()
"""Processes on each node over which actors with ``process="shared"`` are spread: one per core."""


def machine_of(directory: Path) -> str:
    """The name of a machine: a host and a run directory on it. Processes of the same machine reach each other
    locally."""
    status = directory.stat()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}-{status.st_dev}-{status.st_ino}"


def own_machine(config: Config, directory: Path) -> str:
    """The machine of a process in the run directory `directory`, whose processes prefer to map each other's arenas;
    empty where `config` does not prefer that."""
    return machine_of(directory) if prefers_host(config.transports) else ""


class Workers(Protocol):
    """The workers of one node: starts and ends them."""

    by_process: dict[ProcessId, WorkerRecord]

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """Ask for a worker; see `zcactor.workers.pool.Pool.start`."""
        ...

    def kill_all(self, cause: str | None) -> None:
        """Kill every worker."""
        ...


class OwnWorkers(Workers, Protocol):
    """The workers of the agent's own node, by forks: `zcactor.workers.pool.Pool`."""

    async def wait_all(self, timeout: float) -> None:
        """Wait until every worker has ended, at most `timeout` seconds."""
        ...

    def drain_output(self) -> None:
        """Pass on the output of workers up to now, and read no more."""
        ...

    def close(self) -> None:
        """End the remaining workers. Needs no loop."""
        ...


class _RemoteWorker(WorkerRecord):
    """A worker of another node."""

    def __init__(self, process: ProcessId, pool: RemotePool, label: str, driver: ProcessId, *, shared: bool) -> None:
        super().__init__(process, pool.loop, label, driver, shared=shared)
        self._pool = pool

    def kill(self, cause: str | None = None) -> None:
        """See `zcactor.workers.worker_table.WorkerRecord.kill`: the node's agent does it."""
        if not self.ended.done():
            self.doomed = True
            self.cause = self.cause or cause
            self._pool.tell(NodeService.kill_worker, self.process, cause)


class RemotePool(WorkerTable):
    """The workers of another node.

    Args:
        loop: the head's loop.
        tell: ``tell(method, *args)`` calls the node's agent and does not wait; the call has no effect where the node is
            gone, and then `lost` is called.
        ended: called once for each worker that ended, after `WorkerRecord.ended` is set.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tell: Callable[..., None], ended: Callable[[WorkerRecord], None]
    ) -> None:
        super().__init__(loop, ended)
        self.tell = tell
        self._cause = ""
        """The cause of the node's end; empty until then."""

    def start(
        self, label: str, env: Mapping[str, str], driver: ProcessId, *, shared: bool, process: ProcessId | None = None
    ) -> WorkerRecord:
        """Have the node start a worker. See `Workers.start`. Where the node was lost since it was chosen, the worker
        ends in the loop's next turn."""
        record = _RemoteWorker(process or ids.new_process(), self, label, driver, shared=shared)
        self.by_process[record.process] = record
        if self._cause:
            self.loop.call_soon(self._end, record, self._cause)
            return record
        self.tell(NodeService.start_worker, record.process, label, dict(env), driver, shared)
        return record

    def adopt(self, process: ProcessId, label: str, driver: ProcessId, *, shared: bool, pid: int) -> WorkerRecord:
        """Take in a worker that the node had before; `pid` is 0 where it has not reported that it serves."""
        record = _RemoteWorker(process, self, label, driver, shared=shared)
        record.pid = pid
        if pid:
            record.ready.set_result(None)
        self.by_process[process] = record
        return record

    def worker_ended(self, process: ProcessId, cause: str) -> None:
        """Note that a worker's process has ended, or could not be started."""
        record = self.by_process.get(process)
        if record is not None:
            self._end(record, cause)

    def lost(self, cause: str) -> None:
        """Note the end of the node, and of every worker with it."""
        self._cause = cause
        for process in list(self.by_process):
            self.worker_ended(process, cause)


class NodeRecord:
    """A node of the cluster.

    Args:
        process: its agent's process id, 16 bytes, which names the node as well.
        workers: starts its workers.
        facts: the node's facts in `NodeInfo`: ``host``, ``pid``, ``address`` and ``transports``, its ``machine``, and
            the UUIDs of its ``gpus``.
    """

    def __init__(self, process: ProcessId, workers: Workers, facts: Mapping[str, Any]) -> None:
        self.process = process
        self.id = process.hex()
        self.workers = workers
        self.facts = dict(facts)
        self.shared: list[WorkerRecord] = []
        self.removed = asyncio.Event()
        """Set when the node belongs to the cluster no more: it leaves, or cannot be reached."""
        self.gone = asyncio.Event()
        """Set when the node has ended, or is given up."""
        self.heard: float | None = None
        """The time when the head last heard from the node, in seconds of the loop's clock; None for the head's own
        node."""

    @property
    def label(self) -> str:
        """The node's name in messages."""
        return f"node {self.id[:8]} ({self.facts['host']})"

    def environment(self, gpus: Sequence[int]) -> dict[str, str]:
        """The variables that show a process these GPUs alone. There are none without GPUs, and on a node that does not
        know its GPUs, whose processes see what the node sees."""
        uuids: list[str] = self.facts["gpus"]
        return {VISIBLE: ",".join(uuids[number] for number in gpus)} if gpus and uuids else {}


class DriverRecord:
    """A program that has joined the cluster."""

    __slots__ = ("machine", "process")

    def __init__(self, process: ProcessId, machine: str) -> None:
        self.process = process
        self.machine = machine


class NodeTable:
    """The table of nodes: the choice of a node for an actor, and the place of each process.

    Args:
        own: the node whose agent the head is; None where the head's process is no agent.
        resources: of that node, amounts by name.
        machine: the head's machine; see `machine_of`.
    """

    def __init__(self, own: NodeRecord | None, resources: Mapping[str, float], machine: str = "") -> None:
        self.own = own
        self._machine = machine
        self.by_id: dict[str, NodeRecord] = {}
        self.ledger = Ledger()
        self.addresses: dict[ProcessId, str] = {}
        """The address at which each process listens for peers of other hosts, by process id."""
        self.drivers: dict[ProcessId, DriverRecord] = {}
        self._of_machine: dict[str, dict[str, NodeRecord]] = {}
        """The nodes by id, for each machine."""
        self._of_worker: dict[ProcessId, NodeRecord] = {}
        """The node of each worker whose end is not known, also where the node is gone."""
        self._made_for: dict[ProcessId, dict[ProcessId, None]] = {}
        """The workers that were started for each program."""
        if own is not None:
            self._include(own, resources)

    def _include(self, node: NodeRecord, resources: Mapping[str, float]) -> None:
        self.by_id[node.id] = node
        self._of_machine.setdefault(node.facts["machine"], {})[node.id] = node
        self.ledger.add(node.id, resources)

    def add(self, node: NodeRecord, resources: Mapping[str, float]) -> None:
        """Add a node that has joined."""
        self.addresses[node.process] = node.facts["address"]
        self._include(node, resources)

    def remove(self, node: NodeRecord) -> None:
        """Remove a node that is gone."""
        del self.by_id[node.id]
        machine = node.facts["machine"]
        del self._of_machine[machine][node.id]
        if not self._of_machine[machine]:
            del self._of_machine[machine]
        self.addresses.pop(node.process, None)
        self.ledger.remove(node.id)

    def has(self, node: NodeRecord | None) -> bool:
        """Whether `node` belongs to the cluster."""
        return node is not None and self.by_id.get(node.id) is node

    def has_ended(self, node: NodeRecord) -> bool:
        """Whether a node has left and reported the end of each of its workers, so that nothing of it may live on."""
        return not self.has(node) and not node.workers.by_process

    def find(self, process: ProcessId) -> str:
        """The address at which `process` listens for peers of other hosts.

        Raises:
            ConnectionLost: the process has ended, or does not listen for peers of other hosts.
        """
        address = self.addresses.get(process)
        if not address:
            raise ConnectionLost(f"process {process.hex()} is not known to the cluster: it has ended")
        return address

    def worker(self, process: ProcessId) -> tuple[NodeRecord, WorkerRecord] | None:
        """The worker with that process id, and its node."""
        node = self._of_worker.get(process)
        record = node.workers.by_process.get(process) if node is not None and self.has(node) else None
        return None if node is None or record is None else (node, record)

    def host_of(self, process: ProcessId) -> NodeRecord | None:
        """The node of a worker whose end is not known, also where the node is gone; None for any other process."""
        return self._of_worker.get(process)

    def workers_for(self, driver: ProcessId) -> list[ProcessId]:
        """The workers that were started for a program."""
        return list(self._made_for.get(driver, ()))

    def home(self, process: ProcessId) -> NodeRecord | None:
        """The node to which a process belongs: the own node of a worker or an agent, a node on the same host for a
        driver, or a node on the head's host. None where there is no such node."""
        found = self.worker(process)
        if found is not None:
            return found[0]
        driver = self.drivers.get(process)
        near = self.by_id.get(process.hex()) if driver is None else self._on(driver.machine)
        return near or self.own or self._on(self._machine)

    def is_beside_head(self, node: NodeRecord) -> bool:
        """Whether a node is on the head's host."""
        return bool(node.facts["machine"] == self._machine)

    def _on(self, machine: str) -> NodeRecord | None:
        """The first node of a machine."""
        return next(iter(self._of_machine.get(machine, {}).values()), None)

    def order(self, where: str | None, owner: ProcessId) -> Order:
        """The nodes that an actor may go to. Without `where`, the node of the actor's owner is preferred."""
        return Order(where, lambda: _id_of(self.home(owner)))

    def check(self, where: str | None, label: str) -> None:
        """Refuse an id of a node that the cluster does not have.

        Raises:
            ValueError: the node is unknown; the message lists the nodes.
        """
        if where not in (None, "spread", "pack") and where not in self.by_id:
            raise ValueError(f"{label}.options: there is no node {where!r}; nodes: {', '.join(self.by_id)}")

    def worker_for(
        self, node: NodeRecord, label: str, spec: ActorSpec, driver: ProcessId, gpus: Sequence[int] = (),
        process: ProcessId | None = None,
    ) -> WorkerRecord:  # fmt: skip
        """A worker for an actor: one of its own, or one of the shared workers.

        Args:
            node: where it is started.
            label: the label before its output.
            spec: the options of the actor. Its own environment prevails over the one that shows it its GPUs.
            driver: the program for which it works.
            gpus: the numbers of the actor's GPUs on the node.
            process: the process id of a worker of its own; None for a new one.

        Raises:
            InsufficientResources: the worker cannot be started.
        """
        try:
            if spec.process != "shared":
                env = {**node.environment(gpus), **spec.env}
                return self._start(node, label, env, driver, process, shared=False)
            alive = [worker for worker in node.shared if not worker.leaving]
            if len(alive) >= SHARED_WORKERS:
                return min(alive, key=lambda worker: len(worker.actors))
            node.shared.append(self._start(node, "shared", {}, driver, None, shared=True))
            return node.shared[-1]
        except OSError as error:
            raise InsufficientResources(f"no process could be started for {label}: {error}; see ulimit -n") from error

    def _start(
        self, node: NodeRecord, label: str, env: Mapping[str, str], driver: ProcessId, process: ProcessId | None,
        *, shared: bool,
    ) -> WorkerRecord:  # fmt: skip
        worker = node.workers.start(label, env, driver, shared=shared, process=process)
        self._enter(node, worker)
        return worker

    def _enter(self, node: NodeRecord, worker: WorkerRecord) -> None:
        self._of_worker[worker.process] = node
        self._made_for.setdefault(worker.driver, {})[worker.process] = None

    def adopt(self, node: NodeRecord, worker: WorkerRecord, address: str) -> None:
        """Note a worker that a node had before it returned; `address` is empty where the worker has not reported. No
        further actor goes there: the indices that ended actors had are not known, and handles of theirs may be left."""
        self._enter(node, worker)
        if address:
            self.addresses[worker.process] = address

    def unshare(self, worker: WorkerRecord) -> None:
        """Note that a worker is about to end: no further actor goes there."""
        node = self._of_worker.get(worker.process)
        if node is not None and worker in node.shared:
            node.shared.remove(worker)

    def forget(self, worker: WorkerRecord) -> None:
        """Forget a worker that has ended."""
        self.unshare(worker)
        self.addresses.pop(worker.process, None)
        self._of_worker.pop(worker.process, None)
        made = self._made_for.get(worker.driver, {})
        made.pop(worker.process, None)
        if not made:
            self._made_for.pop(worker.driver, None)

    def told(self) -> list[dict[str, Any]]:
        """The facts of all nodes, as `zcactor.nodes` shows them."""
        return [
            {
                "node_id": node.id, "alive": True, "workers": len(node.workers.by_process),
                "resources": self.ledger.total(node.id),
                **{name: node.facts[name] for name in ("host", "pid", "address", "transports")},
            }
            for node in self.by_id.values()
        ]  # fmt: skip


def _id_of(node: NodeRecord | None) -> str | None:
    return None if node is None else node.id


def facts_of(
    address: str, transports: Sequence[str], machine: str, place: Place | None = None, gpus: Sequence[str] = ()
) -> dict[str, Any]:
    """The facts that a node tells about itself.

    Args:
        address: where it listens.
        transports: the allowed ones.
        machine: see `machine_of`.
        place: of its agent; by default this process.
        gpus: the UUIDs of the GPUs that it offers; none where they are only counted.
    """
    place = place or Place.here()
    return {
        "host": place.host, "pid": place.pid, "address": address, "transports": list(transports),
        "machine": machine, "gpus": list(gpus),
    }  # fmt: skip
