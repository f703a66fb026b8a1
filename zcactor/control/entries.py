"""The entries of the head's log, of each kind, as a later head reads them.

| kind | key | value |
|---|---|---|
| ``cluster`` | ``state`` (`CLUSTER_KEY`) | `ClusterEntry` |
| ``member`` | the process id of a node's agent, hex | `MemberEntry` |
| ``driver`` | the process id of a program that has joined, hex | `DriverEntry` |
| ``actor`` | actor id, hex | `ActorEntry` |
| ``name`` | `name_key` | the actor id, 16 bytes |
| ``recipe`` | actor id, hex | the packed class and arguments, as they came |

Not recorded, because members report it again: the addresses of workers, whether a recorded actor's process still runs,
the resources in use and the output of workers. A new head makes its table of actors from the entries, and the ledger
from the nodes, requests and GPUs that they name, as far as the members report those actors.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from zcactor.control.head_log import MAX_NBYTES, Change, nbytes_of
from zcactor.exception_pickling import shown
from zcactor.options import ActorSpec  # noqa: TC001  # msgspec resolves the annotation
from zcactor.transport.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.head_log import HeadState
    from zcactor.ids import ProcessId

__all__ = [
    "CLUSTER_KEY", "ActorEntry", "ClusterEntry", "DriverEntry", "Entries", "MemberEntry", "RecipeAt", "actor_change",
    "closed_change", "driver_change", "emptying_changes", "gone_changes", "member_change", "name_key", "opened_change",
    "read", "reserved_changes", "stopping_changes",
]  # fmt: skip

_ID: Final = re.compile("[0-9a-f]{32}")
CLUSTER_KEY: Final = "state"
"""The key of the only entry of its kind."""


class ClusterEntry(msgspec.Struct, frozen=True):
    """The cluster itself."""

    closed: bool
    """Whether it has ended in order, so that a head which starts later begins a new one."""
    cluster: bytes = b""
    """Its id, which is the process id of each of its heads."""
    address: str = ""
    """``host:port`` of its head."""
    protocol: int = 0
    """The `PROTOCOL_VERSION` of its heads. Interfaces and recipes are in the log as they travel."""


class MemberEntry(msgspec.Struct, frozen=True):
    """A node that has joined and is not given up."""

    facts: dict[str, Any]
    """See `zcactor.control.node_table.facts_of`."""
    resources: dict[str, float]


class DriverEntry(msgspec.Struct, frozen=True):
    """A program that has joined and whose connection has not ended."""

    address: str
    machine: str


class RecipeAt(msgspec.Struct, frozen=True):
    """The place of a recipe: in the log, or with processes, where it is large or has arrays in it."""

    flags: int
    """The flags of its payload."""
    holders: list[bytes]
    """The process ids of those that hold it: agents of nodes, or the head alone. Empty where the log has it."""
    nbytes: int = 0
    """Its bytes at those agents, arrays included."""
    key: int = 0
    """Its number there."""


class ActorEntry(msgspec.Struct, frozen=True):
    """An actor that is not dead.

    Attributes:
        state: ``"pending"`` from its reservation on, ``"alive"`` once its constructor has returned, ``"restarting"``
            between two lives, ``"stopping"`` once its end has been decided: it is not restarted then.
        request: id of the spawner's request, which is answered alike when it is repeated.
        object_id: the id by which processes hold it.
        owner: process id of its spawner.
        number: its number among the actors of the cluster, in the order of their spawns.
        options: as its spawner gave them.
        interface: the result of `zcactor.interface.Interface.wire`.
        restarts: how often it was started again.
        node: the id of its node; its resources are taken there.
        gpus: the numbers of its GPUs there.
        worker: process id of its worker; empty before it has one.
        index: its number in that worker.
        recipe: where its class and arguments are; None for an actor that is never started again.
    """

    state: str
    request: bytes
    object_id: int
    owner: bytes
    number: int
    options: ActorSpec
    class_name: str
    interface: bytes
    restarts: int
    node: str
    gpus: tuple[int, ...]
    worker: bytes
    index: int
    recipe: RecipeAt | None


class Entries(NamedTuple):
    """All entries of a log."""

    cluster: ClusterEntry | None
    members: dict[str, MemberEntry]
    drivers: dict[str, DriverEntry]
    actors: dict[str, ActorEntry]
    names: dict[str, bytes]
    recipes: dict[str, bytes]

    @property
    def closed(self) -> bool:
        """Whether the cluster has ended in order."""
        return self.cluster is not None and self.cluster.closed


def _plain(value: Any) -> Any:
    """A value of an option as a plain one: numbers of NumPy, for instance, and mappings of other types."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an option has a value of type {type(value).__name__}, which cannot be recorded")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_actor: Final = msgspec.msgpack.Decoder(ActorEntry).decode


def name_key(namespace: str, name: str) -> str:
    """The key of a name's entry: no two names in any namespaces have the same."""
    return f"{len(namespace)}:{namespace}{name}"


def member_change(process: ProcessId, facts: Mapping[str, Any], resources: Mapping[str, float]) -> Change:
    """The change that a node has joined, by the process id of its agent."""
    return Change("member", process.hex(), _encode(MemberEntry(dict(facts), dict(resources))))


def driver_change(process: ProcessId, address: str, machine: str) -> Change:
    """The change that a program has joined."""
    return Change("driver", process.hex(), _encode(DriverEntry(address, machine)))


def opened_change(cluster: ProcessId, address: str) -> Change:
    """The change that a cluster has a head, at `address`."""
    return Change("cluster", CLUSTER_KEY, _encode(ClusterEntry(False, cluster, address, PROTOCOL_VERSION)))


def closed_change() -> Change:
    """The change that the cluster has ended in order."""
    return Change("cluster", CLUSTER_KEY, _encode(ClusterEntry(closed=True)))


def actor_change(actor: ActorRecord, state: str) -> Change:
    """The change that an actor is in `state`."""
    worker = actor.planned or b"" if actor.worker is None else actor.worker.process
    entry = ActorEntry(
        state, actor.asked, actor.object_id, actor.owner, actor.number, actor.spec, actor.class_name,
        b"" if actor.interface is None else actor.interface.wire(), actor.restarts, actor.node_id, actor.gpus,
        worker, actor.index,
        _recipe_at(actor),
    )  # fmt: skip
    return Change("actor", actor.actor_id.hex(), _encode(entry))


def _recipe_at(actor: ActorRecord) -> RecipeAt | None:
    recipe, holders = actor.recipe, actor.recipe_holders
    if recipe is None and not holders:
        return None
    return RecipeAt(0 if recipe is None else recipe.flags, list(holders), actor.recipe_nbytes, actor.recipe_key)


def reserved_changes(actor: ActorRecord, max_recipe: int, here: ProcessId) -> list[Change]:
    """The changes that an actor has a place: its entry, its name, and its recipe where the log takes it.

    Args:
        actor: its record, of which this notes who holds the recipe.
        max_recipe: bytes of a recipe that the log takes, as far as one batch has room for it.
        here: process id of the head, which holds any other one, unless agents do.

    Raises:
        ValueError: the options are larger than what a log takes.
    """
    key, recipe = actor.actor_id.hex(), actor.recipe
    actor.recipe_holders = [] if recipe is None else [here]
    changes = [actor_change(actor, "pending")]
    if actor.name is not None:
        changes.append(Change("name", name_key(actor.namespace, actor.name), actor.actor_id))
    nbytes = sum(map(nbytes_of, changes))
    if nbytes > MAX_NBYTES:
        size = sum(len(name) + len(value) for name, value in actor.spec.env.items())
        raise ValueError(
            f"the environment of an actor has {size} bytes; all of its options and its interface have {nbytes}, and at "
            f"most {MAX_NBYTES} are possible"
        )
    if recipe is not None and not recipe.parts:
        most = min(max_recipe, MAX_NBYTES - nbytes - len(key))
        if len(recipe.payload) <= most:
            actor.recipe_holders = []
            changes[0] = actor_change(actor, "pending")  # a shorter entry
            changes.append(Change("recipe", key, recipe.payload))
    return changes


def stopping_changes(actor: ActorRecord) -> list[Change]:
    """The changes that an actor is about to be stopped: it is not restarted from now on."""
    return [actor_change(actor, "stopping")]


def gone_changes(actor: ActorRecord) -> list[Change]:
    """The changes that an actor is dead: its name is free."""
    key = actor.actor_id.hex()
    changes = [Change("actor", key, None)]
    if actor.name is not None:
        changes.append(Change("name", name_key(actor.namespace, actor.name), None))
    if actor.recipe is not None and not actor.recipe_holders:
        changes.append(Change("recipe", key, None))
    return changes


def emptying_changes(state: HeadState) -> list[Change]:
    """The changes after which a log is empty."""
    return [Change(kind, key, None) for kind, entries in state.items() for key in entries]


def read(state: HeadState) -> Entries:
    """The entries of a log.

    Raises:
        msgspec.DecodeError: an entry is not in the form that this version writes.
    """
    decode = msgspec.msgpack.decode
    for kind in ("member", "driver", "actor"):
        for key in state.get(kind, {}):
            if not _ID.fullmatch(key):
                raise msgspec.ValidationError(f"a {kind} is called {shown(key)!r}, which is no id")
    cluster = state.get("cluster", {}).get(CLUSTER_KEY)
    return Entries(
        None if cluster is None else decode(cluster, type=ClusterEntry),
        {key: decode(value, type=MemberEntry) for key, value in state.get("member", {}).items()},
        {key: decode(value, type=DriverEntry) for key, value in state.get("driver", {}).items()},
        {key: _actor(value) for key, value in state.get("actor", {}).items()},
        dict(state.get("name", {})),
        dict(state.get("recipe", {})),
    )
