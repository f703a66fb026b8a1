"""The reasons why a spawn waits, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zcactor.control.actor_record import ActorRecord
    from zcactor.control.scheduler import Ledger

__all__ = ["waits"]

_NAMED = 3
"""Actors that a line names."""


def waits(pending: Iterable[ActorRecord], ledger: Ledger, actors: Iterable[ActorRecord]) -> str:
    """The reasons why these spawns wait, as a line: each reason once, with the number of spawns.

    Args:
        pending: actors of one class that do not live yet.
        ledger: the resources of the nodes.
        actors: all actors, some of which hold the missing resources.
    """
    reasons: dict[object, list[ActorRecord]] = {}
    for actor in pending:
        key = frozenset(actor.request.items()) if actor.node is None else _on_its_node(actor)
        reasons.setdefault(key, []).append(actor)
    return "; ".join(_line(each, ledger, actors) for each in reasons.values())


def _line(alike: list[ActorRecord], ledger: Ledger, actors: Iterable[ActorRecord]) -> str:
    actor = alike[0]
    missing = _shortage(actor, ledger, actors) if actor.node is None else _on_its_node(actor)
    if len(alike) == 1:
        return f"{actor.class_name} waits for {missing}"
    return f"{len(alike):,} spawns of {actor.class_name} wait, each for {missing}"


def _on_its_node(actor: ActorRecord) -> str:
    """The reason why an actor waits that has been placed."""
    return "its process to start" if actor.worker is None or not actor.worker.ready.done() else "its constructor"


def _shortage(actor: ActorRecord, ledger: Ledger, actors: Iterable[ActorRecord]) -> str:
    """The resources of an actor's request that are not free, and the actors that hold them."""
    total, free = ledger.total(), ledger.free()
    short = {name: amount for name, amount in actor.request.items() if free.get(name, 0.0) < amount}
    wanted = ", ".join(f"{amount:g} {name}" for name, amount in (short or actor.request).items())
    if not short:  # no node has all of it at once, or earlier requests were first
        return f"{wanted} on one node" + ("; shares of several GPUs do not add up" if "GPU" in actor.request else "")
    held = []
    for name in short:
        holders = [other.label for other in actors if other.node is not None and name in other.request]
        by = ", ".join(holders[:_NAMED]) + (f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else "")
        unit = f" {name}" if len(short) > 1 else ""
        used = total.get(name, 0.0) - free.get(name, 0.0)
        held.append(f"{used:g} of {total.get(name, 0.0):g}{unit} held by {by or 'nobody'}")
    return f"{wanted}: {'; '.join(held)}"
