"""The failover of a cluster: a head goes on where an earlier one has ended.

The log has the decisions of the earlier head: actors, names, counts of restarts, nodes and programs. Facts that are
true elsewhere are reported again: each node returns with its workers, each program with the actors that it holds. When
all have returned, or cannot come any more, the rest is decided: actors without a process are restarted or buried, and
actors that no living process owns or holds are ended.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.control.node_table import NodeRecord, RemotePool
from zcactor.control.recipes import is_at_hand, lack
from zcactor.logs import logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from typing import Any

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.node_table import NodeTable
    from zcactor.ids import ProcessId
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["Decisions", "Failover", "ReportedWorker"]

_ENDED: Final = "its process had ended when the cluster's head was started again"
_GONE: Final = "its node did not return to the cluster's new head"
_LATE: Final = 2.0
"""Seconds after a take-over in which a spawner gets its lease, if it was about to when the head was lost."""
_UNEXPLAINED: Final = "the cluster's log knows no actor in it"


class ReportedWorker(NamedTuple):
    """A worker, as its node reports it to a new head."""

    process: ProcessId
    pid: int
    """0 where the worker has not reported yet."""
    address: str
    """The address at which it listens for peers of other hosts."""
    label: str
    driver: ProcessId
    shared: bool


class Decisions(NamedTuple):
    """The steps of a head by which a take-over acts; see `zcactor.control.head.Head`."""

    resume: Callable[[ActorRecord], None]
    """Go on with an actor that lives."""
    lost: Callable[[ActorRecord, str], None]
    """Restart or bury an actor, whose process has ended for a cause."""
    restart: Callable[[ActorRecord, Sequence[asyncio.Future[Any]]], None]
    """Start an actor, as was decided before, once all of these are done."""
    stop: Callable[[ActorRecord], None]
    """Stop an actor, as was decided before."""
    retire: Callable[[ActorRecord, str], None]
    """End an actor, for a cause."""
    discard_others: Callable[[WorkerRecord], asyncio.Future[None]]
    """End all that is in a shared process, but the actors that are known there. The result is done when that is."""
    end_owned: Callable[[ProcessId], None]
    """Retire the actors that a process made which has ended."""
    unheld: Callable[[ActorRecord], None]
    """Stop an actor, where no process holds it."""
    forget: Callable[[str, ProcessId], None]
    """Record that a node or a program is gone: ``"member"`` or ``"driver"``."""


class Failover:
    """A take-over that goes on. Used on the loop's thread.

    Args:
        loop: the head's.
        decisions: the steps of the head.
        nodes: the head's table, with its own node at most.
        actors: the actors of the log, which are in the head's table, each with its state in the log. Their `location`,
            `node_id` and `gpus` are those of the log, and their state is ``"restarting"`` or ``"pending"``: callers
            wait for what becomes of them.
        members: the nodes of the log without the head's own, by process id, each with its facts.
        drivers: the programs of the log.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, decisions: Decisions, nodes: NodeTable,
        actors: Mapping[ActorRecord, str], members: Mapping[ProcessId, Mapping[str, Any]], drivers: Iterable[ProcessId],
    ) -> None:  # fmt: skip
        self._loop = loop
        self._decisions = decisions
        self._nodes = nodes
        self._was = dict(actors)
        self._members = dict(members)
        self._awaited = dict.fromkeys(members)
        self._beside: str | None = None
        """The machine on which a node is about to join."""
        self._drivers = dict.fromkeys(drivers)
        self._by_node: dict[str, list[ActorRecord]] = {}
        for actor in actors:
            self._by_node.setdefault(actor.node_id, []).append(actor)
        self._lost: list[tuple[ActorRecord, str]] = []
        self._clearing: dict[str, list[asyncio.Future[Any]]] = {}
        """The ends of all that nodes have and the log does not explain, by the ids of the nodes."""
        own = nodes.own
        if (
            own is not None
        ):  # its processes have ended with the earlier head; their places are kept until all is decided
            for actor in self._by_node.pop(own.id, ()):
                actor.node = own
                nodes.ledger.restore(own.id, actor.request, actor.gpus)
                self._lost.append((actor, _ENDED))
        self._complete = asyncio.Event()
        self._look()
        self.done = asyncio.Event()
        """Set when everything is decided."""
        self.nodes = 0
        """Nodes that have returned."""
        self.given_up: list[str] = []
        """Labels of the nodes that have not returned, once that is decided."""

    # ---------------------------------------------------------------- returns

    @property
    def actors(self) -> int:
        """The number of actors of the earlier head that live."""
        return sum(actor.state != "dead" for actor in self._was)

    @property
    def absent(self) -> dict[str, str]:
        """Labels of the nodes that have not returned, by the ids of the nodes."""
        return {
            process.hex(): f"node {process.hex()[:8]} ({facts['host']}, {facts['address'].rpartition('@')[2]})"
            for process, facts in self._members.items()
        }

    def expects(self, node: ProcessId) -> bool:
        """Whether that node may return."""
        return node in self._members

    def awaits(self, process: ProcessId) -> bool:
        """Whether that node or program may return."""
        return process in self._members or process in self._drivers

    def returned(self, node: NodeRecord, workers: Sequence[ReportedWorker]) -> None:
        """Note a node that has returned and is in the table, with its workers."""
        assert isinstance(node.workers, RemotePool)
        del self._members[node.process]
        self._awaited.pop(node.process, None)
        self.nodes += 1
        found: dict[bytes, WorkerRecord] = {}
        for told in workers:
            worker = node.workers.adopt(told.process, told.label, told.driver, shared=told.shared, pid=told.pid)
            self._nodes.adopt(node, worker, told.address)
            found[told.process] = worker
        for actor in self._by_node.pop(node.id, ()):
            if actor.state != "dead":  # as it is where it was ended before its node returned
                self._settle(actor, node, found.get(actor.location[0]))
        clearing: list[asyncio.Future[Any]] = []
        self._clearing[node.id] = clearing
        for worker in found.values():
            if not worker.actors:
                worker.leaving = True
                worker.kill(_UNEXPLAINED)
                clearing.append(worker.ended)
            elif worker.shared:  # the earlier head may have been killed before it ended what it had decided to end
                clearing.append(self._decisions.discard_others(worker))
        self._look()

    def _settle(self, actor: ActorRecord, node: NodeRecord, worker: WorkerRecord | None) -> None:
        """Give an actor back its place on a node that has returned."""
        actor.node = node
        self._nodes.ledger.restore(node.id, actor.request, actor.gpus)
        if worker is None or self._was[actor] == "restarting":
            self._lost.append((actor, _ENDED))
            return
        actor.worker, actor.index = worker, actor.location[1]
        worker.actors[actor] = None
        actor.cause = ""
        if self._was[actor] != "pending":
            self._decisions.resume(actor)

    def ended(self, node: ProcessId) -> None:
        """Note that nobody listens in the place of a node, so that it is not waited for."""
        self._awaited.pop(node, None)
        self._look()

    def await_beside(self, machine: str) -> None:
        """Wait also for a node that is about to join on that machine: actors may need what it has."""
        self._beside = machine
        self._complete.clear()

    def joined(self, node: NodeRecord) -> None:
        """Note a node that has joined, and was not there before."""
        if node.facts["machine"] == self._beside:
            self._beside = None
            self._look()

    def driver_returned(self, driver: ProcessId) -> bool:
        """Note a program that has returned; whether it was waited for."""
        was_awaited = driver in self._drivers
        self._drivers.pop(driver, None)
        self._look()
        return was_awaited

    def _look(self) -> None:
        if not self._awaited and not self._drivers and self._beside is None:
            self._complete.set()

    async def settled(self, actor: ActorRecord) -> None:
        """Wait until it is known whether the process of an actor lives."""
        if actor in self._was and actor.worker is None and actor.state != "dead":
            await self.done.wait()

    # ---------------------------------------------------------------- the end

    async def finish(self, fence: float, permitted: Callable[[], Awaitable[bool]] | None = None) -> bool:
        """Wait for all that may return, at most `fence` seconds, and until `permitted()`, and decide the rest.

        Returns:
            Whether it is decided; False where `permitted` says that another head does that.

        Cancelling leaves it undecided.
        """
        try:
            async with asyncio.timeout(fence):
                await self._complete.wait()
        except TimeoutError:
            logger.warning(
                "%d nodes and %d programs have not returned in %g s", len(self._members), len(self._drivers), fence
            )
        if permitted is not None and not await permitted():
            return False
        self._give_up_nodes()
        for actor, cause in self._lost:
            self._decide(actor, cause)
        for owner in dict.fromkeys(actor.owner for actor in self._was if actor.state != "dead"):
            if owner not in self._nodes.drivers and self._nodes.worker(owner) is None:
                self._decisions.end_owned(owner)
        self.done.set()  # all who hold actors have returned
        for actor, was in self._was.items():
            if was == "stopping":
                self._decisions.stop(actor)
            elif actor.state == "pending":  # its spawner has given it up, unless that asks for the place again
                self._loop.call_later(_LATE, self._decisions.unheld, actor)
            elif actor.state != "dead":
                self._decisions.unheld(actor)
        return True

    def _give_up_nodes(self) -> None:
        for driver in self._drivers:
            self._decisions.forget("driver", driver)
        self._drivers.clear()
        self.given_up = list(self.absent.values())
        for process, facts in self._members.items():
            self._decisions.forget("member", process)
            pool = RemotePool(self._loop, lambda *_: None, lambda _: None)
            pool.lost(_GONE)
            node = NodeRecord(process, pool, facts)
            for actor in self._by_node.pop(node.id, ()):
                if actor.state != "dead":
                    actor.node = node
                    self._lost.append((actor, _GONE))
        self._members.clear()
        for actors in self._by_node.values():  # of nodes whose loss was recorded already
            self._lost += [(actor, _ENDED) for actor in actors if actor.state != "dead"]
        self._by_node.clear()

    def _decide(self, actor: ActorRecord, cause: str) -> None:
        """Restart or bury an actor without a process."""
        if actor.state == "dead":  # it was ended meanwhile
            return
        if self._was[actor] == "pending":
            actor.withdrawn = True  # a repeated request makes it anew
            self._decisions.retire(actor, f"it could not be placed: {cause}")
        elif self._was[actor] == "restarting" and is_at_hand(actor, self._nodes):
            # Its last process may have it still, and so may a next one that the earlier head had chosen on its node.
            self._decisions.restart(actor, self._clearing.get(actor.node_id, ()))
        else:
            actor.set_state("alive")
            self._decisions.lost(actor, cause + lack(actor, self._nodes))
