"""The questions that the head answers from its tables: where actors and nodes are, and what they have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.control.forcing import waited_for
from zcactor.control.handle_grants import HandleGrant
from zcactor.control.shortage import waits
from zcactor.errors import AuthenticationError, NoSuchActor
from zcactor.execution.actor_runner import current_call
from zcactor.interface import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.actor_table import ActorTable
    from zcactor.control.handle_grants import HandleGrants
    from zcactor.control.heads import Heads
    from zcactor.control.membership import Membership
    from zcactor.control.node_table import NodeTable
    from zcactor.control.recorder import HeadRecorder
    from zcactor.control.scheduler import Ledger
    from zcactor.ids import ActorId, ProcessId

__all__ = ["Questions"]


class Questions:
    """The requests to the head that change nothing.

    Attributes:
        grants: gives handles out.
        heads: where heads are.
        members: lets nodes and programs join.
        recorder: has the head's decisions on their way to its log; no answer tells of one that is not there yet.
    """

    end_report: float = 2.0
    """Seconds to wait for the report on a worker whose connection a caller has lost. The kernel needs milliseconds,
    and more for a process with much memory."""

    grants: HandleGrants
    heads: Heads
    members: Membership
    recorder: HeadRecorder
    _actors: ActorTable[ActorRecord]
    _nodes: NodeTable
    _facts: Mapping[str, Any]
    _ledger: Ledger

    async def leader(self) -> dict[str, Any]:
        """The facts about this head: ``address``, ``pid``, ``epoch`` (of its term), ``log`` (empty for one in memory),
        ``state`` (``"leading"``, ``"taking over"`` until all is decided, or ``"adrift"`` while the log does not renew
        its term) and ``standbys``, the addresses of the heads that would lead in its place. Where it may not act
        without certain nodes there is also ``waits_for``, with their labels."""
        facts, standing = self._facts, self.members.standing
        state = "taking over" if self.members.is_taking_over else "leading"
        if standing is not None and not standing.in_term:
            state = "adrift"
        waits_for = waited_for(self.members)
        return {
            "address": facts["address"].rpartition("@")[2], "pid": facts["pid"], "epoch": self.recorder.epoch,
            "log": self.members.log, "state": state,
            "standbys": self.heads.standbys, **({"waits_for": waits_for} if waits_for else {}),
        }  # fmt: skip

    async def stay(self, epoch: int) -> tuple[int, float | None]:
        """Tell a node or a program whether it may stay with this head.

        Args:
            epoch: the greatest one that the caller knows.

        Returns:
            This head's epoch, and the age of its knowledge; see `zcactor.control.reign.Reign.age`.
        """
        recorder, standing = self.recorder, self.members.standing
        if epoch > recorder.epoch:
            recorder.depose(epoch)
        age = 0.0 if standing is None else standing.age()
        return recorder.epoch, None if recorder.is_deposed else age

    async def locate(self, actor_id: ActorId, calls_wait: bool) -> tuple[str, bytes, int, str]:
        """The place of an actor; see `zcactor.peers.head_link.HeadLink.locate`."""
        actor = self._actors.get(actor_id)
        if actor is None:
            return "dead", b"", 0, "it is unknown to its node"
        if calls_wait and actor.state == "alive" and actor.worker is not None:
            # The caller lost its connection: most likely the process has just ended, and the zygote is about to report
            # it.
            await asyncio.wait([actor.worker.ended], timeout=self.end_report)
        while actor.state == "pending" or (actor.state == "restarting" and not calls_wait):
            await actor.changed()
        if actor.state == "dead":
            await self.recorder.noted()
        return actor.state, *actor.location, actor.cause

    async def get_actor(self, name: str, namespace: str) -> Any:
        """The handle of a named actor.

        Raises:
            NoSuchActor: no living actor has the name.
            HeadUnavailable: the head's log does not take what was decided before, such as the end of an actor.
        """
        await self.recorder.settled()
        actor = self._actors.named(namespace, name)
        await actor.settled()
        if actor.state == "dead":
            raise NoSuchActor(f"the actor named {name!r} in namespace {namespace!r} has just died: {actor.cause}")
        return HandleGrant(self.grants, actor)

    async def nodes(self) -> list[dict[str, Any]]:
        """The facts of every node, as inspection shows them."""
        return self._nodes.told()

    async def actors(self) -> list[dict[str, Any]]:
        """The facts of every actor that lives or whose death is remembered, as inspection shows them."""
        return self._actors.told()

    async def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        """The total and the free amounts of the cluster's resources, by name."""
        return self._ledger.total(), self._ledger.free()

    async def process_of(self, actor_id: ActorId) -> bytes:
        """The process that hosts an actor."""
        state, process, _, cause = await self.locate(actor_id, False)
        if state == "dead":
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is dead: {cause}")
        return process

    async def waits(self, class_name: str, spawner: bytes = b"") -> str:
        """The reasons why the caller's spawns of a class wait, as a line. Each spawn is counted in one line only: the
        line is empty when no further spawn waits."""
        owner, name = self._asking(spawner), shown(class_name)
        pending = [
            actor for actor in self._actors.made_by(owner)
            if actor.state == "pending" and actor.class_name == name and not actor.told
        ]  # fmt: skip
        for actor in pending:
            actor.told = True
        return waits(pending, self._ledger, self._actors.all())

    def _asking(self, worker: bytes) -> ProcessId:
        """The process for which the present call is made: the caller, or `worker`, when its node's agent is the caller.

        Raises:
            AuthenticationError: `worker` belongs to a node with another agent.
        """
        caller: ProcessId = current_call.get().session.peer_process
        if not worker:
            return caller
        named = ids.ProcessId(worker)
        node = self._nodes.host_of(named)
        if node is None or node.process != caller:
            raise AuthenticationError(f"process {worker.hex()} is no worker of the node whose agent has asked for it")
        return named
