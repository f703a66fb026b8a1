"""The head's tables compared with the processes that there are: the ledger, the names, and the lives of actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from zcactor.control.entries import name_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from simulation.cluster import Cluster
    from simulation.loop import SimLoop
    from simulation.record import Record
    from zcactor.control.entries import Entries
    from zcactor.control.head import Head
    from zcactor.ids import ActorId

__all__ = ["Supervision"]

EVERY: Final = 64
"""Nodes up to which the ledger is checked after each of its steps. A larger one is looked at from time to time."""
SETTLING: Final = 60.0
"""Virtual seconds after which no actor is between two lives any more: the longest pause before a restart is half of
it."""
_TOLERANCE: Final = 1e-6
_PLAIN_ENDS: Final = ("its process ", "its node ", "the node's zygote ")
"""Beginnings of a cause that is no reason to end an actor which may restart."""
_REASONS: Final = (
    "so it is not restarted again", "so it is not started again", "could not be restarted", "its constructor raised",
    "was shut down", "is shutting down", "while it was being stopped",
)  # fmt: skip


class Supervision:
    """The watch over the head.

    Args:
        cluster: the cluster of the head.
        record: the record that gets the violations.
    """

    def __init__(self, cluster: Cluster, record: Record) -> None:
        self._cluster = cluster
        self._record = record
        self._head: Any = None
        self._restarts: dict[bytes, int] = {}
        """The restarts that each actor was spawned with; less than 0 for any number."""
        self._alive: dict[bytes, tuple[str, str, str | None, int]] = {}
        """The actors that were alive when the last head was killed, and whose end was not decided: label, namespace,
        name, restarts."""

    def attach(self, head: Any) -> None:
        """Check the ledger of `head` after each of its steps, where it is small. Idempotent."""
        if head is self._head:
            return
        ledger = head._ledger
        self._head = head
        serve, take = ledger._serve, ledger._take

        def serve_and_look() -> None:
            serve()
            if self._head is head and len(ledger._nodes) <= EVERY:  # the frames of one that was killed end later
                self.look(within=True)

        def look_and_take(node: str, request: Mapping[str, float]) -> Any:
            if self._head is head and ledger._waiting:
                self._granted(ledger, node, request)
            return take(node, request)

        ledger._serve, ledger._take = serve_and_look, look_and_take

    # ---------------------------------------------------------------- take-overs

    def begins(self, head: Any) -> None:
        """Attend to a head with a log, before it goes on with a cluster."""
        self.attach(head)
        bury, ends = head._actors.bury, self._record.ends

        def note_and_bury(actor: Any) -> None:
            if actor.name is not None and self._head is head:  # the ruins of an earlier head decide nothing
                ends[actor.name] = actor.cause
            bury(actor)

        head._actors.bury = note_and_bury

    def head_lost(self, head: Head) -> None:
        """Note the state of a head that is killed, and judge the ends of actors so far."""
        self._head = None
        self._alive = {
            actor.actor_id: (actor.label, actor.namespace, actor.name, actor.restarts) for actor in head._actors.all()
            if actor.state == "alive" and not actor.doomed and actor.ending is None
        }  # fmt: skip
        for actor in head._actors.all():
            if actor.state == "dead":
                self._dead(actor, None)

    def taken_over(self, entries: Entries) -> None:
        """Check that a head goes on with each actor that was alive, its name and its restarts (I4)."""
        self._record.take_overs += 1
        self._record.saw("a head took over")
        alive, self._alive = self._alive, {}
        for actor_id, (label, namespace, name, restarts) in alive.items():
            entry = entries.actors.get(actor_id.hex())
            if entry is None:
                self._record.break_("I4", f"{label} was alive, and the next head does not know it")
            elif entry.restarts != restarts:
                self._record.break_("I4", f"{label} was restarted {restarts} times, the log has {entry.restarts}")
            if name is not None and entries.names.get(name_key(namespace, name)) != actor_id:
                self._record.break_("I4", f"{label} was alive, and the next head gives its name away")

    # ---------------------------------------------------------------- always

    def look(self, *, within: bool = False) -> None:
        """Check that the free amounts of each node and those of its actors add up to the node's total, that no waiting
        request could be served (I9), and that each name has one actor (I4).

        Args:
            within: whether the head is within a step: it buries an actor after it has given back the resources.
        """
        ledger, actors = self._head._ledger, self._head._actors
        taken: dict[str, dict[str, float]] = {}
        shares: dict[tuple[str, int], float] = {}
        count: dict[str, int] = {}
        named: dict[tuple[str, str], Any] = {}
        for actor in actors.all():  # nearly all of them are dead
            dead = actor.state == "dead"
            places = [] if actor.node is None else [(actor.node, actor.gpus)]
            for place, gpus in places if actor.destination is None else [*places, actor.destination]:
                node = place.id
                count[node] = count.get(node, 0) + 1
                if actor.request:
                    used = taken.setdefault(node, {})
                    for name, amount in actor.request.items():
                        used[name] = used.get(name, 0.0) + amount
                for gpu in gpus:
                    shares[node, gpu] = shares.get((node, gpu), 0.0) + min(actor.request["GPU"], 1.0)
                if dead and place is actor.node and not gpus:  # GPUs are in use until its process has ended
                    self._record.break_("I9", f"{actor.label} is dead and has resources of {place.label}")
            if not dead:
                if actor.state != "pending" and actor.actor_id not in self._restarts and actor.recipe is not None:
                    self._restarts[actor.actor_id] = actor.spec.max_restarts
                if actor.name is not None:
                    self._named(actor, named.setdefault((actor.namespace, actor.name), actor))
        for actor in actors._by_name.values():
            if actor.state == "dead" and not within:
                self._record.break_("I4", f"{actor.label} is dead and has its name")
        for node, amounts in ledger._nodes.items():
            if amounts.actors != (there := count.get(node, 0)):
                self._record.break_("I9", f"{amounts.actors} actors have a node's resources, {there} are on it")
            used = taken.get(node, {})
            for name, total in amounts.total.items():
                free, has = amounts.free[name], used.get(name, 0.0)
                if abs(free + has - total) > _TOLERANCE:
                    self._record.break_("I9", f"of {total:g} {name} {free:g} are free, and actors have {has:g}")
            for gpu, free in enumerate(amounts.gpus.free):
                has = shares.get((node, gpu), 0.0)
                if abs(free + has - 1.0) > _TOLERANCE:
                    self._record.break_("I9", f"of a GPU {free:g} is free, and actors have {has:g}")
        if ledger._waiting:
            self._waiting(ledger)

    def _named(self, actor: Any, first: Any) -> None:
        if first is not actor:
            self._record.break_("I4", f"{first.label} and {actor.label} have one name")
        if self._head._actors.holder_of(actor.namespace, actor.name) is not actor:
            self._record.break_("I4", f"{actor.label} is {actor.state}, and others may take its name")

    def _granted(self, ledger: Any, node: str, request: Mapping[str, float]) -> None:
        """Check that a request which is granted overtakes no earlier one that waits for the same resource."""
        entries = [entry for queue in ledger._waiting.values() for entry in queue.values()]
        number = next((entry.number for entry in entries if entry.request is request), 0)
        for entry in entries:
            may = entry.order.only in (None, node) and _fits(entry.request, ledger._nodes[node].total)
            if may and entry.number < number and not set(entry.request).isdisjoint(request):
                self._record.break_("I9", f"a request for {request} overtakes an earlier one for {entry.request}")
                return

    def _waiting(self, ledger: Any) -> None:
        """Check each waiting request, in the order of arrival, against all nodes. It waits where an earlier request of
        the same resource does."""
        awaited: dict[str, set[str]] = {node: set() for node in ledger._nodes}
        entries = [entry for queue in ledger._waiting.values() for entry in queue.values()]
        for entry in sorted(entries, key=lambda entry: entry.number):
            names = set(entry.request)
            nodes = [node for node in ledger._nodes if entry.order.only in (None, node)]
            possible = [node for node in nodes if _fits(entry.request, ledger._nodes[node].total)]
            for node in possible:
                room = ledger.is_open(node) and ledger._nodes[node].now(entry.request)
                if room and names.isdisjoint(awaited[node]):
                    self._record.break_("I9", f"a request for {entry.request} waits, and there is room for it")
                    return
            for node in possible:
                awaited[node] |= names
            if not possible:
                self._record.break_("I9", f"a request for {entry.request} waits, and fits into no node")
                return

    def constructed(self, loop: SimLoop, actor_id: ActorId) -> None:
        """Check that an actor is constructed in the process that the head has chosen for it (I4). A head that cannot
        be reached may have chosen another process meanwhile."""
        head, host = self._head, self._cluster.head_host
        if head is None or host is None or host.agent is None or loop.process is None:
            return
        actor = head._actors.get(actor_id)
        if actor is None or actor.worker is None or actor.worker.process == loop.process.process:
            return
        if not self._cluster.is_apart(loop.host, loop.host):
            self._record.break_("I4", f"{actor.label} is constructed in {loop.label}, the head wants it elsewhere")

    # ---------------------------------------------------------------- at rest

    def at_rest(self) -> None:
        """Check that the head knows the truth about each actor and each node, and that an actor which may restart lives
        or was refused with a cause (I10)."""
        head = self._head
        if head is None or self._cluster.head_host is None or self._cluster.head_host.agent is None:
            return
        self._cluster.world.run(lambda: not self._between(head), limit=self._cluster.world.now + SETTLING)
        for actor in self._between(head):
            self._record.break_("I10", f"{actor.label} is still {actor.state}: {actor.cause}")
        processes = {
            loop.process.process: (loop, loop.process)
            for loop in self._cluster.world.loops.values() if loop.process is not None
        }  # fmt: skip
        hosted = {
            runner.info.actor_id: loop for loop, process in processes.values() for runner in process.hosts.actors()
            if runner.info is not None and runner.instance is not None
        }  # fmt: skip
        for actor in head._actors.all():
            if actor.state == "alive":
                where = processes.get(actor.location[0])
                if where is None or hosted.get(actor.actor_id) is not where[0]:
                    self._record.break_("I10", f"{actor.label} does not live where the head has it")
            elif actor.state == "dead":
                self._dead(actor, hosted.get(actor.actor_id))
        for actor_id, loop in hosted.items():
            if head._actors.get(actor_id) is None:
                self._record.break_("I10", f"actor {actor_id.hex()[:8]} in {loop.label} is unknown to the head")
        agents = {host.agent.process.process for host in self._agents() if host.agent.process is not None}
        known = {node.process for node in head._nodes.by_id.values()}
        if agents != known:
            lost, gone = len(agents - known), len(known - agents)
            self._record.break_("I10", f"the head does not know {lost} of the nodes, and knows {gone} that are gone")

    def _agents(self) -> Iterable[Any]:
        return [host for host in self._cluster.hosts.values() if host.agent is not None and host.node is not None]

    def _between(self, head: Any) -> list[Any]:
        """The actors that neither live nor are dead, without those that wait for resources."""
        return [
            actor for actor in head._actors.all()
            if actor.state in ("pending", "restarting") and actor.withdraw is None
        ]  # fmt: skip

    def _dead(self, actor: Any, loop: SimLoop | None) -> None:
        if loop is not None:
            self._record.break_("I10", f"{actor.label} lives in {loop.label} and is dead for the head: {actor.cause}")
        if not actor.cause:
            self._record.break_("I10", f"{actor.label} has died without a cause")
        limit = self._restarts.get(actor.actor_id, 0)
        may = limit < 0 or actor.restarts < limit
        refused = not actor.cause.startswith(_PLAIN_ENDS) or any(reason in actor.cause for reason in _REASONS)
        if may and not refused:
            text = f"{actor.label} may restart (max_restarts={limit}, {actor.restarts} so far) and has not"
            self._record.break_("I10", f"{text}: {actor.cause}")


def _fits(request: Mapping[str, float], amounts: Mapping[str, float]) -> bool:
    return all(amounts.get(name, 0.0) + _TOLERANCE >= amount for name, amount in request.items())
