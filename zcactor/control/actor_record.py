"""The head's record of one actor, and the count of its handles, which keeps the actor alive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Literal

from zcactor import ids
from zcactor.control.scheduler import request_of
from zcactor.exception_pickling import shown
from zcactor.interface import Interface
from zcactor.options import ActorSpec

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping

    from zcactor.control.node_table import NodeRecord
    from zcactor.ids import ActorId, ProcessId
    from zcactor.marshal.packed import Packed
    from zcactor.rpc.session import Session
    from zcactor.workers.worker_table import WorkerRecord

__all__ = ["CRASH_LOOP", "FIRST_PAUSE", "LONGEST_PAUSE", "PROVEN", "ActorRecord", "ActorState", "HandleCount"]

CRASH_LOOP = 3
"""The number of times in a row that an actor may end before its constructor has returned."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before the first restart, doubled for each further one, and their bound: an actor that dies of a repeated
call would otherwise keep a core busy with its starts."""
PROVEN = 60.0
"""Seconds of life after which an actor's next pause is the first one again."""


ActorState = Literal["pending", "alive", "restarting", "dead"]
"""The states of an actor at the head: before its constructor has returned, between two lives, and after its end."""
_NEXT: Final[Mapping[str, frozenset[ActorState]]] = {
    "pending": frozenset({"pending", "alive", "restarting", "dead"}),
    "alive": frozenset({"alive", "restarting", "dead"}),
    "restarting": frozenset({"restarting", "alive", "dead"}),
    "dead": frozenset(),
}
"""The states that may follow each state. Another one is a defect of the caller's."""


class HandleCount:
    """An object that exists as long as any process holds a handle of the actor: leases on the actor are leases on this
    object.

    Args:
        owner: the node agent's process id.
        object_id: the id by which peers know the actor.
        gone: called, on any thread, when no process holds the actor.
    """

    __slots__ = ("__weakref__", "_gone", "object_id", "owner")

    def __init__(self, owner: ProcessId, object_id: int, gone: Callable[[], object]) -> None:
        self.owner = owner
        self.object_id = object_id
        self._gone = gone

    def grant(self, session: Session) -> tuple[bytes, int, int]:
        """A lease for the session's peer."""
        session.leases.grant(self.object_id, self)
        return self.owner, self.object_id, 0

    def __del__(self) -> None:
        self._gone()


class ActorRecord:
    """The head's record of one actor.

    Args:
        spec: its options.
        class_name: of its class, which the head need not be able to import.
        interface: the result of `Interface.wire`.
        owner: process id of its spawner.
        object_id: the id by which peers hold it; unique at this head.
        actor_id: its name among processes; by default a new one.
    """

    def __init__(
        self, spec: ActorSpec, class_name: str, interface: Any, owner: ProcessId, object_id: int,
        actor_id: ActorId | None = None,
    ) -> None:  # fmt: skip
        self.actor_id = actor_id or ids.new_actor()
        self.number = 0
        """Its number among the actors of a head, in the order of their spawns."""
        self.object_id = object_id
        self.spec = spec
        self.class_name = shown(class_name)
        self.interface: Interface | None = Interface.from_wire(interface)
        self.owner = owner
        self.name, self.namespace = spec.name, spec.namespace
        self.state: str = "pending"
        """An `ActorState`; a plain string for mypy, which narrows the other type across awaits."""
        self.worker: WorkerRecord | None = None
        self.planned: ProcessId | None = None
        """The process id that its first worker will have; None before it has a place, and once it has a worker."""
        self.index = 0
        """The actor's number in `worker`."""
        self.location = (b"", 0)
        """Process and index of the actor; those of its last life while it is being restarted: callers must not find the
        new process before the actor is in it."""
        self.cause = ""
        self.restarts = 0
        self.recipe: Packed | None = None
        """Its class and arguments; None for an actor that is never started again, and where agents hold them."""
        self.request = request_of(spec)
        self.node: NodeRecord | None = None
        """The actor's node, once it has been placed; the resources of its request are taken there."""
        self.node_id = ""
        """The id of that node, also after the actor has left it."""
        self.gpus: tuple[int, ...] = ()
        """The numbers of its GPUs on that node, until they are given back."""
        self.destination: tuple[NodeRecord, tuple[int, ...]] | None = None
        """The node to which the actor moves, with the numbers of its GPUs there; its request is taken there as well."""
        self.moving: asyncio.Future[None] | None = None
        """Done when the actor's move has ended; None while it does not move."""
        self.starting = False
        """Whether it has a place and its spawner does not know it yet, so that it may get another one."""
        self.displaced = False
        """Whether its node was lost and the actor lives on no other yet."""
        self.told = False
        """Whether its spawner was told why the spawn waits."""
        self.withdraw: Callable[[], None] | None = None
        self.token: weakref.ref[HandleCount] | None = None
        self.ending: asyncio.Task[None] | None = None
        """The task that stops the actor, once a stop has begun."""
        self.gone: asyncio.Future[str] | None = None
        """Done when the process has ended that a dead actor had for itself."""
        self.asked = b""
        """The id of the request for its place."""
        self.recorded = False
        """Whether the head's log has an entry of it, or is about to."""
        self.recipe_holders: list[bytes] = []
        """The processes that hold its recipe: agents of nodes, or the head alone; empty where the log does."""
        self.recipe_nbytes = self.recipe_key = 0
        """The bytes of a recipe that agents hold, and its number there."""
        self.doomed = 0
        """The number of decisions to end it that are being recorded; it is not restarted meanwhile."""
        self.withdrawn = False
        """Whether its spawn was given up before it was answered; a repeated request may make it anew."""
        self._last_pid = 0
        self._changed: asyncio.Event | None = None
        """Made for the first waiter."""
        self._failed_starts = 0
        self._alive_since: float | None = None
        self._next_pause = FIRST_PAUSE

    @property
    def label(self) -> str:
        """The actor's name in messages."""
        return f"{self.class_name}({shown(self.name) if self.name else self.actor_id.hex()[:8]})"

    @property
    def pid(self) -> int:
        """The pid of its process, or of its last one; 0 before it has one."""
        return self.worker.pid if self.worker is not None else self._last_pid

    @property
    def detached(self) -> bool:
        """Whether the actor outlives its owner and its handles."""
        return self.spec.lifetime == "detached"

    def set_state(self, state: ActorState, cause: str = "") -> None:
        """Change the state, and wake the waiters.

        Raises:
            ValueError: the state cannot follow the present one.
        """
        if state not in _NEXT[self.state]:
            raise ValueError(f"{self.label} is {self.state}, and cannot be {state} next")
        if state == "alive":
            self._failed_starts = 0
        self.state = state
        if cause:
            self.cause = cause
        self.wake()

    def wake(self) -> None:
        """Wake the waiters, who look again."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def changed(self) -> None:
        """Wait for the next `set_state` or `wake`."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def settled(self) -> None:
        """Wait until the actor is alive or dead."""
        while self.state in ("pending", "restarting"):
            await self.changed()

    async def decided(self) -> None:
        """Wait until no decision to end the actor is being recorded. An entry of its life must not follow its end in
        the log: a later head would start it again."""
        while self.doomed:
            await self.changed()

    def leave_worker(self) -> None:
        """Note that the actor is closed in its process, and has no other yet."""
        self._last_pid = self.pid
        self.worker = self._alive_since = None

    def strip(self) -> None:
        """Keep only the facts that inspection shows of dead actors: thousands of them are remembered."""
        self._last_pid = self.pid
        self.gone = None if self.worker is None or self.worker.shared else self.worker.ended
        self.worker = self.recipe = self.interface = self.token = self.withdraw = None
        self.spec = ActorSpec(self.namespace, self.name)
        self.recorded = False

    def may_restart(self, *, is_held: bool = False) -> bool:
        """Whether the actor's options allow another start, now that its process has ended.

        Args:
            is_held: whether agents hold its class and arguments, so that the head need not have them.
        """
        limit = self.spec.max_restarts
        return (
            (self.recipe is not None or is_held)
            and self.ending is None
            and not self.doomed
            and self.state in ("alive", "restarting")
            and (limit < 0 or self.restarts < limit)
        )

    def note_death(self, now: float) -> float | None:
        """Note the end of the process of an actor that may restart. Returns the seconds to wait before the restart;
        None to give the actor up.

        The actor is given up after `CRASH_LOOP` ends in a row before its constructor had returned: a constructor that
        kills its process does so again.

        Args:
            now: seconds on a clock that does not jump.
        """
        if self.state == "restarting" and self._alive_since is None:  # otherwise it was about to move
            self._failed_starts += 1
            if self._failed_starts >= CRASH_LOOP:
                return None
        if self._alive_since is not None and now - self._alive_since >= PROVEN:
            self._next_pause = FIRST_PAUSE
        self._alive_since = None
        pause = self._next_pause
        self._next_pause = min(2 * pause, LONGEST_PAUSE)
        return pause

    def note_life(self, now: float) -> None:
        """Note that the constructor has returned. `now` is as for `note_death`."""
        self._alive_since = now
