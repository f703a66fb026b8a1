"""The records of actors as a new head makes them from the log of an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.control.actor_record import ActorRecord
from zcactor.ids import ActorId, ProcessId
from zcactor.marshal.packed import Packed

if TYPE_CHECKING:
    from zcactor.control.entries import Entries

__all__ = ["restored"]

_UNSEEN: Final = "its node has not reported to the cluster's new head yet"


def restored(entries: Entries) -> dict[ActorRecord, str]:
    """The actors of a log in the order of their spawns, each with its state in the log.

    Their own state is ``"pending"`` or ``"restarting"``, so that callers wait until it is known what became of them.
    A recipe that the earlier head alone has held is lost, and one that agents hold stays there; see
    `zcactor.control.recipes.Recipes`.
    """
    found: dict[ActorRecord, str] = {}
    for key, entry in sorted(entries.actors.items(), key=lambda item: item[1].number):
        actor = ActorRecord(
            dict(entry.options), entry.class_name, entry.interface, ProcessId(entry.owner), entry.object_id,
            ActorId(bytes.fromhex(key)),
        )  # fmt: skip
        actor.asked, actor.restarts, actor.recorded = entry.request, entry.restarts, True
        actor.node_id, actor.gpus = entry.node, entry.gpus
        actor.location = (entry.worker, entry.index)
        if entry.recipe is not None:
            actor.recipe_holders = list(entry.recipe.holders)
            actor.recipe_nbytes, actor.recipe_key = entry.recipe.nbytes, entry.recipe.key
            payload = entries.recipes.get(key)
            actor.recipe = None if payload is None else Packed(payload, (), entry.recipe.flags)
        if entry.state != "pending":
            actor.set_state("restarting", _UNSEEN)
        found[actor] = entry.state
    return found
