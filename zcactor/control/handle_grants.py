"""The handles that the head gives out: an actor is stopped when no process holds one."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from zcactor.api.handle import describe
from zcactor.api.remote_actor import RemoteActor
from zcactor.buggify import dawdle
from zcactor.control.actor_record import HandleCount
from zcactor.control.head_log import Deposed
from zcactor.errors import ActorDied, ZcactorError
from zcactor.ids import ProcessId
from zcactor.logs import logger
from zcactor.marshal.values import Code, registered
from zcactor.objectstore.ref import RegionKind
from zcactor.process.cluster import HeadNews
from zcactor.process.places import place_of
from zcactor.rpc.parts import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping, Sequence

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.actor_table import ActorTable
    from zcactor.control.recorder import HeadRecorder
    from zcactor.ids import ActorId
    from zcactor.process.context import LocalProcess
    from zcactor.rpc.session import Session

__all__ = ["HandleGrant", "HandleGrants"]


class HandleGrant:
    """A handle on its way out of the head."""

    __slots__ = ("grants", "record")

    def __init__(self, grants: HandleGrants, record: ActorRecord) -> None:
        self.grants = grants
        self.record = record


def _pack_grant(packing: Any, grant: HandleGrant) -> bytes:
    record, grants = grant.record, grant.grants
    process = grants.process
    if record.worker is None or record.interface is None:
        raise ActorDied(record.label, record.cause, False)
    remote = RemoteActor(
        process, record.actor_id, record.interface, (record.worker.process, record.index), record.name,
        record.namespace, record.spec.max_pending_calls or process.config.max_pending_calls,
        record.spec.max_retries,
    )  # fmt: skip
    lease = packing.add(Part(RegionKind.ACTOR, grants.token_of(record), 0, 0))
    return describe(remote, lease, grants.place_of(record.worker.process))


registered[HandleGrant] = (Code.ACTOR, _pack_grant)


class HandleGrants:
    """The head's side of handles. Used on the loop's thread.

    Args:
        process: the head's process.
        exports: the promises of the process; held actors are listed among them.
        addresses: the addresses of workers, by process.
        actors: the table of actors.
        unheld: called with an actor that no process holds any more.
        recorder: has the head's decisions on their way to its log. Holders learn a change when the log has it.
    """

    def __init__(
        self, process: LocalProcess, exports: MutableMapping[int, Any], addresses: Mapping[ProcessId, str],
        actors: ActorTable[ActorRecord], unheld: Callable[[ActorRecord], None],
        recorder: HeadRecorder,
    ) -> None:  # fmt: skip
        self.process = process
        self._exports = exports
        self._addresses = addresses
        self._actors = actors
        self._unheld = unheld
        self._recorder = recorder

    def token_of(self, actor: ActorRecord) -> HandleCount:
        """The object that leases on `actor` keep alive."""
        token = actor.token() if actor.token is not None else None
        if token is None:
            token = HandleCount(
                ProcessId(self.process.process), actor.object_id,
                functools.partial(self.process.loop.call_soon_threadsafe, self._unheld, actor),
            )  # fmt: skip
            actor.token = weakref.ref(token)
            self._exports[actor.object_id] = token
        return token

    def place_of(self, process: ProcessId) -> str:
        """The place of a worker, as handles state it; empty for a worker that does not listen."""
        return place_of(self._addresses.get(process, ""))

    def revive(self, object_id: int) -> HandleCount | None:
        """The count that all holders of an actor share, found by the actor's object id and made anew where no process
        holds the actor at the moment; None where the actor is unknown."""
        actor = self._actors.of_object(object_id)
        return None if actor is None else self.token_of(actor)

    def lease(self, session: Session, held: Sequence[int]) -> list[int]:
        """Lease the actors with these object ids to the peer of `session`, which holds them. Returns those that
        live."""
        living = []
        for object_id in held:
            token = self.revive(object_id)
            if token is not None:
                with session.lock:
                    session.leases.grant(object_id, token)
                living.append(object_id)
        return living

    def tell_holders(self, actor: ActorRecord) -> None:
        """Tell the holders of leases on an actor about its change: its node was lost, or it lives elsewhere now. Their
        connections to its old place may not end by themselves."""
        self.process.tasks.start(self._tell_holders(actor))

    async def _tell_holders(self, actor: ActorRecord) -> None:
        try:
            await self._recorder.noted()
        except Deposed as error:
            logger.debug("another head tells the holders of %s: %s", actor.label, error)
            return
        for session in list(self.process.sessions.all()):
            leased = session.closed is None and session.leases.get(actor.object_id) is not None
            if leased and not session.is_replaced:  # twins share their leases
                self.process.tasks.start(
                    self._tell_holder(session, (actor.actor_id, actor.state, *actor.location, actor.cause))
                )

    async def _tell_holder(self, session: Session, change: tuple[ActorId, str, bytes, int, str]) -> None:
        await dawdle("tell holder")
        try:
            await self._recorder.order(self.process.requests, session.in_use, HeadNews.actor_changed, *change)
        except ZcactorError as error:  # the holder has ended, or knows a later head
            logger.debug("a holder was not told where an actor is: %s", error)
