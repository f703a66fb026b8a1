"""What the node agent keeps of an actor, and what keeps an actor alive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from zcactor import ids
from zcactor.interface import Interface, shown
from zcactor.runtime.resources import request_of

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from zcactor.marshal.sealed import Sealed
    from zcactor.rpc.session import Session
    from zcactor.runtime.nodes import NodeRecord
    from zcactor.runtime.pool import WorkerRecord

__all__ = ["CRASH_LOOP", "FIRST_PAUSE", "LONGEST_PAUSE", "PROVEN", "ActorRecord", "ActorToken"]

CRASH_LOOP = 3
"""How often in a row an actor may end before its constructor has returned."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds before the first restart, doubled for each further one, and their bound: an actor that dies of a call that is
made again and again would otherwise keep a core busy with starting it."""
PROVEN = 60.0
"""Seconds of life after which an actor's next pause is the first one again."""


class ActorToken:
    """Exists as long as anybody holds a handle of the actor; leases on the actor are leases on this.

    Args:
        owner: the node agent's process id.
        object_id: under which peers know the actor.
        gone: called, on whichever thread, when nobody holds the actor any more.
    """

    __slots__ = ("__weakref__", "_gone", "object_id", "owner")

    def __init__(self, owner: bytes, object_id: int, gone: Callable[[], object]) -> None:
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
    """What the agent knows of one actor.

    Args:
        options: as given by its spawner.
        class_name: of its class, which the agent need not be able to import.
        interface: what `Interface.wire` gives.
        owner: process id of its spawner.
        object_id: under which peers hold it; unique at this agent.
    """

    def __init__(self, options: dict[str, Any], class_name: str, interface: Any, owner: bytes, object_id: int) -> None:
        self.actor_id = ids.token()
        self.object_id = object_id
        self.options = options
        self.class_name = shown(class_name)
        self.interface: Interface | None = Interface.from_wire(interface)
        self.owner = owner
        self.name: str | None = options.get("name")
        self.namespace: str = options["namespace"]
        self.state = "pending"
        """pending, alive, restarting, dead"""
        self.worker: WorkerRecord | None = None
        self.index = 0
        """In `worker`."""
        self.location = (b"", 0)
        """Process and index where it is, or where it was while it is being restarted: callers must not find the new
        process before the actor is in it."""
        self.cause = ""
        self.restarts = 0
        self.recipe: Sealed | None = None
        self.request = request_of(options)
        self.node: NodeRecord | None = None
        """Where it is, once it has been placed; what it asked for is taken there."""
        self.node_id = ""
        """Of that node, also when it has left it."""
        self.displaced = False
        """Its node was lost, and it lives nowhere else yet."""
        self.told = False
        """Whether its spawner was told for what it waits."""
        self.withdraw: Callable[[], None] | None = None
        self.token: weakref.ref[ActorToken] | None = None
        self.ending: asyncio.Task[None] | None = None
        """The task that stops it, once it is being stopped."""
        self._last_pid = 0
        self._changed: asyncio.Event | None = None
        """Made when somebody waits."""
        self._failed_starts = 0
        self._alive_since: float | None = None
        self._next_pause = FIRST_PAUSE

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.class_name}({shown(self.name) if self.name else self.actor_id.hex()[:8]})"

    @property
    def pid(self) -> int:
        """Of its process, or of its last one; 0 before it has one."""
        return self.worker.pid if self.worker is not None else self._last_pid

    @property
    def detached(self) -> bool:
        """Whether it outlives its owner and its handles."""
        return self.options.get("lifetime") == "detached"

    def set_state(self, state: str, cause: str = "") -> None:
        """Move on and wake who waits."""
        if state == "alive":
            self._failed_starts = 0
        self.state = state
        if cause:
            self.cause = cause
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def changed(self) -> None:
        """Wait for the next `set_state`."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    async def settled(self) -> None:
        """Wait until the actor is alive or dead."""
        while self.state in ("pending", "restarting"):
            await self.changed()

    def strip(self) -> None:
        """Keep only what is told of the dead: thousands of them are remembered."""
        self._last_pid = self.pid
        self.worker = self.recipe = self.interface = self.token = self.withdraw = None
        self.options = {}

    def may_restart(self) -> bool:
        """Whether its options allow another start, now that its process has ended."""
        limit: int = self.options.get("max_restarts") or 0
        return (
            self.recipe is not None
            and self.ending is None
            and self.state in ("alive", "restarting")
            and (limit < 0 or self.restarts < limit)
        )

    def note_death(self, now: float) -> float | None:
        """Its process has ended and it may be restarted: the seconds to wait before that, None to give up.

        It is given up when it has ended `CRASH_LOOP` times in a row before its constructor had returned: a constructor
        that kills its process does so again.

        Args:
            now: seconds on a clock that does not jump.
        """
        if self.state == "restarting":
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
        """Its constructor has returned. `now` is as for `note_death`."""
        self._alive_since = now
