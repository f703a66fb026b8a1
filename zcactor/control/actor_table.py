"""The actors that the head knows: by id, by name, by the process that made them and by the object that handles hold."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from zcactor.errors import NoSuchActor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.ids import ActorId, ProcessId

__all__ = ["ActorTable", "Entry"]

_REMEMBERED: Final = 2_000
"""Dead actors whose cause of death is remembered."""


class Entry(Protocol):
    """The facts of an actor by which it is found, and those that inspection shows; see `zcactor.control.actor_record`.

    Attributes:
        owner: process id of its spawner.
        object_id: the id by which handles hold it.
    """

    actor_id: ActorId
    object_id: int
    owner: ProcessId
    name: str | None
    namespace: str
    class_name: str
    state: str
    node_id: str
    restarts: int
    cause: str

    @property
    def pid(self) -> int:
        """The pid of its process, or of its last one; 0 before it has one."""

    def strip(self) -> None:
        """Keep only the facts that inspection shows of dead actors."""


Record = TypeVar("Record", bound=Entry)


class ActorTable(Generic[Record]):
    """The index of the actors. No step walks all of them."""

    def __init__(self) -> None:
        self._by_id: dict[ActorId, Record] = {}
        self._by_object: dict[int, Record] = {}
        self._by_name: dict[tuple[str, str], Record] = {}
        self._by_maker: dict[ProcessId, dict[Record, None]] = {}
        """Without dead actors."""
        self._dead: deque[ActorId] = deque()

    def add(self, actor: Record) -> None:
        """Add an actor, which is not dead, and hold its name for it."""
        self._by_id[actor.actor_id] = actor
        self._by_object[actor.object_id] = actor
        self._by_maker.setdefault(actor.owner, {})[actor] = None
        if actor.name is not None:
            self._by_name[actor.namespace, actor.name] = actor

    def bury(self, actor: Record) -> None:
        """Note an actor's death: free its name, and remember only the facts that inspection shows, for a while."""
        if actor.name is not None and self._by_name.get((actor.namespace, actor.name)) is actor:
            del self._by_name[actor.namespace, actor.name]
        self._by_object.pop(actor.object_id, None)
        made = self._by_maker.get(actor.owner, {})
        made.pop(actor, None)
        if not made:
            self._by_maker.pop(actor.owner, None)
        actor.strip()
        self._dead.append(actor.actor_id)
        if len(self._dead) > _REMEMBERED:
            self._by_id.pop(self._dead.popleft(), None)

    def all(self) -> Iterable[Record]:
        """The living actors, and the remembered dead ones."""
        return self._by_id.values()

    def get(self, actor_id: ActorId) -> Record | None:
        """The actor with that id; None for an unknown id."""
        return self._by_id.get(actor_id)

    def known(self, actor_id: ActorId) -> Record:
        """The actor with that id.

        Raises:
            NoSuchActor: the id is unknown.
        """
        actor = self._by_id.get(actor_id)
        if actor is None:
            raise NoSuchActor(f"actor {actor_id.hex()[:8]} is unknown to this node")
        return actor

    def of_object(self, object_id: int) -> Record | None:
        """The living actor that handles hold by that object id."""
        return self._by_object.get(object_id)

    def made_by(self, process: ProcessId) -> list[Record]:
        """The actors of a process that are not dead, oldest first."""
        return list(self._by_maker.get(process, ()))

    def named(self, namespace: str, name: str) -> Record:
        """The actor of that name.

        Raises:
            NoSuchActor: no living actor has the name; the message lists the names in the namespace.
        """
        actor = self._by_name.get((namespace, name))
        if actor is None:
            known = ", ".join(sorted(n for space, n in self._by_name if space == namespace)) or "none"
            raise NoSuchActor(f"no actor named {name!r} lives in namespace {namespace!r} (named actors there: {known})")
        return actor

    def holder_of(self, namespace: str, name: str | None) -> Record | None:
        """The actor that holds a name; None for a free name, and for None."""
        return None if name is None else self._by_name.get((namespace, name))

    def told(self) -> list[dict[str, Any]]:
        """The facts of all actors, as inspection shows them."""
        return [
            {
                "actor_id": actor.actor_id.hex(), "class_name": actor.class_name, "name": actor.name,
                "namespace": actor.namespace, "state": actor.state, "node_id": actor.node_id,
                "pid": actor.pid, "restarts": actor.restarts,
                "cause": actor.cause,
            }
            for actor in self._by_id.values()
        ]  # fmt: skip
