"""The records of actors from a log."""

from __future__ import annotations

from typing import Any

from tests.control.test_actor_table import WIRE, X
from zcactor.control.actor_record import ActorRecord
from zcactor.control.entries import actor_change, read, reserved_changes
from zcactor.control.head import restored
from zcactor.control.head_log import Change, applied
from zcactor.ids import ProcessId
from zcactor.marshal.packed import Packed
from zcactor.options import ActorSpec

HERE = ProcessId(b"h" * 16)


def record(number: int, **options: Any) -> ActorRecord:
    """A record of an actor that `X` has made."""
    return ActorRecord(ActorSpec("default", **options), "Shop", WIRE, X, number)


def log_of(*actors: tuple[ActorRecord, str], max_recipe: int = 1000) -> dict[str, dict[str, bytes]]:
    """The entries of a log that has actors in these states."""
    state: dict[str, dict[str, bytes]] = {}
    for actor, now in actors:
        changes: list[Change] = [*reserved_changes(actor, max_recipe, HERE), actor_change(actor, now)]
        state = applied(state, changes)
    return state


async def test_an_actor_is_as_the_log_has_it() -> None:
    actor = record(7, name="shop", max_restarts=3)
    actor.number, actor.restarts, actor.asked = 4, 2, b"request"
    actor.node_id, actor.gpus, actor.index = "ab", (1,), 5
    actor.recipe = Packed(b"class and arguments", (), 3)
    other = record(8)
    other.number = 1
    found = restored(read(log_of((actor, "alive"), (other, "pending"))))
    assert list(found.values()) == ["pending", "alive"], "in the order of their spawns"
    waiting, again = found
    assert (waiting.state, waiting.recipe, waiting.object_id) == ("pending", None, 8)
    assert (again.actor_id, again.object_id, again.owner) == (actor.actor_id, 7, actor.owner)
    assert (again.name, again.namespace, again.class_name) == ("shop", actor.namespace, actor.class_name)
    assert (again.restarts, again.asked, again.recorded) == (2, b"request", True)
    assert (again.node_id, again.gpus, again.location) == ("ab", (1,), (b"", 5))
    assert again.state == "restarting", "callers wait until its node has reported"
    assert again.recipe is not None
    assert (again.recipe.payload, again.recipe.flags) == (b"class and arguments", 3)
    assert again.may_restart()


async def test_a_recipe_that_the_head_has_held_is_lost() -> None:
    actor = record(7, max_restarts=3)
    actor.recipe = Packed(b"x" * 100, (), 0)
    (again,) = restored(read(log_of((actor, "alive"), max_recipe=10)))
    assert again.recipe is None
    assert again.recipe_holders == [HERE]
    assert not again.may_restart()
