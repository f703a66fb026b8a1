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
        number: its number in the table, in the order of spawns.
        withdrawn: whether its spawn was given up before it was answered.
        object_id: the id by which handles hold it.
    """

    actor_id: ActorId
    object_id: int
    owner: ProcessId
    number: int
    name: str | None
    namespace: str
    class_name: str
    state: str
    withdrawn: bool
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
        self._count = 0

    def add(self, actor: Record) -> None:
        """Add an actor, which is not dead, and hold its name for it. A dead one of the same id is forgotten."""
        self._count += 1
        actor.number = self._count
        if actor.actor_id in self._by_id:
            self._dead.remove(actor.actor_id)
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

    def answered(self, actor_id: ActorId, object_id: int, owner: ProcessId) -> Record | None:
        """The actor for whose place `owner` asks again; None where these ids are new, or the first request was given
        up.

        Raises:
            ValueError: another actor has one of the ids, or they are no ids.
        """
        if len(actor_id) != 16 or not 0 < object_id <= 1 << 62:
            raise ValueError(f"{actor_id.hex()} and {object_id:x} are no ids of an actor: 16 bytes, and 1 to 2**62")
        actor = self._by_id.get(actor_id)
        if actor is not None and (actor.object_id, actor.owner) == (object_id, owner):
            return None if actor.withdrawn else actor
        if actor is not None or object_id in self._by_object:
            raise ValueError(f"an actor cannot have the ids {actor_id.hex()} and {object_id:x}: another one has them")
        return None

    def of_object(self, object_id: int) -> Record | None:
        """The living actor that handles hold by that object id."""
        return self._by_object.get(object_id)

    def made_by(self, *processes: ProcessId) -> list[Record]:
        """The actors of these processes that are not dead, oldest first."""
        made = [actor for process in processes for actor in self._by_maker.get(process, ())]
        return sorted(made, key=lambda actor: actor.number)

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
