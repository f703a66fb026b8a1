"""Draining: a node's actors move to other nodes, and then the node leaves.

An actor that may restart is closed in order where it is, and constructed elsewhere, under the same id and name. Calls
that come after its mailbox was closed go back to their callers, who send them again when the actor lives elsewhere
(`zcactor.api.remote_actor.RemoteActor.moved`), so that none fails and none runs twice. Other actors are waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol

from zcactor.control.entries import actor_change
from zcactor.control.recipes import is_at_hand
from zcactor.errors import ConnectionLost, HeadUnavailable, InsufficientResources, ProtocolError
from zcactor.ids import ProcessId
from zcactor.logs import logger
from zcactor.process.cluster import WorkerService
from zcactor.process.epochs import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.node_table import NodeRecord, NodeTable
    from zcactor.control.recorder import HeadRecorder
    from zcactor.control.reservations import Reservations
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["AT_A_TIME", "Draining"]

AT_A_TIME = 4
"""Actors that move at the same time: each is out of reach for as long as its constructor takes."""
_LEAST_DIGITS = 4
"""Digits of a node's id, at least, by which it may be named."""
_FIRST_PATIENCE, _LAST_PATIENCE = 1.0, 30.0
"""Seconds until an actor with a running call takes calls again, at first and at last, and then is left alone for as
long: the running call may wait for one that was held back."""
_AGAIN = 1.0
"""Seconds until a move that came to nothing is tried again."""
_LAST_WORD = 5.0
"""Seconds that the closed actors' processes get for callers that still read results there, and moves that have begun
get when the time is over. More than a busy loop may be behind with the news (`zcactor.rpc.session`)."""


class Members(Protocol):
    """The parts of `zcactor.control.membership.Membership` that draining needs."""

    async def end_node(self, node: NodeRecord, grace: float, again: bool) -> NodeRecord | None:
        """Have a node end, and wait for that, and with `again` for the node that starts in its place."""


class _Drain:
    """One drain that goes on."""

    def __init__(self, node: NodeRecord, deadline: float | None, tell: Callable[[str], None]) -> None:
        self.node = node
        self.deadline = deadline
        self.tell = tell
        self.slots = asyncio.Semaphore(AT_A_TIME)
        self.ended = asyncio.Event()
        """Set when no further move is to begin."""
        self.moving: dict[asyncio.Task[None], None] = {}
        self.vacated: list[WorkerRecord] = []
        """The processes of actors that have moved."""
        self.moved = 0
        self.of = 0
        """Number of actors that are to move."""


class Draining:
    """The drains of a cluster. Used on the head's loop.

    Args:
        process: the head's process.
        recorder: records the head's decisions.
        nodes: the table of nodes.
        reservations: the shares of resources that actors have.
        actors: returns all actors, dead ones included.
        restart: ``restart(actor, turn, delay)`` constructs an actor at its node, and decides what becomes of it where
            that fails; see `zcactor.control.head.Head`.
        end_owned: retires the actors that a process has made.
        members: the head's membership.
        show: ``show(process, stream, prefix, lines)`` shows lines at a program.
    """

    def __init__(
        self, process: LocalProcess, recorder: HeadRecorder, nodes: NodeTable, reservations: Reservations,
        actors: Callable[[], Iterable[ActorRecord]],
        restart: Callable[[ActorRecord, int, float], Coroutine[Any, Any, None]], end_owned: Callable[[Any], None],
        members: Members, show: Callable[[Any, str, str, list[str]], None],
    ) -> None:  # fmt: skip
        self._process = process
        self._recorder = recorder
        self._nodes = nodes
        self._reservations = reservations
        self._actors = actors
        self._restart = restart
        self._end_owned = end_owned
        self._members = members
        self._show = show
        self._drains: dict[NodeRecord, _Drain] = {}

    def is_drained(self, node: NodeRecord | None) -> bool:
        """Whether the node is being drained, so that nothing starts there."""
        return node in self._drains

    async def drain(self, name: str, timeout: float | None, again: bool, caller: Any) -> dict[str, Any]:
        """Move the actors of a node elsewhere and have the node leave. Cancelling begins no further move, and opens the
        node again.

        Args:
            name: at least four digits of the node's id, its host name, or its address.
            timeout: seconds to wait for actors; None for any time.
            again: whether the node's agent starts again, with its own options.
            caller: the program to which lines on the progress are shown.

        Returns:
            ``node`` (its id), ``moved`` (the number of actors), ``left`` (a line for each actor that could not leave in
            time; the node is open again then, and has not left), ``joined`` (the id of the node that has started in
            its place; empty without `again`), and ``beside_head`` (whether it is on this head's host).

        Raises:
            ValueError: the name fits no node, or several; or the node cannot leave: it is the head's, the last one, or
                drained already.
            InsufficientResources: the other nodes have no room for its actors. Nothing was moved.
            ConnectionLost: the node was lost meanwhile, or did not come back.
        """
        node = self._named(name)
        self._check(node, again)
        beside = self._nodes.is_beside_head(node)
        deadline = None if timeout is None else self._process.loop.time() + timeout
        drain = self._drains[node] = _Drain(node, deadline, lambda line: self._show(caller, "stdout", "", [line]))
        self._nodes.ledger.close(node.id)
        try:
            await self._clear(drain)
            left = [self._reason(actor) for actor in self._on(node)]
            if left:
                return {"node": node.id, "moved": drain.moved, "left": left, "joined": "", "beside_head": beside}
            joined = await self._part(drain, again)
            return {"node": node.id, "moved": drain.moved, "left": [], "joined": joined, "beside_head": beside}
        finally:
            drain.ended.set()
            del self._drains[node]
            if self._nodes.has(node):
                self._nodes.ledger.open(node.id)

    def _named(self, name: str) -> NodeRecord:
        """The node of that name.

        Raises:
            ValueError: there is none, or there are several; the message lists them.
        """
        nodes = list(self._nodes.by_id.values())
        places = [(node, node.facts["address"].rpartition("@")[2]) for node in nodes]
        found = [node for node, place in places if name in (node.facts["host"], place, place.rpartition(":")[0])]
        digits = name.lower()
        if not found and set(digits) <= set("0123456789abcdef"):
            if len(digits) < _LEAST_DIGITS:
                raise ValueError(f"{name!r} is too short for a node's id: give at least {_LEAST_DIGITS} digits")
            found = [node for node in nodes if node.id.startswith(digits)]
        if len(found) == 1:
            return found[0]
        listed = "; ".join(f"{node.id[:8]} ({node.facts['host']}, {place})" for node, place in places)
        if found:
            raise ValueError(f"{name!r} fits {len(found)} nodes, so give more digits of an id; nodes: {listed}")
        raise ValueError(f"there is no node {name!r}; nodes: {listed}")

    def _check(self, node: NodeRecord, again: bool) -> None:
        """Refuse a drain that cannot succeed.

        Raises:
            ValueError, InsufficientResources: as `drain`.
        """
        if node in self._drains:
            raise ValueError(f"{node.label} is being drained already")
        if not any(self._nodes.ledger.is_open(other) for other in self._nodes.by_id if other != node.id):
            raise ValueError(f"{node.label} is the last node: its actors have nowhere to go; zcactor stop ends it")
        if node is self._nodes.own:
            raise ValueError(f"{node.label} is the cluster's head, without which the cluster ends; see zcactor stop")
        if again and "rank" in node.facts:
            raise ValueError(f"{node.label} is a rank of a run: it does not start again, as its launcher starts it")
        movable = [actor for actor in self._on(node) if self._may_move(actor)]
        lacking = self._nodes.ledger.room((actor.request, node.id) for actor in movable)
        if lacking is not None:
            words = ", ".join(f"{name}: {amount:g}" for name, amount in lacking.items()) or "room"
            raise InsufficientResources(
                f"the other nodes have no room for the {len(movable)} actors of {node.label} that would move: {words} "
                "is not free; nothing was moved. Start another node, or stop actors"
            )

    # ---------------------------------------------------------------- the actors

    def _on(self, node: NodeRecord) -> list[ActorRecord]:
        """The actors at a node."""
        return [actor for actor in self._actors() if actor.node is node and actor.state != "dead"]

    def _lives_at(self, actor: ActorRecord, node: NodeRecord) -> bool:
        """Whether an actor is at a node and does not move."""
        return actor.node is node and actor.state == "alive" and actor.moving is None

    def _may_move(self, actor: ActorRecord) -> bool:
        """Whether an actor may be constructed elsewhere."""
        return (
            is_at_hand(actor, self._nodes)
            and bool(actor.spec.max_restarts)
            and actor.ending is None
            and actor.spec.node in (None, "spread", "pack")
        )

    def _reason(self, actor: ActorRecord) -> str:
        """The reason why an actor is still there, as a line."""
        if actor.spec.node not in (None, "spread", "pack"):
            return f"{actor.label}: it was spawned for this node"
        if not actor.spec.max_restarts:
            return f"{actor.label}: it has max_restarts=0, so only its end frees the node"
        return f"{actor.label}: it is {actor.state}, and has running calls or waits for room"

    async def _clear(self, drain: _Drain) -> None:
        """Wait until no actor is left at the node, or the time is over.

        Raises:
            ConnectionLost: the node is gone.
        """
        node, loop = drain.node, self._process.loop
        here = self._on(node)
        drain.of = sum(map(self._may_move, here))
        waited = len(here) - drain.of
        drain.tell(f"draining {node.label}: {drain.of} actors move, {waited} are waited for")
        tasks = [loop.create_task(self._leaves(actor, drain)) for actor in here]
        gone = loop.create_task(node.removed.wait())
        pending: set[asyncio.Task[Any]] = set(tasks)
        try:
            while pending and not gone.done():
                left = None if drain.deadline is None else max(drain.deadline - loop.time(), 0.0)
                done, _ = await asyncio.wait({gone, *pending}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                pending -= done
                for task in done:
                    task.result()
        finally:
            drain.ended.set()
            for task in (*tasks, gone):
                task.cancel()
            await asyncio.gather(*tasks, gone, return_exceptions=True)
        if not self._nodes.has(node):
            raise ConnectionLost(
                f"{node.label} was lost while it was drained, after {drain.moved} of {drain.of} actors had moved; "
                "others that may restart do so elsewhere"
            )
        if drain.moving:
            await asyncio.wait(drain.moving, timeout=_LAST_WORD)

    async def _leaves(self, actor: ActorRecord, drain: _Drain) -> None:
        """Wait until an actor is not at the node any more, and move it if that is possible."""
        while actor.node is drain.node and actor.state != "dead":
            if actor.moving is not None:  # here, from a node that is drained as well
                await asyncio.shield(actor.moving)
                continue
            if actor.state != "alive" or not self._may_move(actor):
                await actor.changed()
                continue
            async with drain.slots:
                if self._lives_at(actor, drain.node) and self._may_move(actor):
                    move = self._process.tasks.begin(self._move(actor, drain))
                    drain.moving[move] = None
                    move.add_done_callback(drain.moving.pop)
                    await asyncio.shield(move)  # a move that has begun goes to its end
            if self._lives_at(actor, drain.node):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN):
                        await actor.changed()

    async def _move(self, actor: ActorRecord, drain: _Drain) -> None:
        """Close an actor where it is and construct it elsewhere."""
        worker, index = actor.worker, actor.index
        if worker is None or not await self._reservations.take_elsewhere(actor, drain.ended):
            return
        moving = actor.moving = self._process.loop.create_future()
        try:
            if await self._vacate(actor, worker, index, drain):
                await self._settle(actor, worker, index, drain)
        finally:
            self._reservations.give_up_elsewhere(actor)
            actor.moving = None
            moving.set_result(None)

    async def _vacate(self, actor: ActorRecord, worker: WorkerRecord, index: int, drain: _Drain) -> bool:
        """Close an actor where it is. Returns whether that was done: the time may be over before, or its process
        ends."""
        patience, loop = _FIRST_PATIENCE, self._process.loop
        while not drain.ended.is_set() and actor.state == "alive" and actor.worker is worker:
            if drain.deadline is not None:
                patience = min(patience, max(drain.deadline - loop.time(), 0.0))
            try:
                session = await self._process.connections.connect(worker.process)
            except (ConnectionLost, ProtocolError) as error:
                logger.debug("the process of %s is not reached: %s", actor.label, error)
                return False
            await actor.decided()
            if actor.state != "alive" or actor.worker is not worker or actor.destination is None:
                return False
            actor.set_state("restarting", f"it moves to {actor.destination[0].label}")
            try:
                # Recorded before it is closed: a later head constructs it anew, wherever this move ends.
                await self._recorder.record(actor_change(actor, "restarting"))
            except (HeadUnavailable, Deposed) as error:
                logger.warning("%s does not move: %s", actor.label, error)
                self._lives_on(actor, worker)
                return False
            if not _goes_on(actor, worker):
                return False
            try:
                closed = await self._close(worker, session, index, patience)
            except Deposed:
                return False
            except ConnectionLost as error:
                logger.debug("the process of %s was lost before it was closed: %s", actor.label, error)
                worker.kill()
                await asyncio.shield(worker.ended)  # then the head restarts or buries the actor
                return False
            await actor.decided()
            if not _goes_on(actor, worker):
                return False
            if closed:
                return True
            self._recorder.note(actor_change(actor, "alive"))
            self._lives_on(actor, worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await drain.ended.wait()
            patience = min(2 * patience, _LAST_PATIENCE)
        return False

    async def _close(self, worker: WorkerRecord, session: Session, index: int, patience: float) -> bool:
        """Have a process close an actor. Returns whether it has done that: the process may have ended, or the actor
        takes calls again.

        Raises:
            Deposed: a later head is known, which the process obeys.
            ConnectionLost: the process is not reached any more.
        """
        order = self._recorder.order(self._process.requests, session, WorkerService.vacate, index, patience)
        closing = self._process.loop.create_task(order)
        try:
            await asyncio.wait([closing, worker.ended], return_when=asyncio.FIRST_COMPLETED)
            return closing.done() and bool(closing.result())
        finally:
            closing.cancel()

    def _lives_on(self, actor: ActorRecord, worker: WorkerRecord) -> None:
        """Note that an actor takes calls where it is, unless it has come to its end meanwhile."""
        if _goes_on(actor, worker):
            actor.set_state("alive")

    async def _settle(self, actor: ActorRecord, worker: WorkerRecord, index: int, drain: _Drain) -> None:
        """Construct an actor, which is closed in `worker`, at its next place, and tell those who may call it."""
        worker.actors.pop(actor, None)
        if not worker.actors:  # it ends as soon as no caller needs it, so that no further actor may go there
            worker.leaving = True
            self._nodes.unshare(worker)
        self._reservations.settle_elsewhere(actor)
        actor.leave_worker()
        actor.displaced = True  # so that its holders learn of its place
        if not worker.shared:
            self._end_owned(worker.process)
        self._recorder.note(actor_change(actor, "restarting"))
        await self._restart(actor, actor.restarts, 0.0)
        await actor.settled()
        if actor.state != "alive":
            if not worker.actors:
                worker.kill()
            return
        drain.moved += 1
        assert actor.node is not None
        drain.tell(f"{actor.label} has moved to {actor.node.label}, {drain.moved} of {drain.of}")
        drain.vacated.append(worker)
        place, there = actor.location
        try:
            session = await self._process.connections.connect(worker.process)
            await self._recorder.order(
                self._process.requests, session, WorkerService.moved, index, ProcessId(place), there, worker.leaving
            )
        except Deposed:  # the head that leads settles the rest
            return
        except (ConnectionLost, ProtocolError) as error:
            logger.debug("the former process of %s has ended, or is not reached: %s", actor.label, error)
            if worker.leaving:  # it does not know that it may end
                worker.kill()

    # ---------------------------------------------------------------- the node

    async def _part(self, drain: _Drain, again: bool) -> str:
        """Have the node leave. Returns the id of its successor, which starts `again`."""
        reading = [worker.ended for worker in drain.vacated if not worker.ended.done()]
        if reading:
            await asyncio.wait(reading, timeout=_LAST_WORD)
        drain.tell(f"{drain.node.label} leaves" + (" and starts again" if again else ""))
        successor = await self._members.end_node(drain.node, self._process.config.shutdown_timeout, again)
        if successor is None:
            return ""
        drain.tell(f"{drain.node.label} has started again as {successor.label}")
        return successor.id


def _goes_on(actor: ActorRecord, worker: WorkerRecord) -> bool:
    """Whether the move of an actor from a process goes on: neither was the actor killed, nor has the process ended,
    after which the head restarts or buries the actor."""
    return actor.state == "restarting" and actor.worker is worker and not worker.ended.done()
