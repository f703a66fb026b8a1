"""The services of the head, of the agents of nodes, and of workers, as their callers see them.

Callers import these declarations alone. The classes that answer are in `zcactor.control` and `zcactor.node`, which few
processes import.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from zcactor.process.epochs import KnownEpoch
from zcactor.rpc.services import remote

if TYPE_CHECKING:
    from collections.abc import Callable

    from zcactor.ids import ActorId, ProcessId
    from zcactor.marshal.packed import Packed
    from zcactor.process.sessions import Sessions

__all__ = [
    "HeadNews",
    "HeadService",
    "MembershipService",
    "NodeService",
    "OwnNodeService",
    "WorkerService",
]


class HeadService(ABC):
    """The requests of every process to the head, about actors and the cluster: `zcactor.control.head.Head`."""

    @remote(70)
    @abstractmethod
    async def reserve(
        self, spec: dict[str, Any], class_name: str, interface: Any, recipe: Packed | None, request: bytes,
        actor_id: ActorId, object_id: int, spawner: bytes,
    ) -> tuple[Any, bool]:  # fmt: skip
        """Reserve an actor's name, its resources and its process. A repeated request gets the first one's answer.

        Args:
            spec: the result of `zcactor.options.ActorSpec.plain`.
            class_name: of its class.
            interface: the result of `Interface.wire`.
            recipe: its class and arguments, of an actor that may restart.
            request, actor_id, object_id: the ids that the spawner has made; see `zcactor.ids.SpawnIds`.
            spawner: the asking worker, when its node's agent asks for it; else empty.

        Returns:
            The handle; whether the actor existed already (``get_if_exists``). The caller constructs a new actor in the
            worker, and reports that by `constructed`.

        Raises:
            NameTaken: another actor has the name.
            ActorDied: the actor has ended meanwhile.
            InsufficientResources: the request fits into no node, or no process could be started.
            ConnectionLost: the node is shutting down.
            HeadUnavailable: the head's log does not take the actor.
            ValueError: the node is unknown, or another actor has one of the ids.
        """

    @remote(71)
    @abstractmethod
    async def constructed(self, actor_id: ActorId, failure: str | None) -> None:
        """Note that the constructor has returned. `failure` is the cause where the actor could not be constructed,
        empty when its process was lost. A repeated report changes nothing.

        Raises:
            ActorDied: it was constructed, and its process has ended before that was recorded, or a head that has taken
                the cluster over had given the spawn up.
            HeadUnavailable: the head's log does not take that the actor lives. The spawner gives it up.
        """

    @remote(72)
    @abstractmethod
    async def waits(self, class_name: str, spawner: bytes) -> str:
        """The reasons why the caller's spawns of a class wait, as a line. Each spawn is counted in one line only: the
        line is empty when no further spawn waits."""

    @remote(73)
    @abstractmethod
    async def locate(self, actor_id: ActorId, calls_wait: bool) -> tuple[str, bytes, int, str]:
        """The place of an actor: its state, its process, its index there, and the cause of its end; see
        `zcactor.peers.head_link.HeadLink.locate`."""

    @remote(74)
    @abstractmethod
    async def process_of(self, actor_id: ActorId) -> bytes:
        """The process that hosts an actor.

        Raises:
            NoSuchActor: the actor is dead.
        """

    @remote(75)
    @abstractmethod
    async def get_actor(self, name: str, namespace: str) -> Any:
        """The handle of a named actor.

        Raises:
            TypeError, ValueError: no actor or namespace can have such a name; see `zcactor.options.checked_name`.
            NoSuchActor: no living actor has the name.
            HeadUnavailable: the head's log does not take what was decided before, such as the end of an actor.
        """

    @remote(76)
    @abstractmethod
    async def kill(self, actor_id: ActorId) -> None:
        """End an actor at once. Returns when its process has ended, also where the request is repeated.

        Raises:
            NoSuchActor: the actor is unknown.
            HeadUnavailable: the head's log does not take it, and the actor lives on; or it does not answer, and the
                actor ends once the log has taken it.
        """

    @remote(77)
    @abstractmethod
    async def stop(self, actor_id: ActorId) -> None:
        """End an actor after its queued calls. Returns when its process has ended; cancelling ends only the wait.
        Raises as `kill`."""

    @remote(78)
    @abstractmethod
    async def nodes(self) -> list[dict[str, Any]]:
        """The facts of every node, as inspection shows them."""

    @remote(79)
    @abstractmethod
    async def actors(self) -> list[dict[str, Any]]:
        """The facts of every actor that lives or whose death is remembered, as inspection shows them."""

    @remote(80)
    @abstractmethod
    async def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """The total and the free amounts of the cluster's resources, by name."""

    @remote(81)
    @abstractmethod
    async def leader(self) -> dict[str, Any]:
        """The facts about this head: ``address``, ``pid``, ``epoch`` (of its term), ``log`` (empty for one in memory),
        ``state`` (``"leading"``, ``"taking over"`` until all is decided, or ``"adrift"`` while the log does not renew
        its term) and ``standbys``, the addresses of the heads that would lead in its place. Where it may not act
        without certain nodes there is also ``waits_for``, with their labels."""

    @remote(82)
    @abstractmethod
    async def stay(self, epoch: int) -> tuple[int, float | None]:
        """Tell a node or a program whether it may stay with this head.

        Args:
            epoch: the greatest one that the caller knows.

        Returns:
            This head's epoch, and the age of its knowledge; see `zcactor.control.quorum.Quorum.age`.
        """

    @remote(83)
    @abstractmethod
    async def give_way(self, epoch: int) -> bool:
        """End this head where its term has that epoch and another head stands by, which leads then. Returns whether
        that is so, unless the answer is lost with this head: a later one returns False."""

    @remote(84)
    @abstractmethod
    async def force(self) -> list[str]:
        """Have this head act that waits for nodes; see `zcactor.control.forcing.force`."""

    @remote(85)
    @abstractmethod
    async def shutdown(self, grace: float) -> None:
        """End every actor and then the node, within `grace` seconds. An embedded node's actors are stopped in order, as
        those of a program that leaves a cluster are. Otherwise idle actors are closed, and actors with running calls
        are killed. Cancelling ends only the wait; a second call without grace ends the first one's grace."""


class MembershipService(ABC):
    """The requests of nodes and programs to the head, about their membership, and of every process about others:
    `zcactor.control.membership.Membership`.

    `epoch` is the greatest one that the calling node knows. A method with it raises `Deposed` where that is not this
    head's.
    """

    @remote(100)
    @abstractmethod
    async def join_node(self, facts: dict[str, Any], resources: dict[str, float]) -> tuple[float, str]:
        """Let the node whose agent is the caller join the cluster.

        Args:
            facts: see `zcactor.control.node_table.facts_of`; a node of a run has its ``rank`` there, and one that has
                started in the place of another the id of that, ``follows``.
            resources: amounts by name.

        Returns:
            Seconds for which the node looks for a head that is away, and the name of the head's log.

        Raises:
            ConnectionLost: the cluster takes no nodes, or has a node of that rank.
            HeadUnavailable: the head's log does not take the node.
        """

    @remote(101)
    @abstractmethod
    async def return_node(
        self, facts: dict[str, Any], resources: dict[str, float], workers: list[Any], held: list[int]
    ) -> list[int] | None:
        """Let a node go on in the cluster, which had an earlier head when it joined.

        Args:
            facts, resources: as in `join_node`.
            workers: its workers, each a `zcactor.control.failover.ReportedWorker` as a plain tuple.
            held: the actors that it leases for its workers, by object id.

        Returns:
            The actors of `held` that live, leased to the caller; None where this head has given the node up, or never
            had it.
        """

    @remote(102)
    @abstractmethod
    async def leave_node(self, epoch: int) -> None:
        """Take the calling node out of the table: it is about to end its workers, and takes no more."""

    @remote(103)
    @abstractmethod
    async def drain(self, name: str, timeout: float | None, again: bool) -> dict[str, Any]:
        """Move a node's actors elsewhere and have it leave; see `zcactor.control.draining.Draining.drain`."""

    @remote(104)
    @abstractmethod
    async def worker_started(self, epoch: int, process: ProcessId, pid: int, address: str) -> None:
        """Note that a worker of the calling node has started."""

    @remote(105)
    @abstractmethod
    async def worker_ended(self, epoch: int, process: ProcessId, cause: str) -> None:
        """Note that a worker of the calling node has ended, or could not be started."""

    @remote(106)
    @abstractmethod
    async def worker_said(self, epoch: int, driver: ProcessId, stream: str, text: str) -> None:
        """Show the output of a worker on the calling node at its program, `driver`."""

    @remote(107)
    @abstractmethod
    async def join_driver(self, address: str, machine: str) -> tuple[float, str]:
        """Let the calling program use the cluster, until it leaves or its connection ends.

        Args:
            address: the address at which it listens for peers of other hosts.
            machine: see `zcactor.control.node_table.machine_of`.

        Returns:
            As `join_node`.

        Raises:
            ConnectionLost: the cluster takes no programs.
        """

    @remote(108)
    @abstractmethod
    async def return_driver(self, address: str, machine: str, held: list[int]) -> list[int]:
        """Let a program go on in the cluster, which had an earlier head when it joined, or whose head it did not reach
        for a while.

        Args:
            address, machine: as in `join_driver`.
            held: the actors of which it has handles, by object id.

        Returns:
            The actors of `held` that live, leased to the caller.
        """

    @remote(109)
    @abstractmethod
    async def leave_driver(self, grace: float) -> None:
        """Stop the actors of the calling program, which is about to go: in order within `grace` seconds, and then at
        once."""

    @remote(110)
    @abstractmethod
    async def find(self, process: ProcessId) -> str:
        """The address at which a process listens for peers of other hosts."""

    @remote(111)
    @abstractmethod
    async def call_back(self, process: ProcessId, caller: ProcessId) -> bool:
        """Ask a program to connect to `caller`, which cannot connect to it. Returns whether it has done so; other
        processes than programs are not asked: a warning names a node that accepts no connections when it joins."""

    @remote(112)
    @abstractmethod
    async def silence(self, process: ProcessId) -> tuple[float, str]:
        """The seconds since the last sign of life from the node of `process`, and the address of the process. The
        seconds are 0 for the head's own node and for drivers, and -1 for a node that is fenced or given up and for an
        unknown process."""


class OwnNodeService(ABC):
    """The requests of a worker to the agent of its node, which is that of the head on the head's own node."""

    @remote(114)
    @abstractmethod
    async def worker_ready(self, process: ProcessId, pid: int, address: str) -> None:
        """Note that a worker has started and listens, at `address` for peers of other hosts."""

    @remote(115)
    @abstractmethod
    async def worker_broken(self, cause: str) -> None:
        """End the calling worker, a process of this node which asks for it because it cannot go on.

        Args:
            cause: the cause of its end, for its actors' callers.
        """


class NodeService(OwnNodeService):
    """The requests of the head to the agent of another node, and those of that node's workers:
    `zcactor.control.node_agent.NodeAgent`.

    `epoch` is that of the head which orders something. A method with it raises `Deposed` where a later head is known.
    """

    @remote(116)
    @abstractmethod
    async def relay(self, number: int, args: list[Any]) -> Any:
        """Ask the head on behalf of a worker of this node.

        Args:
            number: of the head's remote method.
            args: its arguments.

        Raises:
            ValueError: workers may not ask for that.
        """

    @remote(117)
    @abstractmethod
    async def hold_actor(self, object_id: int) -> int:
        """Lease an actor to a worker of this node. All workers share one lease of the agent at the head.

        Args:
            object_id: the id by which the head knows the actor.

        Returns:
            The id of the object that the worker has leased here; 0 where the actor is gone, or the head.
        """

    @remote(118)
    @abstractmethod
    async def run_over(self, epoch: int, status: int, text: str) -> None:
        """Note that the run to which this node belongs is over: the program's exit status, and a line for people."""

    @remote(119)
    @abstractmethod
    async def start_worker(
        self, epoch: int, worker: ProcessId, label: str, env: dict[str, str], driver: ProcessId, shared: bool
    ) -> None:
        """Start a worker with the process id `worker`, and report its start and its end."""

    @remote(120)
    @abstractmethod
    async def kill_worker(self, epoch: int, worker: ProcessId, cause: str | None) -> None:
        """Send SIGKILL to a worker and to all processes that it has started."""

    @remote(121)
    @abstractmethod
    async def serves(self, epoch: int) -> None:
        """Answer a head that asks whether this node serves it."""

    @remote(122)
    @abstractmethod
    async def hold_recipe(self, epoch: int, key: int, recipe: Packed) -> bool:
        """Hold the class and arguments of an actor for this head and later ones; see `zcactor.control.recipes`. Returns
        whether there is room for them.

        Raises:
            ObjectLost, OutOfMemory: the arrays among them did not arrive.
        """

    @remote(123)
    @abstractmethod
    async def recipe(self, epoch: int, key: int) -> Packed | None:
        """The class and arguments of an actor; None where they are not held here."""

    @remote(124)
    @abstractmethod
    async def drop_recipe(self, epoch: int, key: int) -> None:
        """Hold the class and arguments of an actor no longer, which has ended or has other holders."""

    @remote(125)
    @abstractmethod
    async def keep_recipes(self, epoch: int, keys: list[int]) -> None:
        """Drop all but these: a new head knows of no others."""

    @remote(126)
    @abstractmethod
    async def end(self, epoch: int, grace: float, again: bool) -> None:
        """End every worker and then this node, which starts `again` if that is wanted. Returns before that."""


class WorkerService(ABC):
    """The requests to a worker: `zcactor.node.worker_main.Worker`.

    `epoch` is that of the head at whose word the worker does something. A method with it raises `Deposed` where a later
    head is known.
    """

    @remote(24)
    @abstractmethod
    async def create(
        self, index: int, actor_id: ActorId, object_id: int, restarts: int, spec: dict[str, Any], interface: bytes,
        recipe: Packed, epoch: int | None,
    ) -> None:  # fmt: skip
        """Make the actor for which the agent has reserved `index`.

        Args:
            index, actor_id, object_id, restarts, recipe: see `zcactor.control.actor_record.ActorRecord`.
            spec: the result of `zcactor.options.ActorSpec.plain`.
            interface: the result of `Interface.wire` in the actor's spawner. Its callers have no other.
            epoch: None where the spawner asks for it, at the place that a head has recorded for it.

        Raises:
            TypeError: the constructor takes other arguments here than in the spawner.
            Exception: the exception of the constructor.
        """

    @remote(25)
    @abstractmethod
    async def stop(self, index: int, seconds: float, epoch: int) -> None:
        """Run the queued calls, close the actor, forget it. Peers have `seconds` to receive its last answers."""

    @remote(26)
    @abstractmethod
    async def vacate(self, index: int, patience: float, epoch: int) -> bool:
        """Run the queued calls and close the actor, which goes on elsewhere; later calls go back to their callers. See
        `zcactor.execution.actor_runner.ActorRunner.vacate`."""

    @remote(27)
    @abstractmethod
    async def readmit(self, index: int) -> None:
        """Have an actor that has not moved take calls of the caller again: all that it has sent are back when this
        returns."""

    @remote(28)
    @abstractmethod
    async def moved(self, index: int, place: ProcessId, there: int, last: bool, epoch: int) -> None:
        """Tell all peers the place of an actor that has lived here, and end this process, after the last one, when no
        peer needs it.

        Args:
            index: its index here.
            place, there: its process, and its index there.
            last: whether no actor of the head is here any more.
        """

    @remote(29)
    @abstractmethod
    async def discard(self, index: int, epoch: int) -> None:
        """End an actor at once (one of several in a shared process)."""

    @remote(30)
    @abstractmethod
    async def discard_others(self, indices: list[int], epoch: int) -> None:
        """End the actors at once that are at no index of `indices`: the head of before has ended them, and was killed
        before it could say so."""

    @remote(31)
    @abstractmethod
    async def leave(self, grace: float) -> None:
        """End the process: idle actors are closed first, and values are handed to their holders, within `grace`
        seconds."""


class HeadNews:
    """The news of the head to a process.

    Args:
        sessions: of the process; they have its handles.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self.known = KnownEpoch()
        """The epoch of the head whose orders this process carries out."""
        self.on_actor_changed: Callable[..., None] | None = None
        """The function of a node's agent that passes on the head's report of an actor."""
        self.on_head_ends: Callable[[], None] | None = None
        """The function of a driver that is told that the cluster's head ends in order."""
        self.on_heads: Callable[[list[str]], None] | None = None
        """The function that is told where the cluster has heads, and may have them one day."""
        self.print_log: Callable[[str, str], None] | None = None
        """The function by which a driver shows the output of actors."""

    @remote(20)
    def actor_changed(
        self, actor_id: ActorId, state: str, process: bytes, index: int, cause: str, epoch: int
    ) -> None:  # fmt: skip
        """Take the head's report on an actor of which this process holds a handle: its node was lost, or it lives
        elsewhere now.

        Args:
            actor_id: the id of the actor.
            state: ``"dead"``, ``"restarting"`` or ``"alive"``.
            process: its process, or its last one.
            index: its number in that process.
            cause: why it has left its former place.
            epoch: of the head.

        Raises:
            Deposed: a later head is known.
        """
        self.known.check(epoch)
        actor = self._sessions.remotes.get(actor_id)
        if actor is not None:
            actor.changed(state, (process, index), cause)
        if self.on_actor_changed is not None:
            self.on_actor_changed(actor_id, state, process, index, cause, epoch)

    @remote(21)
    def head_ends(self) -> None:
        """Take the head's word that it ends in order, and that no other one comes."""
        if self.on_head_ends is not None:
            self.on_head_ends()

    @remote(22)
    def heads_are(self, places: list[str]) -> None:
        """Take the head's word where it is, and then where others may lead one day: ``host:port`` of each."""
        if self.on_heads is not None:
            self.on_heads(places)

    @remote(23)
    def log(self, stream: str, text: str) -> None:
        """Show the output of an actor, in a driver."""
        if self.print_log is not None:
            self.print_log(stream, text)
